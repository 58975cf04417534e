"""`heterofleet node`: what it measures, what it refuses, what it starts, and what it can do without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from server_app import cli, node_load, node_start
from server_app.certs import create
from server_app.node_link import Check
from server_app.node_load import FLOWER_BYTES, check_load
from server_app.node_probe import Measured, Wanted, measure
from server_app.overrides import read_defaults
from tests.fleet_fixture import ROOT

FOUND = Measured(
    shape=(1, 16, 16),
    train=100,
    test=20,
    classes=3,
    class_names=("a", "b", "c"),
    lacking=(),
    nets="mlp",
    device="cpu",
    weight_bytes=5_000_000,
    start_bytes=400_000_000,
    peak_bytes=500_000_000,
    gpu_bytes=0,
    batch=32,
    step_seconds=0.5,
    cache_bytes=1,
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 grey 16x16 pictures of two classes, and a third without any."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for index in range(30):
        target = folder / f"class-{index % 2}"
        target.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 16), dtype=np.uint8)).save(target / f"{index}.png")
    (folder / "rare").mkdir()
    return folder


def wanted(data: Path, **changes) -> Wanted:
    config = {"name": "pi-3", "model": "mlp", "rank-ratio": 1.0, "device": "cpu", "data": str(data), "state-dir": "/tmp/none"}
    run_config = read_defaults() | {"strategy": "local"} | changes.pop("run_config", {})
    return Wanted(config | changes, run_config)


def test_data_model_and_step_are_measured_as_the_run_would_use_them(pictures):
    found = measure(wanted(pictures))
    assert (found.shape, found.train, found.test) == ((1, 16, 16), 24, 6)  # a fifth of 30 is for testing
    assert (found.classes, found.class_names, found.lacking) == (3, ("class-0", "class-1", "rare"), (2,))
    assert (found.nets, found.batch, found.device) == ("mlp", 24, "cpu")
    assert found.peak_bytes >= found.start_bytes > 50_000_000
    assert found.step_seconds > 0
    assert found.cache_bytes > 30 * 16 * 16


def test_what_a_strategy_trains_beside_the_own_model_is_measured_too(pictures):
    own = measure(wanted(pictures)).weight_bytes
    fused = measure(wanted(pictures, run_config={"strategy": "fedmrl", "fedmrl.small-model": "mlp"}))
    shared = measure(wanted(pictures, run_config={"strategy": "fedavg", "fedavg.model": "cnn5"}))
    cut = measure(wanted(pictures, **{"rank-ratio": 0.25}, run_config={"strategy": "fedhm", "fedhm.model": "cnn5"}))
    assert (fused.nets, fused.weight_bytes) == ("mlp and mlp", 2 * own)
    assert (shared.nets, cut.nets) == ("cnn5", "cnn5 at 0.25")
    assert 0 < cut.weight_bytes < 0.7 * shared.weight_bytes


def load(monkeypatch, tmp_path, found: Measured | Check, free: int = 10**9):
    monkeypatch.setattr(node_load, "_probed", lambda asked: found)
    monkeypatch.setattr(node_load, "available_memory", lambda: free)
    result = check_load(wanted(tmp_path), tmp_path / "state")
    return {check.name: check for check in result.checks}, result.memory


def test_memory_and_time_are_told_in_numbers(monkeypatch, tmp_path):
    checks, memory = load(monkeypatch, tmp_path, FOUND)
    assert memory == FLOWER_BYTES + 500_000_000
    assert "1000 MB free" in checks["memory"].found
    assert "500 MB at its peak (100 MB of it" in checks["memory"].found
    assert "5.0 MB; a step of 32 samples takes 0.5 s on cpu, a round's training about 2 s" in checks["model"].found  # 4 steps
    assert "up to 15 MB a run" in checks["disk"].found  # three versions
    assert not any(check.cure or check.fatal for check in checks.values())


def test_too_little_memory_is_told_and_not_fatal_and_too_few_samples_are(monkeypatch, tmp_path):
    checks, _ = load(monkeypatch, tmp_path, FOUND, free=700_000_000)
    assert checks["memory"].cure.startswith("760 MB are needed")
    assert not checks["memory"].fatal
    checks, _ = load(monkeypatch, tmp_path, replace(FOUND, train=1))
    assert checks["data"].fatal
    checks, _ = load(monkeypatch, tmp_path, replace(FOUND, lacking=(1, 2)))
    assert checks["data"].found.endswith("none to train on of b, c")


def test_a_state_folder_that_cannot_be_made_is_fatal(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(node_load, "_probed", lambda asked: FOUND)
    disk = check_load(wanted(tmp_path), tmp_path / "file/state").checks[-1]
    assert disk.fatal
    assert "--state-dir" in disk.cure


def test_a_state_folder_of_the_services_user_need_not_be_writable_by_who_asks(monkeypatch, tmp_path):
    monkeypatch.setattr(node_load, "_probed", lambda asked: FOUND)
    monkeypatch.setattr(node_load.os, "access", lambda path, mode: False)
    assert check_load(wanted(tmp_path), tmp_path / "state").checks[-1].fatal
    assert not check_load(wanted(tmp_path), tmp_path / "state", service=True).checks[-1].fatal


def run(*words: str, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, after `code`."""
    script = f"import sys\n{code}\nsys.argv[0] = 'heterofleet'\nfrom server_app.cli import main\nmain()"
    own = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | env
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=own, timeout=300)


HIDDEN = """
from importlib.machinery import PathFinder
absent = ['ray', 'matplotlib', 'datasets', 'flwr_datasets', 'mlxtend', 'pandas', 'pyarrow', 'scipy', 'sklearn', 'torchvision', 'torch']
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split('.')[0] in absent else super().find_spec(name, path, target)
sys.meta_path[:] = [Hiding if isinstance(f, type) and issubclass(f, PathFinder) else f for f in sys.meta_path]
"""


def test_a_node_is_checked_with_what_requirements_node_names_and_the_command_itself_stays_small(pictures, tmp_path):
    create(tmp_path / "certs", nodes=1)
    # The probe inherits this file, so that it too must do without Ray, pandas and the like; it alone may import torch.
    (tmp_path / "sitecustomize.py").write_text("import sys\n" + HIDDEN.replace(", 'torch']", "]"))
    words = ["node", "--superlink", "127.0.0.1:1", "--name", "pi-3", "--model", "mlp", "--data", str(pictures), "--dry-run"]
    words += ["--root-certificates", str(tmp_path / "certs/ca.crt"), "--key", str(tmp_path / "certs/node-1/node.key")]
    words += ["--port", "39994", "--state-dir", str(tmp_path / "state"), "-c", "strategy=local"]
    done = run(*words, code=HIDDEN, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[1]: line for line in done.stderr.splitlines()}
    assert list(lines) == ["CA", "key", "server", "port", "data", "model", "memory", "disk"]
    assert "24 samples of 1x16x16 to train on, 6 to test on, 3 classes; none to train on of rare" in lines["data"]
    assert "nothing answers at 127.0.0.1:1" in lines["server"]
    assert done.stdout.startswith(str(Path(sys.executable).parent / "flower-supernode") + " --superlink 127.0.0.1:1 --root-certificates")
    assert done.stdout.count("\n") == 1


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(node_load, "_probed", lambda asked: FOUND)


def invoke(*words: str):
    base = ["node", "--superlink", "127.0.0.1:1", "--name", "pi-3", "--data", "/tmp", "--insecure", "--port", "39995"]
    return CliRunner().invoke(cli.app, [*base, *words], env={"COLUMNS": "300"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--superlink", "server"], "--superlink server: type HOST:PORT"),
        (["--name", "two words"], "--name 'two words': type letters"),
        (["--rank-ratio", "1.5"], "--rank-ratio 1.5: type a number above 0 and at most 1"),
        (["--rank-ratio", "0"], "--rank-ratio 0: type a number above 0"),
        (["--device", "gpu"], "--device gpu: type auto, cpu or cuda"),
        (["--key", "/tmp/key"], "--key with --insecure"),
        (["-c", "train.batchsize=3"], "did you mean 'train.batch-size'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_one_line(quick, words, message):
    done = invoke(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_a_fatal_finding_ends_it_before_anything_starts(monkeypatch, quick):
    monkeypatch.setattr(node_start.Start, "replace_process", lambda self: pytest.fail("started"))
    monkeypatch.setattr(node_load, "_probed", lambda asked: Check("data", "/srv is empty", "--data", fatal=True))
    done = invoke()
    assert done.exit_code == 2
    assert "refused data /srv is empty; --data" in done.stderr
    assert done.stdout == ""


def test_it_becomes_the_command_that_it_printed_with_flowers_parts_on_the_path(tmp_path, monkeypatch, quick):
    program = tmp_path / "flower-supernode"
    script = f"import json, os, sys\njson.dump([sys.argv, dict(os.environ)], open({str(tmp_path / 'out')!r}, 'w'))\n"
    program.write_text(f"#!{sys.executable}\n{script}")
    program.chmod(0o755)
    monkeypatch.setattr(node_start, "_program", lambda: program)
    child = os.fork()
    if child == 0:  # the command replaces this process
        invoke("--uplink-mbit", "0.5")
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    words, env = json.loads((tmp_path / "out").read_text())
    assert words == node_start.Start(*_start_of(words, program)).command
    assert env["PATH"].split(os.pathsep)[0] == str(tmp_path)
    assert env["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] == "625000"


def _start_of(words: list[str], program: Path):
    from flwr.common.config import parse_config_args

    from server_app.node_link import Address

    config = parse_config_args([words[words.index("--node-config") + 1]])
    assert config["name"] == "pi-3"
    return Address("127.0.0.1", 1), config, None, None, True, 39995, 0.5, program


def test_with_systemd_only_the_unit_is_on_stdout(quick, tmp_path):
    done = invoke("--systemd", "--user", "fleet", "--state-dir", str(tmp_path / "state"))
    assert done.exit_code == 0
    assert done.stdout.startswith("[Unit]\n")
    assert "MemoryMax=960M" in done.stdout  # (260e6 + 500e6) * 1.25 = 905.9 MiB
    assert f"ReadWritePaths={tmp_path}/state" in done.stdout
    assert "mind unit" not in invoke("--dry-run").stderr
    place = next(line for line in done.stderr.splitlines() if line.startswith(f"mind unit --state-dir {tmp_path}/state"))
    assert "PrivateTmp=yes" in place or "ReadWritePaths" in place


@pytest.mark.parametrize("bad", ["none.key", "node-1/node.pub", "server.key"])
def test_with_a_bad_key_the_server_is_asked_all_the_same_and_without_its_ca_the_reason_is_told(quick, tmp_path, bad):
    certs = tmp_path / "certs"
    create(certs, nodes=1)
    base = ["node", "--superlink", "127.0.0.1:1", "--name", "pi-3", "--data", "/tmp", "--port", "39995", "--key", str(certs / bad)]
    for ca, told in (("ca.crt", "nothing answers at 127.0.0.1:1"), ("none.crt", "127.0.0.1:1 was not asked: without the CA")):
        done = CliRunner().invoke(cli.app, [*base, "--root-certificates", str(certs / ca)], env={"COLUMNS": "300"})
        lines = [line for line in done.stderr.splitlines() if line.split()[1] in ("key", "server")]
        assert done.exit_code == 2
        assert [line.split()[0] for line in lines] == ["refused", "mind"]
        assert f"server {told}" in lines[1]
