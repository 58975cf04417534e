"""A SuperLink for one run: its own folder, port and environment, and no trace of it afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from server_app import processes

# Ray's socket paths are about 70 characters longer than its folder's; the system's limit is 107.
_RAY_PATH_LIMIT = 36


class LaunchError(RuntimeError):
    """The run did not complete; the message is the reason in one line."""


def healthy(port: int, ca: Path | None = None) -> bool:
    """Return whether a SuperLink answers on this port of this machine; over HTTPS where its CA is given."""
    try:
        secure = [urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca))] if ca else []
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *secure)
        with opener.open(f"{'https' if ca else 'http'}://127.0.0.1:{port}/health", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def last_error(log: Path) -> str:
    """Return the last line of a log that reads like an exception, else what Flower said with its exit code, else the last line."""
    try:
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b.*:", line)]
    exits = [" ".join(found.split()) for found in re.findall(r"Exit Code: \d+\n(?:\S.*\n)*", text)]
    return (errors or exits or lines or [""])[-1]


class Served(Protocol):
    """A SuperLink to follow a run on: its port on this machine, and the CA to trust where it speaks TLS."""

    @property
    def port(self) -> int: ...
    @property
    def ca(self) -> Path | None: ...
    def check(self) -> None:
        """Raise LaunchError if something the run needs has ended."""


@dataclass(frozen=True)
class Link:
    """A SuperLink's process, the port it will serve on, and its own log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    ca: Path | None = None

    def check(self) -> None:
        """Raise LaunchError, with the reason from its log, if the SuperLink has ended."""
        if (code := self.process.poll()) is not None:
            raise LaunchError(f"Flower's SuperLink ended with code {code}: {last_error(self.log)}")


@contextlib.contextmanager
def private_superlink(app_dir: Path, modules: Path | None = None) -> Iterator[Link]:
    """Yield a starting SuperLink; at the end nothing of it is left, neither process nor file.

    Args:
        app_dir: working directory of it and of everything it starts. Ray's workers look for code there first.
        modules: folder in which the user's own modules are looked for too.

    Raises:
        LaunchError: no usable folder for temporary files.
    """
    token = secrets.token_hex(8)
    home = Path(tempfile.mkdtemp(prefix="hf-"))
    try:
        if "," in str(home):
            raise LaunchError(f"Flower cannot install an app under {home}: set TMPDIR to a folder without a comma in its path")
        port, log = free_port(), home / "superlink.log"
        guard = [sys.executable, "-P", str(Path(processes.__file__)), str(os.getpid()), str(home)]
        flags = ["--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                guard + flags,
                cwd=app_dir,
                env=environment(home, token, modules),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Link(process, port, log)
        finally:
            with uninterrupted():
                processes.end(token)
                process.wait()
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore further interrupts, so that a second Ctrl-C leaves nothing half stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """Return a port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(home: Path, token: str, modules: Path | None = None) -> dict[str, str]:
    """Return the environment of everything the launch starts."""
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}  # never join a cluster found by chance
    scripts = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    local = ",".join(filter(None, [env.get("NO_PROXY") or env.get("no_proxy"), "127.0.0.1", "localhost"]))
    env |= {
        processes.MARK: token,
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([*dict.fromkeys(scripts), env.get("PATH", "")]),  # Flower starts its parts by bare names
        "NO_PROXY": local,
        "no_proxy": local,
    }
    if modules is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(modules)]))
    if len(str(home)) <= _RAY_PATH_LIMIT:
        env["RAY_TMPDIR"] = str(home)
    return env
