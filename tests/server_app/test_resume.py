"""What is settled before the first run trains: whether a run may go on, whether a folder is free, who fits the method."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import server_app.app
from server_app import cli, launch
from server_app.checkpoint import write_text
from server_app.resume import CheckpointError, check_resume, is_free
from server_app.settings import SettingsError
from strategies import fleet
from strategies.fleet import FleetError
from tests.fleet_fixture import config, grid, pictures, rows, run
from tests.server_app.commands import run as command

BN = "tests.user_models:batch_norm_net"  # its representation has 12 numbers


def _main(run_config: dict[str, Any], nodes: int = 3) -> None:
    server_app.app.main(grid(run_config, nodes), SimpleNamespace(run_config=run_config, run_id=7))  # type: ignore[arg-type]


@pytest.fixture
def finished(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """Return the config and the folder of a finished run of two rounds on three nodes, with its checkpoint."""
    settings = {**config(tmp_path, strategy="fedavg"), "out-dir": str(tmp_path / "out")}
    _main(settings)
    return settings, tmp_path / "out"


def test_a_refused_resume_leaves_what_the_finished_run_says_of_itself(finished: tuple[dict[str, Any], Path]) -> None:
    settings, out = finished
    before = {name: (out / name).read_bytes() for name in ("status.json", "run.json", "metrics.jsonl")}
    assert json.loads(before["status.json"])["state"] == "completed"
    again = {**settings, "resume": str(out)}
    for changes, nodes, words in (
        ({"train.momentum": 0.1}, 3, r"train.momentum: 0.9 then, 0.1 now"),
        ({"num-rounds": 1}, 3, r"num-rounds = 1, but fedavg in .* has 2 rounds behind it; type num-rounds=2 or more"),
        ({"num-rounds": 4}, 5, r"3 simulated nodes then, 5 simulated nodes now"),
    ):
        with pytest.raises(CheckpointError, match=words):
            _main({**again, **changes}, nodes)
        assert {name: (out / name).read_bytes() for name in before} == before
    _main({**again, "num-rounds": 3})
    assert json.loads((out / "status.json").read_bytes())["state"] == "completed"
    assert [row["round"] for row in rows(out, "round")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("local", "words"),
    [
        (False, 'type: flwr run . <your SuperLink> --run-config "resume='),
        (True, "it was run by deploy-local, whose nodes were taken down with their data; start a new run"),
    ],
)
def test_a_run_of_real_nodes_is_not_simulated_on_and_says_what_can_be_done(
    finished: tuple[dict[str, Any], Path], launched: list[Any], local: bool, words: str
) -> None:
    _, out = finished
    header = json.loads((out / "run.json").read_bytes())
    write_text(out / "run.json", json.dumps({**header, "nodes": 0}))
    if local:
        (out / "nodes").mkdir()
    result = command("simulate", "--resume", str(out), "-c", "num-rounds=4")
    assert (result.exit_code, launched) == (2, []), result.output
    assert words in result.stderr
    assert "10 simulated nodes" not in result.stderr


def test_the_command_refuses_before_it_launches(finished: tuple[dict[str, Any], Path], launched: list[Any]) -> None:
    _, out = finished
    before = (out / "status.json").read_bytes()
    for options, words in (
        (("-c", "num-rounds=1"), "type num-rounds=2 or more"),
        (("-c", "seed=2"), "seed: 1 then, 2 now"),
        (("--nodes", "4", "-c", "num-rounds=4"), "3 simulated nodes then, 4 simulated nodes now"),
    ):
        result = command("simulate", "--resume", str(out), *options)
        assert (result.exit_code, launched) == (2, []), result.output
        assert words in result.stderr
    assert (out / "status.json").read_bytes() == before
    result = command("simulate", "--resume", str(out), "-c", "num-rounds=4")
    assert [(wanted.nodes, wanted.run_config["num-rounds"]) for wanted in launched] == [(3, 4)], result.output


def test_a_complete_run_is_not_launched_again_but_says_how_to_go_on(
    finished: tuple[dict[str, Any], Path], launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = finished
    for _ in range(2):
        result = command("simulate", "--resume", str(out))
        assert (result.exit_code, launched) == (0, []), result.output
        assert (
            f"complete: round 2 of 2 is done; for more, type for example: heterofleet simulate --resume {out} -c num-rounds=4\n"
            in result.stderr
        )
        assert str(out / "report.html") in result.stdout
    _main({**settings, "resume": str(out), "num-rounds": 3})
    assert "round 3 of 3 is done" in command("simulate", "--resume", str(out)).stderr
    assert launched == []
    status = json.loads((out / "status.json").read_text())
    (out / "status.json").write_text(json.dumps({**status, "state": "failed"}))  # killed before its report
    assert command("simulate", "--resume", str(out)).exit_code == 0
    assert len(launched) == 1


@pytest.mark.parametrize(("begun", "rounds"), [(False, " -c num-rounds=9"), (True, "")])
def test_a_resumed_run_that_is_stopped_says_what_goes_on_to_the_rounds_that_were_asked_for(
    finished: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch, begun: bool, rounds: str
) -> None:
    _, out = finished

    def stopped(wanted: launch.Launch, on_status: Any) -> dict[str, Any]:
        if begun:
            write_text(out / "status.json", json.dumps({"state": "failed", "num_rounds": 9, "runs": ["fedavg"]}))
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "simulate", stopped)
    monkeypatch.setattr(cli.err, "width", 300)
    result = command("simulate", "--resume", str(out), "-c", "num-rounds=9", "-c", "fleet.quorum=0.7", "--workers", "3")
    assert result.exit_code == 130, result.output
    assert f"go on with: heterofleet simulate --resume {out} -c fleet.quorum=0.7{rounds} --workers 3\n" in result.stderr


@pytest.mark.parametrize(("then", "now", "words"), [(0, 4, "run of real nodes"), (4, 0, "4 simulated nodes then, real nodes")])
def test_real_and_simulated_nodes_are_told_apart(tmp_path: Path, then: int, now: int, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_resume(tmp_path, {"nodes": then, "run_config": {"num-rounds": 1}}, {"num-rounds": 1}, now)
    check_resume(tmp_path, {"run_config": {"num-rounds": 1}}, {"num-rounds": 1}, now)


def test_a_run_that_failed_before_its_first_round_does_not_block_its_folder(tmp_path: Path) -> None:
    settings = {**config(tmp_path, strategy="fedavg", num_rounds=1), "out-dir": str(tmp_path / "out")}
    with pytest.raises(FleetError):
        _main({**settings, "fleet.min-nodes": 9})
    assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "failed"
    assert is_free(tmp_path / "out")
    _main(settings)
    assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "completed"
    assert not is_free(tmp_path / "out")
    with pytest.raises(SettingsError, match="already holds a run"):
        _main(settings)
    assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "completed"


def test_a_fleet_that_does_not_fit_the_method_is_known_before_anyone_trains_alone(tmp_path: Path) -> None:
    settings = config(tmp_path, alone=True, fedmrl__shared_dim=50, fleet__models=BN)
    with pytest.raises(FleetError, match=r"0 usable nodes of 3 simulated.*\n- .*fedmrl.shared-dim = 50 exceeds .* \(12\)"):
        run(settings, tmp_path / "out")
    assert rows(tmp_path / "out", "round") == []
    assert rows(tmp_path / "out", "failure", "local") == []


def test_a_node_that_does_not_fit_the_method_is_named_first_and_left_out_of_it_only(tmp_path: Path) -> None:
    settings = config(tmp_path, alone=True, num_rounds=1, fedmrl__shared_dim=50, fleet__models=f"mlp,{BN},mlp")
    run(settings, tmp_path / "out")
    listed = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert next((row["kind"], row["run"], row["node"]) for row in listed) == ("failure", "fedmrl", "partition-1")
    assert [row["replied"] for row in rows(tmp_path / "out", "round", "local")] == [3]
    assert [row["replied"] for row in rows(tmp_path / "out", "round", "fedmrl")] == [2]
    assert len(rows(tmp_path / "out", "failure")) == 1


def test_real_nodes_that_were_all_refused_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_GRACE", 0.3)
    settings = config(tmp_path, fleet__join_timeout=600.0, fleet__min_nodes=3)
    the_grid = grid(settings, 0)
    pictures(tmp_path / "own", 20)
    for name in ("a", "b"):
        the_grid.join({"name": name, "data": str(tmp_path / "own"), "model": "nowhere:net", "state-dir": str(tmp_path / "s")})
    with pytest.raises(FleetError, match=r"0 usable nodes of 2 connected, fleet.min-nodes = 3.*\n- .*nowhere"):
        run(settings, tmp_path / "out", the_grid)


def test_what_a_user_can_mend_is_logged_without_a_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flwr")
    try:
        with pytest.raises(SettingsError) as caught:
            _main({**config(tmp_path, fleet__models="mlpp"), "out-dir": str(tmp_path / "out")})
        logger.error("Simulation raised an exception", exc_info=caught.value)
        logger.error("another", exc_info=KeyError("bug"))
    finally:
        logger.removeFilter(server_app.app._without_traceback)
    first, flowers, other = caplog.records[-3:]
    assert first.getMessage().startswith("fleet.models = 'mlpp' is no model (did you mean 'mlp'?)")
    assert (flowers.exc_info, bool(other.exc_info)) == (None, True)
    assert json.loads((tmp_path / "out/status.json").read_text())["reason"] == first.getMessage()
