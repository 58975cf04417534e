"""What a deployment on one machine is made of, without Flower: its plan, shards, node configs, processes and counts."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from client_app.profile import NodeProfile
from server_app import cli_deploy, deploy, deploy_run, processes
from server_app.deploy import Deployment, deployment, node_config
from server_app.deploy_data import write_shards
from server_app.deploy_run import Plan, cost_of, plan_deployment
from server_app.launch import Launch
from server_app.link import LaunchError, last_error
from server_app.overrides import merged
from server_app.rundata import RunData
from server_app.settings import Settings, SettingsError
from tasks.partitions import partition_indices
from tasks.sources import open_source
from tests.fleet_fixture import ROOT, pictures

FOREVER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A deployment whose temporary folder is in `tmp_path/t`."""
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(deploy.tempfile, "tempdir", str(tmp_path / "t"))
    with deployment(tmp_path / "logs", keys=2) as found:
        yield found


def start(made: Deployment, name: str, code: str = FOREVER, count: int = 2) -> None:
    """Run Python in place of a node, and wait until it is `count` processes."""
    made._start(name, [sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while len(processes.marked(made._mark(name))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def simulated(settings: Settings, count: int) -> list[NodeProfile]:
    return [NodeProfile.of({"partition-id": number, "num-partitions": count}, settings) for number in range(count)]


def test_node_config_is_read_by_flower_as_it_was_meant(tmp_path: Path) -> None:
    written = {"name": "pi-3", "model": "cnn1", "rank-ratio": 0.5, "data": str(tmp_path / "my, pictures"), "state-dir": "/s"}
    assert parse_config_args([node_config(written)]) == written
    profile = NodeProfile.of(parse_config_args([node_config(written)]), merged([], {}).settings)
    assert (profile.node_name, profile.rank_ratio, profile.data) == ("pi-3", 0.5, written["data"])
    with pytest.raises(LaunchError, match=r"data = '/a\"b'.*no quotation marks"):
        node_config({"data": '/a"b'})


def test_shards_are_the_partitions_of_the_source_for_the_owner_only(tmp_path: Path) -> None:
    source = pictures(tmp_path / "pictures", 60)
    settings = merged([f"data.source={source}", "data.min-samples=1", "data.shared-test=6"], {}).settings
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    assert write_shards(settings, simulated(settings, 3), paths) == 3
    whole = open_source(str(source), settings.data)
    for path, positions in zip(paths, partition_indices(whole, settings, 3), strict=True):
        shard = open_source(str(path), settings.data)
        assert shard.class_names == ("class-0", "class-1", "class-2")
        assert np.array_equal(shard.inputs, whole.inputs[positions])
        assert np.array_equal(shard.labels, whole.labels[positions])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nodes_may_have_sources_of_their_own(tmp_path: Path) -> None:
    sources = [pictures(tmp_path / name, count, seed=count) for name, count in (("a", 30), ("b", 36))]
    settings = merged([f"fleet.data={sources[0]},{sources[1]}", "data.shared-test=0", "data.min-samples=1"], {}).settings
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    write_shards(settings, simulated(settings, 3), paths)
    sizes = [len(open_source(str(path), settings.data).labels) for path in paths]
    assert (sizes[0] + sizes[2], sizes[1]) == (30, 36)
    assert sizes[0] > 0


def test_shards_of_vectors_keep_the_columns_that_the_run_config_names(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,b,kind\n" + "".join(f"{n},{n / 3},{n % 2}\n" for n in range(40)))
    settings = merged([f"data.source={table}", "data.label-column=kind", "data.min-samples=1", "data.shared-test=0"], {}).settings
    paths = [tmp_path / f"{number}.parquet" for number in range(2)]
    assert write_shards(settings, simulated(settings, 2), paths) == 2
    shards = [open_source(str(path), settings.data) for path in paths]
    found = sorted((row.tolist(), label) for shard in shards for row, label in zip(shard.inputs, shard.labels.tolist(), strict=True))
    assert found == [([float(n), float(np.float32(n / 3))], n % 2) for n in range(40)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": ["fleet.min-nodes=4"]}, "fleet.min-nodes = 4, but --nodes 3"),
        ({"config": ["resume=/somewhere"]}, "deploy-local starts new ones"),
        ({"strategy": "fedmlr"}, "did you mean 'fedmrl'"),
    ],
)
def test_what_cannot_be_deployed_is_said_at_once(tmp_path: Path, change: dict, reason: str) -> None:
    options = {"nodes": 3, "strategy": None, "rounds": None, "config": [], "secure": True, "out_dir": tmp_path / "out"}
    with pytest.raises(SettingsError, match=reason):
        plan_deployment(**{**options, **change})
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_run_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(SettingsError, match="already holds a run; name another folder"):
        plan_deployment(nodes=2, strategy=None, rounds=None, config=[], secure=True, out_dir=tmp_path)


def test_what_is_typed_wins_over_the_commands_own_defaults(tmp_path: Path) -> None:
    small = [f"data.source={pictures(tmp_path / 'pictures', 60)}", "data.min-samples=1", "fleet.models=mlp", "fedmrl.small-model=mlp"]
    options = {"nodes": 4, "strategy": "fedmrl", "secure": False, "out_dir": tmp_path / "out"}
    plain = plan_deployment(rounds=None, config=[*small, "fedmrl.shared-dim=8"], **options)
    assert plain.names == ("node-1", "node-2", "node-3", "node-4")
    settings = plain.config.settings
    assert (settings.strategy, settings.num_rounds, settings.alone, settings.fleet.min_nodes) == ("fedmrl", 3, False, 4)
    typed = [*small, "fedmrl.shared-dim=8", "num-rounds=9", "alone=true", "fleet.min-nodes=2"]
    settings = plan_deployment(rounds=None, config=typed, **options).config.settings
    assert (settings.num_rounds, settings.alone, settings.fleet.min_nodes) == (9, True, 2)
    assert plan_deployment(rounds=5, config=typed, **options).config.settings.num_rounds == 5


def test_the_cost_is_summed_over_strategies_and_rounds() -> None:
    row = {"exchanges": 2, "seconds_exchanges": 10.0, "bytes_down": 100, "bytes_up": 40}
    nodes = {1: {"a": {"seconds_train": 1.0}, "b": {"seconds_train": 3.0}}, 2: {"a": {"seconds_train": 0.5}, "b": {}}}
    exports = {"fedmrl": {2: {"bytes_down": 50, "bytes_up": 1}}}
    run = RunData(Path("."), rounds={"local": {1: row}, "fedmrl": {1: row, 2: row}}, nodes={"fedmrl": nodes}, exports=exports)
    cost = cost_of(run, down=353, up=122)
    assert (cost.exchanges, cost.seconds, cost.seconds_train) == (6, 30.0, 3.5)
    assert (cost.down, cost.up) == ((350, 353), (121, 122))


def test_a_killed_node_takes_all_it_started_with_it_and_no_other(made: Deployment) -> None:
    start(made, "node-1")
    start(made, "node-10")
    made.kill("node-1")
    assert processes.marked(made._mark("node-1")) == []
    assert len(processes.marked(made._mark("node-10"))) == 2
    made.check()


def test_a_node_that_ends_is_noticed_with_the_last_error_of_its_log(made: Deployment) -> None:
    made._start("node-1", [sys.executable, "-c", "raise ValueError('no such key')"])
    made.processes["node-1"].wait()
    with pytest.raises(LaunchError, match=r"node-1 ended with code 1: ValueError: no such key \(more in .*node-1\.log\)"):
        made.check()


@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        (LaunchError("node-2 ended with code 1"), 1, "node-2 ended with code 1"),
        (SettingsError("no such data"), 2, "no such data"),
        (KeyboardInterrupt(), 130, "everything was taken down"),
    ],
)
def test_the_exit_code_says_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: BaseException, code: int, said: str
) -> None:
    def fails(*_: object) -> None:
        raise trouble

    planned = Plan(merged([], {}), Launch(out_dir=tmp_path / "out", run_config={}), ("node-1",), True)
    monkeypatch.setattr(deploy_run, "plan_deployment", lambda **_: planned)
    monkeypatch.setattr(deploy_run, "deploy", fails)
    app = typer.Typer()
    cli_deploy.add(app)
    done = CliRunner().invoke(app, ["--quiet"])
    assert (done.exit_code, said in " ".join(done.stderr.split())) == (code, True)


def test_flowers_exit_code_is_a_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO: start\n\x1b[91mERROR \x1b[0m: Exit Code: 305\nFailed.\n[code: 2004] No.\n\nFor more, visit\nINFO: done\n")
    assert last_error(log) == "Exit Code: 305 Failed. [code: 2004] No."


def test_at_the_end_neither_process_nor_key_is_left_but_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(deploy.tempfile, "tempdir", str(tmp_path / "t"))
    with contextlib.suppress(KeyboardInterrupt), deployment(tmp_path / "logs", keys=1) as made:
        start(made, "node-1", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FOREVER}")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [made.folder, *made.folder.rglob("*")]}
        assert modes[made.folder.name] == modes["node-1"] == 0o700
        assert {modes[name] for name in ("ca.key", "server.key", "node.key", "superexec.secret")} == {0o600}
        raise KeyboardInterrupt
    assert processes.marked(made.token) == []
    assert list((tmp_path / "t").iterdir()) == []
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["node-1.log"]


def test_a_killed_launcher_leaves_neither_process_nor_key(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    code = f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\nfrom server_app.deploy import deployment\n"
    code += f"with deployment(Path({str(tmp_path / 'logs')!r}), keys=1) as made:\n"
    code += f"    made._start('node-1', [sys.executable, '-c', {FOREVER!r}])\n    print(made.token, flush=True)\n    time.sleep(60)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path / "t")}, stdout=subprocess.PIPE, text=True
    )
    token = launcher.stdout.readline().strip()
    assert processes.marked(token)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 30
    while processes.marked(token) or list((tmp_path / "t").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
