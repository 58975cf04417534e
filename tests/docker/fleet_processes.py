"""The services of the compose files as processes of this machine: same commands, secrets from a folder, ports on loopback."""

from __future__ import annotations

import contextlib
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from server_app.link import environment, free_port
from tests.docker.compose_files import read

SCRIPTS = Path(sys.executable).parent


@dataclass
class Fleet:
    """A folder with certs/, state and logs, the ports taken so far by `service:port`, and the environment of every command."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        home = self.folder / "flwr"
        home.mkdir()
        root = self.folder / "certs/ca.crt"
        connection = f'address = "{self.address("superlink:8000")}"\nroot-certificates = "{root}"\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "fleet"\n[superlink.fleet]\n{connection}')
        self.env = environment(self.folder, "compose") | {"HETEROFLEET_HOME": str(self.folder / "home"), "COLUMNS": "200"}

    def address(self, name: str) -> str:
        """Return where on loopback `service:port` of a compose file is found."""
        return f"127.0.0.1:{self.ports.setdefault(name, free_port())}"

    def command(self, file: str, service: str, **variables: str) -> list[str]:
        """Return a service's command for this machine."""
        project = read(file, **variables)
        described = project["services"][service]
        places = {f"/run/secrets/{name}": str(self.folder / secret["file"]) for name, secret in project["secrets"].items()}
        places |= {"/app/state": str(self.folder), "--host=0.0.0.0": "--host=127.0.0.1", "=127.0.0.1:9099": f"=127.0.0.1:{free_port()}"}
        words = [str(SCRIPTS / described["entrypoint"][0]), *described["command"]]
        for place, here in places.items():
            words = [word.replace(place, here) for word in words]
        own = re.compile(r"^--port=(\d+)$")
        words = [own.sub(lambda port: f"--port={self.address(f'{service}:{port[1]}').split(':')[1]}", word) for word in words]
        known = re.compile(rf"(?<==)(?:{'|'.join(project['services'])}):\d+$")
        return [known.sub(lambda name: self.address(name[0]), word) for word in words]

    @contextlib.contextmanager
    def running(self, file: str, service: str, **variables: str) -> Iterator[Service]:
        """Yield the service while it runs; kill it at the end."""
        log = self.folder / f"{service}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                self.command(file, service, **variables),
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Service(process, log)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def flwr(self, *words: str) -> str:
        """Return what `flwr` prints; its failure is the test's."""
        done = subprocess.run([SCRIPTS / "flwr", *words], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def healthy(self, name: str, ca: Path | None, scheme: str = "https") -> bool:
        """Return whether /health answers there; no one answering or trusting is False."""
        try:
            return self.health(name, ca, scheme) == 200
        except OSError:
            return False

    def health(self, name: str, ca: Path | None, scheme: str = "https") -> int:
        """Return the status of /health; the system's CAs are asked where `ca` is None."""
        context = ssl.create_default_context(cafile=ca)
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        with opener.open(f"{scheme}://{self.address(name)}/health", timeout=5) as answer:
            return int(answer.status)


@dataclass(frozen=True)
class Service:
    """A running process and its log."""

    process: subprocess.Popen[bytes]
    log: Path

    def eventually(self, check: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until `check()`; the process must not end before."""
        deadline = time.monotonic() + seconds
        while not check():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
