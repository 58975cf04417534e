"""Real deployments on loopback: who is refused, what survives a killed node and a killed server, and `heterofleet deploy-local`.

The tests of one SuperLink go on from each other's nodes: starting them costs more than what is tested.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import heterofleet_app
from server_app import certs, processes
from server_app.deploy import SERVER, Deployment, deployment
from server_app.launch import read_status
from server_app.link import LaunchError
from tests.checkout import copy_of_checkout
from tests.fleet_fixture import ROOT, config, pictures, rows
from tests.fleet_fixture import run as run_in_process
from tests.local_grid import LocalGrid

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NODES = ("node-1", "node-2", "node-3")


class Site:
    """A SuperLink with TLS, three nodes with data of their own, and the means to wait for what happens to them."""

    def __init__(self, made: Deployment, folder: Path) -> None:
        self.made, self.folder = made, folder
        for index, name in enumerate(NODES):
            pictures(made.home(name) / "data", 60 + 12 * index, seed=index)

    def node_config(self, name: str) -> dict[str, Any]:
        home = self.made.home(name)
        return {"name": name, "model": "mlp", "data": str(home / "data"), "state-dir": str(home / "state")}

    def start(self, *names: str) -> None:
        for name in names:
            self.made.start_node(name, self.node_config(name), key=name)
        self.made.wait_online(len(self.made.processes) - 1)

    def run_config(self, out: Path, **changes: Any) -> dict[str, Any]:
        small = {"eval_every": 0, "fleet__min_nodes": 2, "data__num_classes": 3, "out_dir": str(out), "fleet__join_timeout": 120.0}
        return config(self.folder, **{**small, **changes})

    def submit(self, run_config: dict[str, Any]) -> int:
        control = self.made.connect()
        with contextlib.closing(control):
            return control.start(self.made.app_dir, run_config)

    def until(self, what: str, check: Callable[[], Any], seconds: float = 900.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := check()):
            assert time.monotonic() < deadline, f"still not: {what}"
            time.sleep(0.1)
        return found

    def trainings(self, name: str) -> int:
        """Return how many orders to train a node has got."""
        return self.made.log(name).read_text().count("Receiving: train message")

    def orders(self, name: str) -> int:
        """Return how many messages a node has got."""
        return self.made.log(name).read_text().count("Receiving: ")

    def answers(self, name: str) -> int:
        """Return how many replies a node has sent."""
        return self.made.log(name).read_text().count("Sent successfully")

    def completed(self, run_id: int, out: Path) -> None:
        control = self.made.connect()
        with contextlib.closing(control):
            state = self.until("finished", lambda: (found := control.state(run_id)).status == "finished" and found)
        assert state.result == "completed", read_status(out).get("reason")

    def versions(self, name: str, experiment: str) -> dict[str, str]:
        """Return the files of a node's private state in an experiment, by round, and what is in them."""
        found = sorted((self.made.home(name) / "state" / experiment).rglob("*.safetensors"))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    app = copy_of_checkout(folder / "app")  # a fleet runs one version, whatever is edited meanwhile
    with deployment(folder / "logs", keys=4, app_dir=app) as made:
        made.start_superlink()
        yield Site(made, folder)


class _Past(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.now(tz) - timedelta(days=400)


@pytest.fixture
def expired(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The SuperLink runs with a certificate that ended a month ago; afterwards with its own again."""
    with monkeypatch.context() as patch:
        patch.setattr(certs, "datetime", _Past)
        certs.create(site.made.folder / "old", nodes=1)
    site.made.kill(SERVER)
    original = site.made.folder / "certs"
    original.rename(site.made.folder / "kept")
    (site.made.folder / "old").rename(original)
    monkeypatch.setattr("server_app.deploy._START_SECONDS", 0.0)
    with pytest.raises(LaunchError, match="did not answer within 0 s"):
        site.made.start_superlink()
    monkeypatch.undo()
    log = site.made.log(SERVER)
    site.until("the SuperLink listens", lambda: log.read_text().count("Uvicorn running on https") > 1)
    yield
    site.made.kill(SERVER)
    shutil.rmtree(original)
    (site.made.folder / "kept").rename(original)
    site.made.start_superlink()


def refused(site: Site, name: str, key: str) -> str:
    """Return the log of a node that ended by itself, as it must within a minute."""
    made = site.made
    made.start_node(name, {"name": name, "model": "mlp", "data": str(made.home(name))}, key=key)
    try:
        made.processes[name].wait(timeout=60)
        with pytest.raises(LaunchError, match=f"{name} ended with code 1: Exit Code: 305 Failed to initialize the connection"):
            made.check()
    finally:
        made.kill(name)
    return re.sub(r"\x1b\[[0-9;]*m", "", made.log(name).read_text())


def test_a_node_whose_key_is_not_registered_is_refused(site: Site) -> None:
    log = refused(site, "unknown", "node-4")
    assert "Exit Code: 305" in log
    assert "[code: 2004] Failed to activate SuperNode" in log


def test_a_node_with_another_ca_refuses_the_server(site: Site) -> None:
    certs.create(site.made.folder / "foreign", nodes=1)
    log = refused(site, "foreign", "../foreign/node-1")
    assert "Exit Code: 305" in log
    assert "CERTIFICATE_VERIFY_FAILED" in log


def test_a_node_that_speaks_plain_http_never_gets_in(site: Site) -> None:
    made = site.made
    made.start_node("plain", {"name": "plain", "model": "mlp", "data": str(made.home("plain"))}, key="")
    site.until("it tries again", lambda: "Connection attempt failed, retrying" in made.log("plain").read_text(), 60)
    control = made.connect()
    with contextlib.closing(control):
        assert control.online() == set()
    made.kill("plain")


def test_an_expired_certificate_is_refused(site: Site, expired: None) -> None:
    log = refused(site, "late", "node-1")
    assert "Exit Code: 305" in log
    assert "certificate has expired" in log


def test_a_killed_node_comes_back_with_its_state_and_others_join_leave_and_return(site: Site, tmp_path: Path) -> None:
    made, out = site.made, tmp_path / "out"
    for name in NODES:
        made.register(name, name)
    site.start("node-1", "node-2")
    run_id = site.submit(site.run_config(out, experiment="first", num_rounds=6))
    site.until("round 1 has begun", lambda: site.trainings("node-1"))
    site.start("node-3")
    site.until("node-3 has trained once", lambda: site.versions("node-3", "first"))
    earlier = {name: site.trainings(name) for name in NODES}
    site.until("node-2 works on the next round", lambda: site.trainings("node-2") > earlier["node-2"])
    made.kill("node-2")
    before = site.versions("node-2", "first")
    site.until("node-3 works on it too", lambda: site.trainings("node-3") > earlier["node-3"])
    site.until("node-3 has answered", lambda: site.answers("node-3") == site.orders("node-3"))
    made.stop("node-3")
    site.start("node-3")

    (lost,) = site.until("Flower misses node-2", lambda: [r for r in rows(out, "failure") if r["node"] == "node-2"])
    site.start("node-2")
    after = site.versions("node-2", "first")
    print("\nstate of node-2 before the kill and after its return:", before, after, lost, sep="\n")
    assert before == after
    assert before
    site.completed(run_id, out)
    trained = {number: {r["node"] for r in rows(out, "node") if r["round"] == number and "num_examples" in r} for number in range(1, 7)}
    print(*[(r["round"], f"{r['replied']} of {r['sampled']}", f"{r['seconds']:.0f} s") for r in rows(out, "round")], trained, sep="\n")
    assert trained[1] == {"node-1", "node-2"}
    assert trained[lost["round"]] == {"node-1", "node-3"}
    assert trained[lost["round"] + 1] == set(NODES)
    assert trained[6] == set(NODES)


def test_a_killed_superlink_ends_in_the_same_result_once_resumed(site: Site, tmp_path: Path) -> None:
    made, out = site.made, tmp_path / "out"
    spoiled = next((made.home("node-3") / "flwr/apps").iterdir()) / "strategies/seeds.py"
    spoiled.write_text(spoiled.read_text() + "# another version\n")
    wanted = site.run_config(out, experiment="second", num_rounds=3)
    site.submit(wanted)
    site.until("round 1 is done", lambda: read_status(out).get("round", 0) >= 1)
    site.until("node-1 works on round 2", lambda: made.at_work("node-1"))
    made.kill(SERVER)
    made.start_superlink()
    made.wait_online(len(NODES))
    run_id = site.submit(wanted | {"resume": str(out)})
    site.completed(run_id, out)

    quiet = tmp_path / "quiet"
    nodes = [{**site.node_config(name), "state-dir": str(quiet / name)} for name in NODES[:2]]
    undisturbed = wanted | {"out-dir": str(quiet)}
    run_in_process(undisturbed, quiet, LocalGrid(heterofleet_app.client, nodes, undisturbed))
    deployed, straight = (load_file(folder / "shared/fedmrl.safetensors") for folder in (out, quiet))
    assert deployed.keys() == straight.keys()
    assert all(deployed[name].equal(straight[name]) for name in straight)
    accuracies = [{r["node"]: r["accuracy"] for r in rows(folder, "node") if r["round"] == 3} for folder in (out, quiet)]
    print("\naccuracy after the kill, and undisturbed:", *accuracies)
    assert accuracies[0] == accuracies[1]

    reasons = {r["reason"] for r in rows(out, "failure") if r["node"] == "node-3"}
    print(*reasons, sep="\n")
    assert len(reasons) == 1
    assert re.search(r"the server runs other code: \S+ \([0-9a-f]{12}\), here \S*node-3\S* \([0-9a-f]{12}\)", *reasons)
    assert {path.name for path in (made.home("node-1") / "state").iterdir()} == {"first", "second"}


def test_nobody_else_can_read_keys_data_or_state(site: Site) -> None:
    made = site.made
    secret = [path for path in made.folder.rglob("*") if path.name in ("ca.key", "server.key", "node.key", "superexec.secret")]
    own = [path for name in NODES for part in ("state", "heterofleet") for path in (made.home(name) / part).rglob("*")]
    assert len(secret) >= 10
    assert any(path.suffix == ".safetensors" for path in own)
    assert any(path.name == "train_inputs.npy" for path in own)
    for path in [made.folder, *(made.home(name) for name in NODES), *secret, *own]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def command(out: Path, temporary: Path, *words: str) -> subprocess.Popen[str]:
    temporary.mkdir()
    env = os.environ | {"TMPDIR": str(temporary), "COLUMNS": "200"}
    small = ["-c", "data.partitioner=iid", "-c", "data.samples-per-node=60", "--nodes", "2", "--out", str(out)]
    words = (sys.executable, "-m", "server_app.cli", "deploy-local", *small, *words)
    hears = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells start background jobs deaf to Ctrl-C
    return subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hears)


def nothing_left(temporary: Path) -> bool:
    """Return whether the command's folder for keys and data is gone, and every process that worked in it."""
    alive = [pid for pid in map(str, processes.marked("")) if str(temporary) in environment_of(pid)]
    return not alive and list(temporary.iterdir()) == []


def environment_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return (Path("/proc") / pid / "environ").read_text(errors="replace")
    return ""


def test_deploy_local_prints_results_and_both_byte_counts_and_leaves_nothing(tmp_path: Path) -> None:
    done = command(tmp_path / "out", tmp_path / "t", "--strategy", "fedhm", "--rounds", "1")
    shown, errors = done.communicate()
    print("\n" + shown)
    assert done.returncode == 0, errors
    assert re.search(r"node-1 +cnn\d", shown)
    assert re.search(r"2 exchanges, [\d.]+ s each", shown)
    counts = re.findall(r"(?:to|from) the nodes +([\d,]+) +([\d,]+)", shown)
    assert len(counts) == 2
    for ours, flowers in counts:
        assert abs(int(flowers.replace(",", "")) / int(ours.replace(",", "")) - 1) < 0.02
    assert nothing_left(tmp_path / "t")
    assert {path.name for path in (tmp_path / "out/logs").iterdir()} == {"superlink.log", "node-1.log", "node-2.log"}


def test_deploy_local_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    stopped = command(tmp_path / "out", tmp_path / "t", "--rounds", "50")
    deadline = time.monotonic() + 300
    while not (tmp_path / "out/nodes/node-2").exists():
        assert stopped.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not nothing_left(tmp_path / "t")
    stopped.send_signal(signal.SIGINT)
    errors = stopped.communicate(timeout=60)[1]
    assert stopped.returncode == 130
    assert "everything was taken down" in errors
    assert "Traceback" not in errors
    assert nothing_left(tmp_path / "t")
    assert json.loads((tmp_path / "out/status.json").read_text())["reason"] == "stopped by the user"
