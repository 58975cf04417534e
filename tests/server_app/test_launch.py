"""The launcher: its judgement on scripted SuperLinks, the end of processes, and (slow) real runs of a tiny app."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server_app import control, launch, link, processes
from server_app.control import RunState
from server_app.launch import Launch, LaunchError, read_status, simulate

ROOT = Path(__file__).resolve().parents[2]
Script = Callable[[Path, int], RunState]


class _Process:
    """A SuperLink's process that runs until told otherwise."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Return a function that puts a scripted Control in place of Flower's and returns what to launch."""

    def prepare(script: Script, log: str = "", **fields: Any) -> Launch:
        process, out_dir = _Process(), tmp_path / "out"

        class Scripted:
            asked = 0

            def __init__(self, address: str, ca: Path | None) -> None:
                self.address, self.ca = address, ca

            def start(self, app_dir: Path, run_config: dict[str, Any], federation: dict[str, Any]) -> int:
                assert run_config["out-dir"] == str(out_dir)
                assert federation["num_supernodes"] == 10
                return 7

            def state(self, run_id: int) -> RunState:
                Scripted.asked += 1
                return script(out_dir, Scripted.asked)

            def log(self, run_id: int) -> Iterator[str]:
                yield log

            def close(self) -> None:
                pass

        @contextlib.contextmanager
        def private_superlink(app_dir: Path, modules: Path | None) -> Iterator[link.Link]:
            superlink_log = tmp_path / "superlink.log"
            superlink_log.write_text("OSError: address in use\n", encoding="utf-8")
            yield link.Link(process, 1, superlink_log)  # type: ignore[arg-type]

        monkeypatch.setattr(control, "Control", Scripted)
        monkeypatch.setattr(launch, "private_superlink", private_superlink)
        monkeypatch.setattr(launch, "healthy", lambda port, ca: True)
        monkeypatch.setattr(launch, "_PATIENCE", {"completed": 0.3, "failed": 0.3})
        process.code = fields.pop("code", None)
        return Launch(out_dir=out_dir, run_config={}, **fields)

    return prepare


def _write(out_dir: Path, **status: Any) -> None:
    (out_dir / "status.json").write_text(json.dumps(status), encoding="utf-8")


def test_completed_only_when_both_say_so(scripted: Callable[..., Launch]) -> None:
    def script(out_dir: Path, asked: int) -> RunState:
        _write(out_dir, state="completed", round=2)
        return RunState("finished", "completed", "")

    seen: list[dict[str, Any]] = []
    assert simulate(scripted(script), seen.append)["state"] == "completed"
    assert seen == [{"state": "completed", "round": 2}]


def test_flower_completed_but_the_app_did_not_say_so(scripted: Callable[..., Launch]) -> None:
    wanted = scripted(lambda out_dir, asked: RunState("finished", "completed", ""))
    with pytest.raises(LaunchError, match="without saying that it completed"):
        simulate(wanted)
    assert read_status(wanted.out_dir)["state"] == "failed"


def test_the_app_completed_but_flower_failed(scripted: Callable[..., Launch]) -> None:
    def script(out_dir: Path, asked: int) -> RunState:
        _write(out_dir, state="completed")
        return RunState("finished", "failed", "Task failed with unknown error.")

    with pytest.raises(LaunchError, match="unknown error"):
        simulate(scripted(script))


def test_reason_of_an_import_error_comes_from_the_log(scripted: Callable[..., Launch]) -> None:
    log = "\x1b[91mERROR \x1b[0m: Simulation raised\nTraceback (most recent call last):\n"
    log += "ModuleNotFoundError: No module named 'x'\nExit Code: 607\n"
    wanted = scripted(lambda out_dir, asked: RunState("finished", "failed", "Simulation failed"), log)
    with pytest.raises(LaunchError, match=r"^ModuleNotFoundError: No module named 'x' \(more in .*flower\.log\)$"):
        simulate(wanted)


def test_a_failed_app_is_not_waited_for(scripted: Callable[..., Launch]) -> None:
    def script(out_dir: Path, asked: int) -> RunState:
        _write(out_dir, state="failed", reason="round 3: 1 of 4 nodes replied,\nfleet.quorum asks for 2")
        return RunState("running", "", "")

    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"^round 3: 1 of 4 nodes replied, fleet\.quorum asks for 2$"):
        simulate(scripted(script))
    assert time.monotonic() - begun < 5


def test_flower_that_does_not_end_a_completed_run(scripted: Callable[..., Launch]) -> None:
    def script(out_dir: Path, asked: int) -> RunState:
        _write(out_dir, state="completed")
        return RunState("running", "", "")

    with pytest.raises(LaunchError, match="Flower did not end the run"):
        simulate(scripted(script))


@pytest.mark.parametrize("status", ["pending", "starting"])
def test_a_run_that_never_starts(scripted: Callable[..., Launch], status: str) -> None:
    wanted = scripted(lambda out_dir, asked: RunState(status, "", ""), start_timeout=0.2)
    with pytest.raises(LaunchError, match=f"still {status} after 0 s"):
        simulate(wanted)


def test_a_superlink_that_ends(scripted: Callable[..., Launch]) -> None:
    with pytest.raises(LaunchError, match="ended with code 3: OSError: address in use"):
        simulate(scripted(lambda out_dir, asked: RunState("running", "", ""), code=3))


def test_interrupted_run_does_not_stay_running(scripted: Callable[..., Launch]) -> None:
    def script(out_dir: Path, asked: int) -> RunState:
        _write(out_dir, state="running", round=4)
        return RunState("running", "", "")

    def interrupt(status: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    wanted = scripted(script)
    with pytest.raises(KeyboardInterrupt):
        simulate(wanted, interrupt)
    assert read_status(wanted.out_dir) == {"state": "failed", "round": 4, "reason": "stopped by the user"}


def test_environment_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    env = link.environment(tmp_path, "token")
    assert "RAY_ADDRESS" not in env
    assert env["FLWR_HOME"] == str(tmp_path / "flwr")
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert env["NO_PROXY"] == env["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def _gone(token: str, within: float) -> bool:
    deadline = time.monotonic() + within
    while processes.marked(token):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _await(count: int, token: str) -> None:
    deadline = time.monotonic() + 10
    while len(processes.marked(token)) < count:
        assert time.monotonic() < deadline, "the processes did not start"
        time.sleep(0.02)


def test_end_reaches_daemons_and_the_stubborn() -> None:
    token = f"test-{os.getpid()}"
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "if os.fork() == 0: os.setsid()\n"
    code += "time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, processes.MARK: token}, start_new_session=True)
    _await(2, token)
    time.sleep(0.3)  # until SIGTERM is ignored
    processes.end(token, patience=0.3)
    process.wait(timeout=5)
    assert _gone(token, 2)


def test_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    token = f"test-{os.getpid()}-parent"
    folder = tmp_path / "hf"
    folder.mkdir()
    guard = f"import os, subprocess, sys, time; from pathlib import Path; sys.path.insert(0, {str(ROOT)!r})\n"
    guard += "from server_app import processes; subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    guard += f"processes.end_with(os.getppid(), {token!r}, Path({str(folder)!r}), 0.05); time.sleep(60)"
    parent = f"import os, subprocess, sys; env = dict(os.environ, {processes.MARK}={token!r})\n"
    parent += f"subprocess.Popen([sys.executable, '-c', {guard!r}], env=env).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent])
    _await(2, token)
    time.sleep(0.5)
    process.kill()
    process.wait()
    assert _gone(token, 10)
    assert not folder.exists()


APP = """
import json, os, time
from pathlib import Path
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
{extra}
server = ServerApp()
client = ClientApp()

@client.query()
def query(message, context):
    return Message(RecordDict({{"seen": ConfigRecord({{"cwd": os.getcwd()}})}}), reply_to=message)

@server.main()
def main(grid: Grid, context: Context) -> None:
    out_dir = Path(str(context.run_config["out-dir"]))
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.05)
    (out_dir / "status.json").write_text(json.dumps({{"state": "running", "run": "local", "round": 0, "num_rounds": 1}}))
    time.sleep(float(context.run_config["seconds"]))
    asked = [Message(RecordDict({{"ask": ConfigRecord({{"a": 1}})}}), node, "query") for node in nodes]
    replies = list(grid.send_and_receive(asked))
    folders = sorted({{str(reply.content["seen"]["cwd"]) for reply in replies}})
    done = {{"state": "completed", "server": os.getcwd(), "clients": folders, "replies": len(replies)}}
    (out_dir / "status.json").write_text(json.dumps(done))
"""
PROJECT = """
[project]
name = "standin"
version = "0.1.0"
license = { file = "LICENSE" }
dependencies = []
[tool.flwr.app]
publisher = "test"
fab-include = ["*.py"]
[tool.flwr.app.components]
serverapp = "standin_app:server"
clientapp = "standin_app:client"
[tool.flwr.app.config]
out-dir = ""
seconds = 0.0
"""


def _app(folder: Path, extra: str = "") -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (folder / "LICENSE").write_text("none", encoding="utf-8")
    (folder / "standin_app.py").write_text(APP.format(extra=extra), encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_run_completes_with_its_own_code_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.secrets, "token_hex", lambda size: f"real-{os.getpid()}")
    app, temporary = _app(tmp_path / "app"), tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setattr(link.tempfile, "tempdir", str(temporary))
    status = simulate(Launch(out_dir=tmp_path / "out", run_config={}, nodes=2, app_dir=app))
    assert status == {"state": "completed", "server": str(app), "clients": [str(app)], "replies": 2}
    assert processes.marked(f"real-{os.getpid()}") == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_import_error_is_the_reason(tmp_path: Path) -> None:
    app = _app(tmp_path / "app", extra="import no_such_module")
    with pytest.raises(LaunchError, match="No module named 'no_such_module'"):
        simulate(Launch(out_dir=tmp_path / "out", run_config={}, nodes=2, app_dir=app))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_real_run_that_is_interrupted_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    app, out_dir, token = _app(tmp_path / "app"), tmp_path / "out", f"real-{os.getpid()}-{int(how)}"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\nfrom server_app import link\n"
        f"from server_app.launch import Launch, simulate\nlink.secrets.token_hex = lambda size: {token!r}\n"
        f"simulate(Launch(out_dir=Path({str(out_dir)!r}), run_config={{'seconds': 120.0}}, nodes=2, app_dir=Path({str(app)!r})))"
    )
    hears = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells start background jobs deaf to Ctrl-C
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    deadline = time.monotonic() + 120
    while read_status(out_dir).get("state") != "running":
        assert process.poll() is None, "the launcher ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert processes.marked(token)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert _gone(token, 30)
    if how == signal.SIGINT:
        assert re.search("KeyboardInterrupt", errors)
        assert read_status(out_dir)["reason"] == "stopped by the user"
