"""Whole runs as a user starts them: real Flower, Ray and processes, judged by the run's status.

Each run costs about 20 seconds, most of it Flower's and Ray's start, so that several tests look at one run. All code runs
from clean copies of this checkout, with folders, ports and (where the system allows it) a network of their own.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from client_app.protocol import fingerprint
from server_app.launch import read_status
from tests.checkout import copy_of_checkout
from tests.fleet_fixture import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MARK = "HETEROFLEET_TEST"
SIMULATE = [sys.executable, "-m", "server_app.cli", "simulate"]
ROUNDS, NODES = 6, 4
FLEET = ["--nodes", str(NODES), "--alone", "-c", f"num-rounds={ROUNDS}", "-c", "fleet.models=mlp,cnn5", "-c", "fleet.fraction=0.75"]
FLEET += ["-c", "data.samples-per-node=80", "-c", "data.alpha=100", "-c", "fedmrl.shared-dim=32", "-c", "experiment=whole"]
MEASURED = ("accuracy", "balanced_accuracy", "loss", "train_loss", "num_examples", "test_samples")  # not bytes: the out-dir's path travels

Launcher = Callable[[Path, list[str]], "subprocess.CompletedProcess[str]"]


class Place:
    """Folders for runs and their temporary files; everything that is started here carries a mark and can be ended by it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token = f"{os.getpid()}-{root.name}"
        self.temporary = Path(tempfile.mkdtemp(prefix="hw-"))  # short: Ray puts sockets there
        (root / "home").mkdir()
        self.env = {
            "HOME": str(root / "home"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "TMPDIR": str(self.temporary),
            MARK: self.token,
        }

    def processes(self) -> list[int]:
        """Return the ids of the live processes started here."""
        wanted, found = f"{MARK}={self.token}".encode(), []
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdigit() and wanted in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:  # it ended meanwhile
                continue
        return found

    def kill(self) -> int:
        """Kill everything started here as a power cut would, and return how many processes that were."""
        killed: set[int] = set()
        while pids := self.processes():
            for pid in pids:
                killed.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        return len(killed)

    def simulate(self, checkout: Path, options: list[str], cut: Callable[[], bool] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `heterofleet simulate` of that checkout to its end, or until `cut` returns True, when all of it is killed."""
        log = self.root / "simulate.log"
        with log.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen([*SIMULATE, *options], cwd=checkout, env=self.env, stdout=stream, stderr=subprocess.STDOUT)
            deadline = time.monotonic() + 300
            while process.poll() is None:
                if (cut and cut()) or time.monotonic() > deadline:
                    self.kill()
                time.sleep(0.01)
        return subprocess.CompletedProcess(process.args, process.wait(), log.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_checkout(tmp_path_factory.mktemp("whole") / "checkout")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Place]]:
    """Return a function that makes places; at the end nothing of them is left running."""
    made: list[Place] = []

    def make(name: str) -> Place:
        made.append(Place(tmp_path_factory.mktemp(name)))
        return made[-1]

    yield make
    for one in made:
        one.kill()
        shutil.rmtree(one.temporary, ignore_errors=True)


def _measured(out: Path, run: str, up_to: int = ROUNDS) -> list[dict[str, Any]]:
    """Return the rows of the nodes, without seconds and memory, which no run repeats."""
    kept = ("round", "node", "model", *MEASURED)
    return [{key: row[key] for key in kept if key in row} for row in rows(out, "node", run) if row["round"] <= up_to]


def _same(one: Path, other: Path) -> bool:
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and len(first) > 0 and all(torch.equal(first[name], second[name]) for name in first)


# One command, twice ---------------------------------------------------------------------------------------------------

LOOPBACK_UP = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 0x41))"
FLWR_RUN = """flwr run . --stream -c 'num-rounds=1 data.samples-per-node=60'"""


@functools.cache
def _own_network() -> list[str]:
    """Return the words that give a command a network and processes of its own, or nothing where this user may not."""
    for extra in ([], ["--map-root-user"]):
        words = ["unshare", *extra, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        try:
            subprocess.run([*words, sys.executable, "-c", LOOPBACK_UP], check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            continue
        return words
    return []


def _no_way_out() -> dict[str, str]:
    """Return an environment for where the network cannot be taken away: a proxy that is not there, ports that nobody else has."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(one.getsockname()[1]), "FLWR_LOCAL_CONTROL_API_PORT": str(two.getsockname()[1])}
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    return {**ports, **proxy, "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}


def _with_a_marker(checkout: Path) -> Path:
    """Change both halves of a checkout so that its metrics show whose code ran, and return it."""
    node, server = checkout / "strategies/local/trainer.py", checkout / "strategies/local/strategy.py"
    text = node.read_text(encoding="utf-8")
    assert text.count('"train_loss": ') == 1
    node.write_text(text.replace('"train_loss": ', '"marker": 7.0, "train_loss": '), encoding="utf-8")
    text = server.read_text(encoding="utf-8")
    assert text.count("        return {}\n\n    def state_dict") == 1
    server.write_text(text.replace("        return {}\n\n    def state_dict", '        return {"marker": 8.0}\n\n    def state_dict'))
    return checkout


@pytest.fixture(scope="module")
def newcomer(checkout: Path, place: Callable[[str], Place], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Type `flwr run .` offline in two checkouts, one after the other; the second is served by the SuperLink of the first."""
    here = place("newcomer")
    other = _with_a_marker(copy_of_checkout(tmp_path_factory.mktemp("second") / "checkout"))
    listing = here.root / "runs.json"
    up = f'"{sys.executable}" -c "{LOOPBACK_UP}"' if _own_network() else ":"
    script = f"{up}; cd '{checkout}' && {FLWR_RUN}; cd '{other}' && {FLWR_RUN}; flwr ls --format json > '{listing}'"
    env = here.env if _own_network() else {**here.env, **_no_way_out()}
    words = [*_own_network(), "sh", "-c", script]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    here.kill()
    listed = json.loads(listing.read_text(encoding="utf-8"))["runs"]
    folders = {str(run["run-id"]): here.root / "home/.heterofleet/runs" / str(run["run-id"]) for run in listed}
    codes = {json.loads((out / "run.json").read_text(encoding="utf-8"))["fingerprint"]: out for out in folders.values()}
    return {"text": done.stdout, "runs": listed, "first": codes.get(fingerprint(checkout)), "second": codes.get(fingerprint(other))}


def test_flwr_run_completes_offline_right_after_set_up(newcomer: dict[str, Any]) -> None:
    assert [run["status"] for run in newcomer["runs"]] == ["finished:completed"] * 2, newcomer["text"]
    out = newcomer["first"]
    assert str(out) in newcomer["text"]
    assert read_status(out)["state"] == "completed"
    assert {run: [row["replied"] for row in rows(out, "round", run)] for run in ("local", "fedmrl")} == {"local": [2], "fedmrl": [2]}
    assert not rows(out, "failure")
    assert (out / "report.html").stat().st_size > 1000
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert load_file(out / "shared/fedmrl.safetensors")


def test_each_of_two_checkouts_runs_its_own_code_through_one_superlink(newcomer: dict[str, Any]) -> None:
    assert newcomer["first"], "the server half of the first run was not that of the first checkout"
    assert newcomer["second"], "the server half of the second run was not that of the second checkout"
    assert newcomer["text"].count("Starting local SuperLink") == 1
    seen = {}
    for which in ("first", "second"):
        nodes = [row.get("marker") for row in rows(newcomer[which], "node", "local")]
        seen[which] = nodes + [row["method"].get("marker") for row in rows(newcomer[which], "round", "local")]
    assert seen == {"first": [None, None, None], "second": [7.0, 7.0, 8.0]}


# Same seed, same bits -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(checkout: Path, place: Callable[[str], Place]) -> tuple[Path, subprocess.CompletedProcess[str], Place]:
    """Run with two workers from beginning to end."""
    here = place("straight")
    done = here.simulate(checkout, [*FLEET, "--workers", "2", "--out", str(here.root / "out")])
    return here.root / "out", done, here


@pytest.fixture(scope="module")
def cut(checkout: Path, place: Callable[[str], Place]) -> tuple[Path, int, Place]:
    """Run with one worker, kill everything between two rounds of the second strategy; return the out-dir and the last round in it."""
    here = place("cut")
    out = here.root / "out"

    def far_enough() -> bool:
        status = read_status(out)
        return status.get("run") == "fedmrl" and status.get("round", 0) >= ROUNDS // 3

    done = here.simulate(checkout, [*FLEET, "--workers", "1", "--out", str(out)], cut=far_enough)
    assert done.returncode == -signal.SIGKILL, done.stdout
    return out, max(row["round"] for row in rows(out, "round", "fedmrl")), here


@pytest.fixture(scope="module")
def resumed(checkout: Path, cut: tuple[Path, int, Place]) -> tuple[Path, Path]:
    """Go on with the run that was killed; return its out-dir, and what it was when it was killed."""
    out, _, here = cut
    before = shutil.copytree(out, here.root / "before")
    done = here.simulate(checkout, ["--workers", "1", "--resume", str(out)])
    assert done.returncode == 0, done.stdout
    return out, before


def test_simulate_completes_says_where_and_leaves_nothing(straight: tuple[Path, subprocess.CompletedProcess[str], Place]) -> None:
    out, done, here = straight
    assert done.returncode == 0, done.stdout
    assert read_status(out)["state"] == "completed"
    assert str(out / "report.html") in done.stdout.replace("\n", "")
    assert [row["sampled"] for row in rows(out, "round", "fedmrl")] == [3] * ROUNDS
    assert not rows(out, "failure")
    assert here.processes() == []
    assert list(here.temporary.glob("hf-*")) == []


@pytest.mark.parametrize("run", ["local", "fedmrl"])
def test_one_worker_gives_the_numbers_of_two(
    straight: tuple[Path, subprocess.CompletedProcess[str], Place], resumed: tuple[Path, Path], cut: tuple[Path, int, Place], run: str
) -> None:
    _, before = resumed
    last = ROUNDS if run == "local" else cut[1]
    one, two = _measured(before, run, last), _measured(straight[0], run, last)
    assert len(one) == NODES * last
    assert all(row["loss"] > 0 for row in one)
    assert one == two


def test_a_run_that_was_killed_and_resumed_has_the_bits_of_one_that_was_not(
    straight: tuple[Path, subprocess.CompletedProcess[str], Place], resumed: tuple[Path, Path], cut: tuple[Path, int, Place]
) -> None:
    (out, before), (uncut, _, _) = resumed, straight
    assert read_status(before)["state"] == "running"
    assert 0 < cut[1] < ROUNDS
    assert not (before / "shared/fedmrl.safetensors").exists()
    assert read_status(out)["state"] == "completed"
    for run in ("local", "fedmrl"):
        assert _measured(out, run) == _measured(uncut, run)
    assert _same(out / "shared/fedmrl.safetensors", uncut / "shared/fedmrl.safetensors")


def test_the_nodes_private_states_have_the_same_bits_too(
    straight: tuple[Path, subprocess.CompletedProcess[str], Place], resumed: tuple[Path, Path]
) -> None:
    for run in ("local", "fedmrl"):
        for index in range(NODES):
            one, two = (sorted(out.glob(f"state/whole/*/{run}/partition-{index}/*.safetensors"))[-1] for out in (straight[0], resumed[0]))
            assert one.name == two.name
            assert _same(one, two)


# A run that fails -----------------------------------------------------------------------------------------------------


ODD_NET = """
import sys


def net(input_shape, num_outputs, feature_dim):
    if "ray" in sys.modules:  # the command builds it, the nodes cannot
        raise OSError("no room for odd nets")
    from models.vision import mlp

    return mlp(input_shape, num_outputs, feature_dim)
"""
# Waiting for more nodes would take longer than a test may: nobody else will come.
ODD = ["-c", "fleet.models=odd_net:net", "-c", "fleet.join-timeout=10000"]


def test_simulate_of_nodes_that_all_fail_ends_with_the_reason(checkout: Path, place: Callable[[str], Place]) -> None:
    here = place("failing")
    (checkout / "odd_net.py").write_text(ODD_NET, encoding="utf-8")
    done = here.simulate(checkout, ["--nodes", "2", *ODD, "--out", str(here.root / "out")])
    assert done.returncode == 1
    assert "0 usable nodes of 2 simulated" in done.stdout
    assert "model 'odd_net:net' failed: OSError: no room for odd nets" in done.stdout
    assert "Traceback" not in (here.root / "out/flower.log").read_text(encoding="utf-8")
    assert read_status(here.root / "out")["state"] == "failed"
    assert here.processes() == []
