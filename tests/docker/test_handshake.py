"""The commands of the compose files as processes of this machine, with the files of `heterofleet certs`: who gets in and who does not."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from server_app.certs import create
from tests.docker.compose_files import read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True)
class Fleet:
    """A running SuperLink, its port, the folder with its certs/ and state, and the environment of every command."""

    folder: Path
    port: int
    env: dict[str, str]

    def command(self, file: str, service: str, port: int, **variables: str) -> list[str]:
        """Return a service's command as a process of this machine: secrets from certs/, state here, its own port on loopback."""
        project = read(file, **variables)
        words = [*project["services"][service]["entrypoint"], *project["services"][service]["command"]]
        paths = {f"/run/secrets/{name}": str(self.folder / secret["file"]) for name, secret in project["secrets"].items()}
        places = {**paths, "/app/state": str(self.folder), "--host=0.0.0.0": "--host=127.0.0.1"}
        for place, here in places.items():
            words = [word.replace(place, here) for word in words]
        return [str(SCRIPTS / words[0]), *(f"--port={port}" if word.startswith("--port=") else word for word in words[1:])]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=env, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def health(port: int, ca: Path | None, scheme: str = "https") -> int:
    context = ssl.create_default_context(cafile=ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(f"{scheme}://127.0.0.1:{port}/health", timeout=5) as answer:
        return int(answer.status)


def eventually(check, process: subprocess.Popen[bytes], log: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def healthy(port: int, ca: Path | None, scheme: str = "https") -> bool:
    try:
        return health(port, ca, scheme) == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    create(folder / "certs", nodes=2)
    create(folder / "foreign", nodes=1)
    home = folder / "flwr"
    home.mkdir()
    quiet = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "NO_PROXY": "127.0.0.1"}
    made = Fleet(folder, free_port(), os.environ | quiet | {"no_proxy": "127.0.0.1", "COLUMNS": "200"})
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "fleet"\n[superlink.fleet]\naddress = "127.0.0.1:{made.port}"\n'
        f'root-certificates = "{folder}/certs/ca.crt"\n'
    )
    log = folder / "superlink.log"
    with running(made.command("compose.server.yml", "superlink", made.port), made.env, log) as process:
        eventually(lambda: healthy(made.port, folder / "certs/ca.crt"), process, log)
        yield made


def test_the_superlink_answers_those_who_hold_its_ca_and_no_one_who_distrusts_it(fleet):
    assert health(fleet.port, fleet.folder / "certs/ca.crt") == 200
    for ca in (fleet.folder / "foreign/ca.crt", None):
        with pytest.raises(urllib.error.URLError) as refused:
            health(fleet.port, ca)
        assert isinstance(refused.value.reason, ssl.SSLCertVerificationError)
    with pytest.raises(OSError):
        health(fleet.port, None, "http")


def test_a_node_gets_in_once_its_key_is_registered(fleet):
    port, log = free_port(), fleet.folder / "node.log"
    node = {"SUPERLINK_HOST": "127.0.0.1", "SUPERLINK_PORT": str(fleet.port), "NODE_NAME": "pi-1", "CERTS_DIR": "./certs/node-1"}
    command = fleet.command("compose.node.yml", "supernode", port, **node)
    with running(command, fleet.env, log) as process:
        assert process.wait(timeout=60) == 1
    assert "2004" in log.read_text()
    register = ["supernode", "register", str(fleet.folder / "certs/node-1/node.pub"), "fleet", "--name", "node-1"]
    done = subprocess.run([SCRIPTS / "flwr", *register], env=fleet.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    with running(command, fleet.env, log) as process:
        eventually(lambda: "SuperNode ID" in log.read_text(), process, log)
        assert healthy(port, None, "http")  # what the container's health check asks
