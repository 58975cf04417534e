"""A real deployment on one machine: a SuperLink and SuperNodes as processes on loopback, each with what it would have elsewhere.

Keys, certificates, data and Flower's own folders lie in one private folder that is removed at the end, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from server_app import certs, processes
from server_app.link import LaunchError, environment, free_port, healthy, last_error, uninterrupted
from server_app.overrides import APP_DIR, Scalar

if TYPE_CHECKING:
    from server_app.control import Control

SERVER = "superlink"
_START_SECONDS = 120.0


class Deployment:
    """One SuperLink and its nodes. Made by `deployment`, which also takes everything down.

    Attributes:
        folder: private, mode 0700; `certs` in it is what `heterofleet certs` makes, each node has a folder of its name.
        logs: where each process writes `<name>.log`; a process that is started again goes on in it.
        port: of the SuperLink, the same after it was started again.
        secure: TLS and registered keys; else plain HTTP for anyone.
        processes: the SuperLink and the nodes that should be running, by name.
    """

    def __init__(self, folder: Path, logs: Path, *, secure: bool, app_dir: Path, modules: Path | None) -> None:
        self.folder, self.logs, self.secure, self.app_dir, self.modules = folder, logs, secure, app_dir, modules
        self.port, self.token = free_port(), secrets.token_hex(8)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def ca(self) -> Path | None:
        """The CA that nodes and operators trust; None without TLS."""
        return self.folder / "certs/ca.crt" if self.secure else None

    def check(self) -> None:
        """Raise LaunchError, with the reason from its log, if the SuperLink or a node has ended by itself."""
        for name, process in self.processes.items():
            if (code := process.poll()) is not None:
                raise LaunchError(f"{name} ended with code {code}: {last_error(self.log(name))} (more in {self.log(name)})")

    def log(self, name: str) -> Path:
        """Return where the process of this name writes."""
        return self.logs / f"{name}.log"

    def connect(self) -> Control:
        """Return a client of the SuperLink; close it after use."""
        from server_app.control import Control

        return Control(f"127.0.0.1:{self.port}", self.ca)

    def start_superlink(self) -> None:
        """Start the SuperLink, or start it again with the nodes it knew, and return once it answers.

        Raises:
            LaunchError: it ended, or those who trust its CA get no answer in time.
        """
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation"]
        made = self.folder / "certs"
        tls = ["--ssl-ca-certfile", f"{made}/ca.crt", "--ssl-certfile", f"{made}/server.pem", "--ssl-keyfile", f"{made}/server.key"]
        self._start(SERVER, [*command, *(["--enable-supernode-auth", *tls] if self.secure else ["--insecure"])])
        deadline = time.monotonic() + _START_SECONDS
        while not healthy(self.port, self.ca):
            self.check()
            if time.monotonic() > deadline:
                raise LaunchError(f"Flower's SuperLink did not answer within {_START_SECONDS:.0f} s; see {self.log(SERVER)}")
            time.sleep(0.1)

    def register(self, name: str, key: str) -> None:
        """Let the node with key folder `key` of `certs` in under `name`; nothing to do without TLS."""
        if not self.secure:
            return
        control = self.connect()
        try:
            control.register(self.folder / "certs" / key / "node.pub", name)
        finally:
            control.close()

    def home(self, name: str) -> Path:
        """Return the private folder of a node, made if missing."""
        home = self.folder / name
        home.mkdir(mode=0o700, exist_ok=True)
        return home

    def start_node(self, name: str, config: Mapping[str, Scalar], key: str) -> None:
        """Start a SuperNode, or start it again, and return at once; whether it gets in is seen by `wait_online`.

        Args:
            name: of the process and its folder.
            config: what `--node-config` says.
            key: its folder in `certs`; empty: it speaks plain HTTP and has none.
        """
        command = ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port())]
        own = self.folder / "certs" / key
        tls = ["--root-certificates", f"{own}/ca.crt", "--auth-supernode-private-key", f"{own}/node.key"]
        self._start(name, [*command, *(tls if key else ["--insecure"]), "--node-config", node_config(config)])

    def wait_online(self, count: int, seconds: float = _START_SECONDS) -> None:
        """Return once `count` nodes are connected.

        Raises:
            LaunchError: a node ended, or they do not come in time.
        """
        deadline, control = time.monotonic() + seconds, self.connect()
        try:
            while len(here := control.online()) < count:
                self.check()
                if time.monotonic() > deadline:
                    raise LaunchError(f"{len(here)} of {count} nodes connected within {seconds:.0f} s; their logs are in {self.logs}")
                time.sleep(0.2)
        finally:
            control.close()

    def stop(self, name: str) -> None:
        """End a process as an operator does, and all it started; a node takes its leave of the SuperLink."""
        process = self.processes.pop(name)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        processes.kill(self._mark(name))
        process.wait()

    def kill(self, name: str) -> None:
        """Kill a process and all it started at once, as a power cut does."""
        process = self.processes.pop(name)
        processes.kill(self._mark(name))
        process.wait()

    def at_work(self, name: str) -> bool:
        """Return whether a node's training code runs now."""
        return any(b"flwr-clientapp" in _command_line(pid) for pid in processes.marked(self._mark(name)))

    def _mark(self, name: str) -> str:
        return f"{self.token}/{name}/"

    def _start(self, name: str, command: list[str]) -> None:
        home = self.home(name)
        env = environment(home, self._mark(name), self.modules) | {"TMPDIR": str(home)}
        if name != SERVER:
            env["HETEROFLEET_HOME"] = str(home / "heterofleet")
        with self.log(name).open("ab") as stream:
            self.processes[name] = subprocess.Popen(
                [_script(command[0]), *command[1:]],
                cwd=self.app_dir if name == SERVER else home,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=-1 if name == SERVER else 0o077,  # nobody else on the machine may read what a node writes
            )


@contextlib.contextmanager
def deployment(logs: Path, *, keys: int, secure: bool = True, app_dir: Path = APP_DIR, modules: Path | None = None) -> Iterator[Deployment]:
    """Yield a deployment in which nothing runs yet; at the end nothing of it is left but its logs.

    Args:
        logs: folder for the logs; made if missing.
        keys: node keys to make, in `certs/node-1` and so on.
        secure: TLS and node authentication.
        app_dir: of the app; working directory of the server.
        modules: folder in which the user's own modules are looked for too.

    Raises:
        LaunchError: Flower cannot work in the folder for temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix="hf-"))
    guard = None
    try:
        if "," in str(folder):
            raise LaunchError(f"Flower cannot install an app under {folder}: set TMPDIR to a folder without a comma in its path")
        logs.mkdir(parents=True, exist_ok=True)
        made = Deployment(folder, logs, secure=secure, app_dir=app_dir, modules=modules)
        watch = [sys.executable, "-P", str(Path(processes.__file__)), str(os.getpid()), str(folder), "watch", made.token]
        guard = subprocess.Popen(watch, stdin=subprocess.DEVNULL, start_new_session=True)
        if secure:
            certs.create(folder / "certs", nodes=keys)
        try:
            yield made
        finally:
            with uninterrupted():
                processes.end(made.token)
                for process in made.processes.values():
                    process.wait()
    finally:
        with uninterrupted():
            if guard is not None:
                guard.kill()
                guard.wait()
            shutil.rmtree(folder, ignore_errors=True)


def node_config(config: Mapping[str, Scalar]) -> str:
    """Return the text for `--node-config`.

    Raises:
        LaunchError: a value that Flower cannot read from there.
    """
    for key, value in config.items():
        if isinstance(value, str) and ('"' in value or "\\" in value or "\n" in value):
            raise LaunchError(f"{key} = {value!r}: Flower's --node-config takes no quotation marks, backslashes or line breaks")
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={str(value).lower()}" for key, value in config.items())


def _script(name: str) -> str:
    """Return the path of one of Flower's commands, beside the Python that runs or as the shell would find it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise LaunchError(f"Flower's command {name} is not in {beside.parent} nor on the PATH; activate the environment of heterofleet")
    return found


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
