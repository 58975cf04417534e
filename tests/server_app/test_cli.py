"""The `heterofleet` command: what it refuses, what it hands to the launcher, its exit codes and its tables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import strategies
from server_app import cli, cli_common, doctor, launch, show
from server_app.launch import Launch, LaunchError
from server_app.overrides import merged, parse_override, read_comments, read_defaults
from server_app.progress import text_of
from server_app.settings import SettingsError
from tests.server_app.commands import run
from tests.server_app.run_folder import two_runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.learning-rate=1", 1.0),
        ("num-rounds=3", 3),
        ("num-rounds = 3.0", 3),
        ("alone=false", False),
        ("experiment=5", "5"),
        ("experiment=a=b", "a=b"),
        ("data.source=/srv/a b", "/srv/a b"),
        ('fleet.models="cnn1,cnn2"', "cnn1,cnn2"),
        ("fleet.models=cnn1, mlp", "cnn1, mlp"),
        ("experiment=true", "true"),
    ],
)
def test_values_take_the_type_of_the_default(text: str, value: Any) -> None:
    key, found = parse_override(text, read_defaults())
    assert key == text.partition("=")[0].strip()
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian.batch-size=8", "did you mean 'train.batch-size'"),
        ("num-rounds=2.5", "whole number"),
        ("num-rounds=many", "type a number, like the default 15"),
        ("alone=1", "type true or false"),
        ("seed", "is not key=value"),
        ("seed=true", "type a number"),
        ("train.batch-size=0", "train.batch-size = 0"),
        ("fedmrl.shared-dim=0", "fedmrl.shared-dim = 0"),
        ("strategy=fedmlr", "did you mean 'fedmrl'"),
        ("seed=9223372036854775808", "seed = 9223372036854775808: at most"),
        ("fleet.models=cnn1,cnn7", "fleet.models = 'cnn7' is no model (did you mean"),
        ("fedmrl.small-model=cnn55", "fedmrl.small-model = 'cnn55' is no model (did you mean 'cnn5'?)"),
        ("fedmrl.shared-dim=3000", "fedmrl.shared-dim = 3000 exceeds"),
        ("fleet.models=cnn1,torchvision:nothing", "partition-1, model torchvision:nothing: "),
        ("data.source=./nowhere", "there is no "),
        ("data.min-samples=2000", "data.min-samples"),
        ("resume=runs/old", "type --resume runs/old"),
        ("out-dir=elsewhere", "--out and -c out-dir name different folders"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(launched: list[Launch], tmp_path: Path, text: str, message: str) -> None:
    result = run("simulate", "--out", str(tmp_path / "run"), "-c", text)
    assert result.exit_code == 2
    assert message in result.stderr
    assert launched == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "1"), "fleet.min-nodes = 2, but --nodes 1"),
        (("--workers", "1", "--cpus", "2"), "--workers 1 is less than --cpus 2"),
        (("--gpus", "1.5"), "--gpus 1.5"),
        (("--resume", "nowhere"), "no readable run.json"),
    ],
)
def test_impossible_resources_are_refused(launched: list[Launch], options: tuple[str, ...], message: str) -> None:
    result = run("simulate", *options)
    assert (result.exit_code, launched) == (2, [])
    assert message in result.stderr


def test_simulate_launches_what_was_asked_and_ends_with_the_table(
    launched: list[Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("simulate", "-n", "3", "-s", "fedavg", "-c", "seed=9", "-c", "seed=8", "--out", "here", "--no-alone", "--workers", "2")
    assert result.exit_code == 0, result.stderr
    (wanted,) = launched
    assert (wanted.nodes, wanted.workers, wanted.cpus, wanted.out_dir) == (3, 2, 1, tmp_path / "here")
    assert {key: wanted.run_config[key] for key in ("seed", "strategy", "alone")} == {"seed": 8, "strategy": "fedavg", "alone": False}
    assert wanted.run_config["out-dir"] == str(tmp_path / "here")
    lines = result.stdout.splitlines()
    assert "partition-0" in result.stdout
    assert "+25.0" in result.stdout
    assert "better together: 1, worse: 1, the same: 1" in lines
    assert lines[-1] == f"report:  {tmp_path / 'here' / 'report.html'}"


def test_default_folder_is_absolute_and_a_used_one_is_refused(
    launched: list[Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("simulate", "--quiet").exit_code == 0
    (wanted,) = launched
    assert wanted.out_dir.parent == tmp_path / "runs"
    again = run("simulate", "--out", str(wanted.out_dir))
    assert (again.exit_code, len(launched)) == (2, 1)
    assert f"--resume {wanted.out_dir}" in again.stderr


def test_resume_takes_settings_and_nodes_of_the_earlier_run(launched: list[Launch], tmp_path: Path) -> None:
    before = {**read_defaults(), "seed": 5, "train.batch-size": 16, "strategy": "fedavg"}
    (tmp_path / "run.json").write_text(json.dumps({"run_config": before}), encoding="utf-8")
    (tmp_path / "launch.json").write_text('{"nodes": 7}', encoding="utf-8")
    result = run("simulate", "--resume", str(tmp_path), "-c", "num-rounds=30")
    assert result.exit_code == 0, result.stderr
    (wanted,) = launched
    changed = {key: value for key, value in wanted.run_config.items() if before[key] != value}
    assert changed == {"num-rounds": 30, "resume": str(tmp_path), "out-dir": str(tmp_path)}
    assert (wanted.nodes, wanted.out_dir) == (7, tmp_path)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (LaunchError("round 2: no node [a] replied"), 1, "round 2: no node [a] replied"),
        (KeyboardInterrupt(), 130, "--resume"),
        (cli_common.Stopped(15), 143, "--resume"),
    ],
)
def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str) -> None:
    def fail(wanted: Launch, on_status: Any) -> dict[str, Any]:
        two_runs(wanted.out_dir, state="failed")
        raise error

    monkeypatch.setattr(launch, "simulate", fail)
    monkeypatch.setattr(cli.err, "width", 200)
    result = run("simulate", "--out", str(tmp_path))
    assert result.exit_code == code
    assert message in result.stderr
    assert (tmp_path / "report.html").is_file()


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from typer.testing import CliRunner; from server_app.cli import app\n"
    code += "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
    code += "print([name for name in ('torch', 'matplotlib', 'flwr', 'ray', 'numpy', 'pydantic') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_strategies_lists_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.out, "width", 250)
    text = run("strategies").stdout
    assert [key for key in read_defaults() if key not in text] == []
    assert all(name in text for name in strategies.names())
    assert show.method_line("fedmrl") in text
    assert "gradient norm of each net; 0: off" in text
    refused = run("strategies", "fedmlr")
    assert (refused.exit_code, "did you mean 'fedmrl'" in refused.stderr) == (2, True)


def test_comments_belong_to_settings() -> None:
    comments, defaults = read_comments(), read_defaults()
    assert set(comments) <= set(defaults)
    assert comments["fleet.models"] == "simulation: model of partition i, cyclically"
    assert comments["train.clip-norm"] == "gradient norm of each net; 0: off"


def test_report_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.out, "width", 200)
    mine, other = two_runs(tmp_path / "mine"), two_runs(tmp_path / "other")
    result = run("report", str(mine), "--against", str(other))
    assert result.exit_code == 0
    assert "mean difference +0.0 points over 3 nodes" in result.stdout
    missing = run("report", str(tmp_path))
    assert (missing.exit_code, "is not a run's folder" in missing.stderr) == (2, True)


def test_models_counts_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.out, "width", 200)
    result = run("models", "mlp", "--input-shape", "1,2,2", "--classes", "3")
    from models import build

    count = sum(parameter.numel() for parameter in build("mlp", input_shape=(1, 2, 2), num_outputs=3).parameters())
    assert result.exit_code == 0
    assert f"{count:,}" in result.stdout
    refused = run("models", "nml", "--input-shape", "1,2,2", "--classes", "3")
    assert (refused.exit_code, "nml" in refused.stderr) == (2, True)
    assert run("models", "--input-shape", "3,x").exit_code == 2


def test_partition_counts_every_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.out, "width", 200)
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path))
    result = run("partition", "--nodes", "4", "-c", "data.samples-per-node=50", "-c", "data.partitioner=iid")
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("partition-")]
    assert [row[:3] for row in rows] == [[f"partition-{i}", f"cnn{i + 1}", "50"] for i in range(4)]
    for row in rows:
        assert sum(int(cell) for cell in row[3:] if cell != "·") == 50
    refused = run("partition", "--nodes", "4000")
    assert (refused.exit_code, "data.min-samples" in refused.stderr) == (2, True)


def test_doctor_arithmetic() -> None:
    # 0.8 x 8 GB over 0.45 + 0.55 GB a worker: 6, but only 4 cores; and 1 with 2 GB
    assert doctor.workers_for(550_000_000, 8_000_000_000, 4) == 4
    assert doctor.workers_for(550_000_000, 2_000_000_000, 4) == 1
    # 0.9 x 10 GB over 0.5 + 2.5 GB: 3 nodes, a third each, rounded up so that three still fit the memory
    assert doctor.gpu_share(2_500_000_000, 10_000_000_000) == 0.34
    assert doctor.gpu_share(1_000_000, 140_000_000_000) == 0.05
    assert doctor.gpu_share(20_000_000_000, 10_000_000_000) == 1.0


def test_doctor_finds_who_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        found = doctor._listener(server.getsockname()[1])
    assert found is not None
    assert found[:2] == (os.getpid(), Path.cwd())


@pytest.mark.parametrize(("folder", "foreign"), [(ROOT, False), (Path("/"), True)])
def test_doctor_tells_a_foreign_superlink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path, foreign: bool) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "healthy", lambda port: port == 39091)
    monkeypatch.setattr(doctor, "_listener", lambda port: (4242, folder, Path(sys.prefix) / "bin" / "python3"))
    (finding,) = doctor._flower()
    assert ("kill 4242" in finding.advice) == foreign
    assert ("foreign" in finding.value) == foreign


def test_doctor_names_a_remote_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[superlink]\ndefault = "prod"\n[superlink.prod]\naddress = "host:8000"\n', encoding="utf-8")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (finding,) = doctor._flower()
    assert "host:8000" in finding.value


def test_progress_text() -> None:
    status = {"round": 3, "num_rounds": 15, "metric": "accuracy_mean", "value": 0.71249, "seconds": 2.34, "eta_seconds": 85.0}
    assert text_of(status) == "round 3 of 15, accuracy 0.712, 2.3 s, 1:25 left"
    assert text_of({"round": 0, "num_rounds": 15}) == "round 0 of 15"


def test_base_of_a_run_with_an_unknown_setting_is_refused() -> None:
    with pytest.raises(SettingsError, match="which this version does not know"):
        merged([], {}, base={"train.batchsize": 3})
