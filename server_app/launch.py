"""One simulated run on a SuperLink of its own: started, followed to its true end, and taken down again.

A bare `flwr run` leaves a SuperLink behind that serves later runs with the folder, environment and
packages of the first, and exits with 0 whatever became of the run. Here both are private to one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.link import LaunchError, Served, healthy, last_error, private_superlink
from server_app.overrides import APP_DIR, Scalar

if TYPE_CHECKING:
    from server_app.control import Control, RunState

LOG_NAME = "flower.log"
# Seconds that Flower may take to end a run after the app has: Ray needs some to stop, a failed run need not wait.
_PATIENCE = {"completed": 60.0, "failed": 3.0}


@dataclass(frozen=True)
class Launch:
    """What to run.

    Attributes:
        out_dir: absolute; made if missing. The app writes `status.json` there, the launcher `launch.json` and `flower.log`.
        run_config: overrides of the app's run config; `out-dir` is set to `out_dir`.
        nodes: simulated nodes; 0 where the nodes are real.
        cpus: CPUs of one node at work.
        gpus: share of a GPU of one node at work; 0 hides the GPUs from it.
        workers: CPUs handed to Ray; `workers // cpus` nodes work at once.
        app_dir: folder of the Flower app, and working directory of all its processes.
        start_timeout: seconds a run may wait before it starts.
        modules: folder in which the nodes look for the user's own modules; None: nowhere but where Python does.
        warnings: what the user should know before it starts.
    """

    out_dir: Path
    run_config: Mapping[str, Scalar]
    nodes: int = 10
    cpus: int = 1
    gpus: float = 0.0
    workers: int = 0
    app_dir: Path = APP_DIR
    start_timeout: float = 120.0
    modules: Path | None = None
    warnings: tuple[str, ...] = ()


def simulate(launch: Launch, on_status: Callable[[dict[str, Any]], None] = lambda status: None) -> dict[str, Any]:
    """Run to the end and return the last `status.json`.

    Args:
        launch: what to run.
        on_status: called with each new content of `status.json`.

    Raises:
        LaunchError: the run did not complete.
        KeyboardInterrupt: interrupted; the run and everything it started have been stopped.
    """
    launch.out_dir.mkdir(parents=True, exist_ok=True)
    if not launch.run_config.get("resume"):  # a refused resume leaves what the earlier run says of itself
        (launch.out_dir / "status.json").unlink(missing_ok=True)
    wanted = {"nodes": launch.nodes, "cpus": launch.cpus, "gpus": launch.gpus, "workers": launch.workers}
    (launch.out_dir / "launch.json").write_text(json.dumps(wanted), encoding="utf-8")
    with closing_status(launch.out_dir), private_superlink(launch.app_dir, launch.modules) as link:
        return Follower(launch, link, on_status).follow()


@contextlib.contextmanager
def closing_status(out_dir: Path) -> Iterator[None]:
    """Let `status.json` say so when the run inside fails or is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        _close_status(out_dir, "stopped by the user")
        raise
    except LaunchError as error:
        _close_status(out_dir, str(error))
        raise


def read_status(out_dir: Path) -> dict[str, Any]:
    """Return `status.json`, or an empty dict while there is none."""
    try:
        status: dict[str, Any] = json.loads((out_dir / "status.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return status


def _close_status(out_dir: Path, reason: str) -> None:
    """Let no `status.json` of an ended run say that it is running."""
    status = read_status(out_dir)
    if status.get("state") in ("completed", "failed"):
        return
    temporary = out_dir / "status.json.tmp"
    temporary.write_text(json.dumps({**status, "state": "failed", "reason": reason}), encoding="utf-8")
    temporary.replace(out_dir / "status.json")


class Follower:
    """Submits the run and follows it: `status.json` often, Flower's own state once a second; `state` is its last one."""

    state: RunState

    def __init__(self, launch: Launch, link: Served, on_status: Callable[[dict[str, Any]], None]) -> None:
        self.launch, self.link, self.on_status = launch, link, on_status
        self.stamp = _stamp(launch.out_dir)  # of the earlier run's status, where this one goes on
        self.status: dict[str, Any] = {}

    def follow(self) -> dict[str, Any]:
        """Return the last status of a run that completed; raise LaunchError otherwise."""
        from server_app.control import Control  # a second of imports, while the SuperLink starts

        self._wait_until_healthy()
        control = Control(f"127.0.0.1:{self.link.port}", self.link.ca)
        try:
            try:
                run_id = control.start(self.launch.app_dir, self._run_config(), self._federation())
            except Exception as error:
                raise LaunchError(f"the run could not be submitted: {_one_line(str(error))}") from error
            writer = threading.Thread(target=self._copy_log, args=(control, run_id), daemon=True)
            writer.start()
            self._wait_until_finished(control, run_id, writer)
        finally:
            control.close()
        return read_status(self.launch.out_dir)

    def _run_config(self) -> dict[str, Scalar]:
        return {**self.launch.run_config, "out-dir": str(self.launch.out_dir)}

    def _federation(self) -> dict[str, int | float]:
        launch = self.launch
        if not launch.nodes:
            return {}
        return {
            "num_supernodes": launch.nodes,
            "client_resources_num_cpus": launch.cpus,
            "client_resources_num_gpus": launch.gpus,
            "init_args_num_cpus": launch.workers or max(os.cpu_count() or 1, launch.cpus),
        }

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self.launch.start_timeout
        while not healthy(self.link.port, self.link.ca):
            self.link.check()
            if time.monotonic() > deadline:
                raise LaunchError(f"Flower's SuperLink did not answer within {self.launch.start_timeout:.0f} s")
            time.sleep(0.1)

    def _wait_until_finished(self, control: Control, run_id: int, writer: threading.Thread) -> None:
        """Return once Flower and the app both say that the run completed; raise LaunchError with the reason otherwise."""
        started, asked, ended = time.monotonic(), 0.0, 0.0
        while True:
            now = time.monotonic()
            status = self._report()
            if not ended and status.get("state") in ("completed", "failed"):
                ended = now
            if now - asked >= (0.2 if ended else 1.0):
                asked = now
                self.link.check()
                self.state = state = control.state(run_id)
                if state.status == "finished":
                    break
                if state.status in ("pending", "starting") and now - started > self.launch.start_timeout:
                    raise LaunchError(f"the run was still {state.status} after {self.launch.start_timeout:.0f} s; see {self._log}")
            if ended and now - ended > _PATIENCE[status["state"]]:
                raise LaunchError(self._reason(status, "", f"the app {status['state']}, but Flower did not end the run"))
            time.sleep(0.1)
        writer.join(timeout=5.0)
        status = self._report()
        if state.result != "completed" or status.get("state") != "completed":
            raise LaunchError(self._reason(status, state.result, state.details))

    @property
    def _log(self) -> Path:
        return self.launch.out_dir / LOG_NAME

    def _report(self) -> dict[str, Any]:
        """Return the newest status, after passing it on if it is new."""
        if (stamp := _stamp(self.launch.out_dir)) != self.stamp:
            self.stamp = stamp
            if status := read_status(self.launch.out_dir):
                self.status = status
                self.on_status(status)
        return self.status

    def _copy_log(self, control: Control, run_id: int) -> None:
        with self._log.open("w", encoding="utf-8") as file, contextlib.suppress(Exception):  # the link may go first
            for text in control.log(run_id):
                file.write(text)
                file.flush()

    def _reason(self, status: Mapping[str, Any], result: str, details: str) -> str:
        if status.get("state") == "failed" and status.get("reason"):
            return _one_line(str(status["reason"]))
        if result == "completed":
            return f"the app ended without saying that it completed; see {self._log}"
        found = last_error(self._log)
        if details and not re.match(r"[\w.]*(Error|Exception)\b", found):  # the app said it in words, without a traceback
            found = details.removeprefix("Simulation failed with exception: ")
        return _one_line(found or f"Flower says {result!r} without a reason") + f" (more in {self._log})"


def _stamp(out_dir: Path) -> tuple[int, int] | None:
    """Return what tells one `status.json` from the next, or None while there is none."""
    try:
        info = (out_dir / "status.json").stat()
    except FileNotFoundError:
        return None
    return info.st_mtime_ns, info.st_ino


def _one_line(text: str) -> str:
    return " ".join(text.split())
