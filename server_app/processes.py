"""The processes of one launch, found by a mark in their environment, and their end.

Flower and Ray start daemons in sessions of their own, so neither a process group nor the tree of
children reaches them all once a parent has died; the environment is inherited by every one of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

MARK = "HETEROFLEET_LAUNCH"


def marked(token: str) -> list[int]:
    """Return the ids of all live processes, but this one, whose environment holds MARK=token."""
    proc = Path("/proc")
    if proc.is_dir():
        return [int(path.name) for path in proc.iterdir() if path.name.isdigit() and _carries(path, token)]
    listing = subprocess.run(["ps", "axeww", "-o", "pid=,command="], capture_output=True, text=True, check=False).stdout
    found = [int(line.split(None, 1)[0]) for line in listing.splitlines() if f"{MARK}={token}" in line]
    return [pid for pid in found if pid != os.getpid()]


def _carries(path: Path, token: str) -> bool:
    try:
        return int(path.name) != os.getpid() and f"{MARK}={token}".encode() in (path / "environ").read_bytes().split(b"\0")
    except OSError:  # another user's process, or one that ended meanwhile
        return False


def end(token: str, patience: float = 4.0) -> None:
    """End every process marked with `token`: ask, wait up to `patience` seconds, then kill what is left."""
    deadline = time.monotonic() + patience
    asked: set[int] = set()
    while pids := marked(token):
        late = time.monotonic() > deadline
        for pid in pids:
            if late or pid not in asked:
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        if time.monotonic() > deadline + 5.0:
            return
        time.sleep(0.05)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
