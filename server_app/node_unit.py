"""The systemd unit that keeps a node running, and what of this machine the unit's service could not reach."""

from __future__ import annotations

import getpass
import os
import pwd
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from server_app.node_link import Check
from server_app.node_start import Start

_SERVICE_USER = "heterofleet"
_STATE_ROOT = Path("/var/lib")  # where systemd makes a service's StateDirectory
_PRIVATE = (Path("/tmp"), Path("/var/tmp"))  # PrivateTmp=yes gives the service folders of its own in their place
_READ, _WRITE, _ENTER = 4, 2, 1


def unit(start: Start, state_dir: Path, *, memory: int, user: str = "") -> str:
    """Return a systemd unit for the node.

    Args:
        start: the node.
        state_dir: where it keeps private state, its cache and Flower's copy of the app.
        memory: bytes that all its processes need together, as measured; 0: unknown, no limit is set.
        user: who runs it; empty: the one who asks, or `heterofleet` where that is root.
    """
    name = start.node_config["name"]
    own = {"HETEROFLEET_HOME": state_dir, "FLWR_HOME": state_dir / "flwr", "HF_HOME": state_dir / "huggingface"}
    env = start.environment | {key: str(path) for key, path in own.items()}
    env["PATH"] = os.pathsep.join([str(start.program.parent), "/usr/local/bin", "/usr/bin", "/bin"])
    place = [f"ReadWritePaths={_item(str(state_dir))}"]
    if _made_by_systemd(state_dir):
        place = [f"StateDirectory={_item(str(state_dir.relative_to(_STATE_ROOT)), pairs=True)}", "StateDirectoryMode=0700"]
    limit = [f"MemoryMax={_mebibytes(memory)}M"] if memory else []
    lines = [
        "[Unit]",
        f"Description=heterofleet node {_specifier(str(name))}",
        "Wants=network-online.target",
        "After=network-online.target time-sync.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        f"User={user or default_user()}",
        *(f"Environment={_word(f'{key}={value}')}" for key, value in env.items()),
        f"ExecStart={' '.join(_word(word, command=True) for word in start.command)}",
        # A node that is refused ends; it is let in as soon as it is registered.
        "Restart=always",
        "RestartSec=10",
        "KillSignal=SIGINT",
        "TimeoutStopSec=30",
        *limit,
        # Only the training process ends for want of memory: the SuperNode reports it and goes on.
        "OOMPolicy=continue",
        *place,
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        "PrivateTmp=yes",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def default_user() -> str:
    """Return who runs a unit where nobody is named: who asks, or `heterofleet` where that is root."""
    return getpass.getuser() if os.geteuid() else _SERVICE_USER


@dataclass(frozen=True)
class _Who:
    """The user of the service; `uid` None: there is no such user yet, who will own nothing and be in no group of others."""

    name: str
    uid: int | None = None
    groups: frozenset[int] = frozenset()

    @classmethod
    def of(cls, name: str) -> _Who:
        try:
            entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
        except KeyError:
            return cls(name)
        return cls(name, entry.pw_uid, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid)))

    def may(self, status: os.stat_result, wanted: int) -> bool:
        """Return whether the mode bits of a file or folder grant this user what is wanted."""
        if self.uid == 0:
            return True
        shift = 6 if self.uid == status.st_uid else 3 if status.st_gid in self.groups else 0
        return (status.st_mode >> shift) & wanted == wanted


def unreachable(start: Start, state_dir: Path, *, user: str = "") -> list[Check]:
    """Return a check for each file or folder of the node that its service could not use as the unit of `unit` runs it.

    Args:
        start: the node.
        state_dir: absolute.
        user: as in `unit`.
    """
    who = _Who.of(user or default_user())
    found = []
    if who.uid is None:
        home = shlex.quote(str(state_dir))
        found = [_told(f"no user {who.name} is on this machine", f"sudo useradd --system --home-dir {home} {shlex.quote(who.name)}")]
    data = Path(str(start.node_config["data"]))
    python = (start.program.parent / "python").resolve()
    found += _unread(who, "flower-supernode", start.program, "install heterofleet where all users may read, such as in /opt") or _unread(
        who, "Python", python, "use a Python where all users may read, such as the system's"
    )
    for option, path in (("--root-certificates", start.ca), ("--data", data if data.is_absolute() else None)):
        found += _unread(who, option, path, f"sudo chmod -R o+rX {_quoted(path)}") if path else []
    found += _unread(who, "--key", start.key, f"sudo chown {shlex.quote(who.name)} {_quoted(start.key)}") if start.key else []
    return found if _made_by_systemd(state_dir) else found + _unwritten(who, state_dir)


def _made_by_systemd(state_dir: Path) -> bool:
    """Return whether systemd makes the folder at each start, with the right owner."""
    return _STATE_ROOT in state_dir.parents


def _unread(who: _Who, option: str, path: Path, cure: str) -> list[Check]:
    """Return why the service cannot read what exists at `path`, if so; `cure`: what to type where it may enter, but not read."""
    found = _hidden(option, path) or _closed(who, option, path)
    if found or not os.path.exists(path):  # Path.exists raises where this user may not look
        return found
    status = path.stat()
    if who.may(status, _READ | (_ENTER if path.is_dir() else 0)):
        return []
    return [_told(f"{option} {path}: user {who.name} may not read it ({_mode(status)})", cure)]


def _unwritten(who: _Who, state_dir: Path) -> list[Check]:
    """Return why the service cannot write into `state_dir`, if so."""
    found = _hidden("--state-dir", state_dir) or _closed(who, "--state-dir", state_dir)
    if found:
        return found
    name, place = shlex.quote(who.name), f"--state-dir {state_dir}"
    if not os.path.exists(state_dir):
        cure = f"sudo install -d -m 700 -o {name} {_quoted(state_dir)}, or a folder in {_STATE_ROOT}, which systemd makes"
        return [_told(f"{place} is not there, and the service does not start without it (ReadWritePaths)", cure)]
    status = state_dir.stat()
    if who.may(status, _READ | _WRITE | _ENTER):
        return []
    return [_told(f"{place}: user {who.name} may not write into it ({_mode(status)})", f"sudo chown -R {name} {_quoted(state_dir)}")]


def _hidden(option: str, path: Path) -> list[Check]:
    """Return a check if the path lies where the service has a folder of its own."""
    for folder in _PRIVATE:
        if path.is_relative_to(folder):
            return [_told(f"{option} {path}: the service has a {folder} of its own (PrivateTmp=yes), where it is not", _MOVE)]
    return []


def _closed(who: _Who, option: str, path: Path) -> list[Check]:
    """Return a check for the first folder on the way to `path` that the user may not enter."""
    for folder in reversed(path.parents):
        if not os.path.exists(folder):
            break
        if not who.may(folder.stat(), _ENTER):
            told = f"{option} {path}: user {who.name} may not enter {folder} ({_mode(folder.stat())})"
            return [_told(told, f"{_MOVE}, or: sudo chmod o+x {_quoted(folder)}")]
    return []


_MOVE = "use another place, such as /srv"


def _told(found: str, cure: str) -> Check:
    return Check("unit", found, cure)


def _mode(status: os.stat_result) -> str:
    """Return the owner and the mode of a file for a message."""
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    return f"mode {stat.S_IMODE(status.st_mode):04o}, owner {owner}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _word(text: str, *, command: bool = False) -> str:
    """Return one word of a unit file, quoted; in a command `$` would be a variable."""
    escaped = _specifier(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped.replace("$", "$$") if command else escaped}"'


def _item(text: str, *, pairs: bool = False) -> str:
    """Return one path of a list, which systemd splits at spaces.

    Args:
        text: the path.
        pairs: systemd splits it at a colon too, and knows a double quote in it only as \\x22.
    """
    if all(char.isalnum() or char in "/._-%@+=" for char in text):
        return _specifier(text)
    if not pairs:
        return _word(text)
    escaped = _specifier(text).replace("\\", "\\\\").replace(":", "\\:").replace('"', "\\x22")
    return f'"{escaped}"'


def _specifier(text: str) -> str:
    return text.replace("%", "%%")


def _mebibytes(count: int) -> int:
    """Return `count` bytes and a quarter more in MiB, rounded up to 64."""
    return -(-count * 5 // 4 // 2**20 // 64) * 64
