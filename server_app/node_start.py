"""The `flower-supernode` command of a node and the environment it needs."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from server_app.node_link import Address, Check
from server_app.settings import SettingsError

RUNTIME_PORT = 9094  # of the SuperNode's own API, on loopback; Flower's default
# The SuperLink forgets an upload of which nothing arrives for 180 s, and Flower waits 30 s for an answer; 10 s leave room for both.
_SECONDS_A_CHUNK = 10
_CHUNK_LIMITS = (65_536, 5_242_880)


@dataclass(frozen=True)
class Start:
    """How one node is started.

    Attributes:
        superlink: where the server is.
        node_config: what the node says of itself, keys as in `--node-config`.
        ca: certificates to trust; None: the system's.
        key: the node's private key, or None.
        insecure: plain HTTP.
        port: of the SuperNode's own API on loopback.
        uplink_mbit: megabits a second that the node can send; 0: fast enough for Flower's defaults.
    """

    superlink: Address
    node_config: Mapping[str, str | float]
    ca: Path | None = None
    key: Path | None = None
    insecure: bool = False
    port: int = RUNTIME_PORT
    uplink_mbit: float = 0.0
    program: Path = field(default_factory=lambda: _program())

    def __post_init__(self) -> None:
        if self.insecure and (self.key or self.ca):
            given = "--key" if self.key else "--root-certificates"
            raise SettingsError(f"{given} with --insecure: keys and certificates need TLS; leave one of the two out")

    @property
    def command(self) -> list[str]:
        """Return the words of the command."""
        words = [str(self.program), "--superlink", str(self.superlink)]
        words += ["--insecure"] if self.insecure else []
        words += ["--root-certificates", str(self.ca)] if self.ca else []
        words += ["--auth-supernode-private-key", str(self.key)] if self.key else []
        words += ["--port", str(self.port)] if self.port != RUNTIME_PORT else []
        return [*words, "--node-config", " ".join(f"{name}={_toml(name, value)}" for name, value in self.node_config.items())]

    @property
    def environment(self) -> dict[str, str]:
        """Return what the command needs beside the environment it finds; Flower starts its parts by bare names."""
        path = [str(self.program.parent), *filter(None, os.environ.get("PATH", os.defpath).split(os.pathsep))]
        extra = {"PATH": os.pathsep.join(dict.fromkeys(path)), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        return extra | transfer_settings(self.uplink_mbit)

    def shown(self) -> str:
        """Return the command as it can be typed."""
        prefix = [f"{name}={value}" for name, value in transfer_settings(self.uplink_mbit).items()]
        return " ".join([*prefix, shlex.join(self.command)])

    def replace_process(self) -> None:
        """Become `flower-supernode`; does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.command[0], self.command, os.environ | self.environment)


def transfer_settings(uplink_mbit: float) -> dict[str, str]:
    """Return Flower's environment variables for a slow uplink: one object at a time, in chunks that take about 10 s each."""
    if not uplink_mbit:
        return {}
    chunk = int(uplink_mbit * 1e6 / 8 * _SECONDS_A_CHUNK)
    smallest, largest = _CHUNK_LIMITS
    return {
        "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(min(max(chunk, smallest), largest)),
        "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES": "1",
    }


def check_port(port: int) -> Check:
    """Return whether the SuperNode's own API can listen on this port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            found = f"127.0.0.1:{port}, where the SuperNode talks to its training process: {error.strerror}"
            return Check("port", found, f"--port {port + 1}, if another node runs on this machine", fatal=True)
    return Check("port", f"127.0.0.1:{port} is free for the SuperNode and its training process")


def _program() -> Path:
    """Return the path of `flower-supernode`, that of this environment first; raises SettingsError."""
    own = Path(sys.executable).parent / "flower-supernode"
    found = str(own) if own.is_file() else shutil.which("flower-supernode")
    if not found:
        raise SettingsError("flower-supernode is not installed here; type: pip install -r requirements-node.txt")
    return Path(found)


def _toml(name: str, value: str | float) -> str:
    """Return a value as Flower's `--node-config` reads it: TOML, in which neither kind of quoted string may hold its own quote."""
    if not isinstance(value, str):
        return repr(float(value))
    if '"' not in value and "\\" not in value and value.isprintable():
        return f'"{value}"'
    if "'" not in value and value.isprintable():
        return f"'{value}'"
    raise SettingsError(f"--{name} {value!r}: Flower cannot take a value with both kinds of quotes, or with a line break; rename it")
