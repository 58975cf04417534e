"""The processes of one launch, found by a mark in their environment, and their end.

Flower and Ray start daemons in sessions of their own, so neither a process group nor the tree of
children reaches them all once a parent has died; the environment is inherited by every one of them.

Run as a file, `python processes.py PARENT_PID FOLDER [flower-superlink options]`, this is a SuperLink that
outlives neither its launcher nor its work: should the launcher be killed, it ends whatever carries its mark,
removes FOLDER and itself. `python processes.py PARENT_PID FOLDER watch TOKEN` does only the watching, for launches
whose SuperLink may itself be killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

MARK = "HETEROFLEET_LAUNCH"


def marked(token: str) -> list[int]:
    """Return the ids of all live processes, but this one, whose environment holds a MARK that begins with `token`."""
    proc = Path("/proc")
    if proc.is_dir():
        return [int(path.name) for path in proc.iterdir() if path.name.isdigit() and _carries(path, token)]
    listing = subprocess.run(["ps", "axeww", "-o", "pid=,command="], capture_output=True, text=True, check=False).stdout
    found = [int(line.split(None, 1)[0]) for line in listing.splitlines() if f"{MARK}={token}" in line]
    return [pid for pid in found if pid != os.getpid()]


def _carries(path: Path, token: str) -> bool:
    try:
        entries = (path / "environ").read_bytes().split(b"\0")
        return int(path.name) != os.getpid() and any(entry.startswith(f"{MARK}={token}".encode()) for entry in entries)
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


def kill(token: str) -> None:
    """Kill every process marked with `token` at once, as a power cut would; return when none is left."""
    while pids := marked(token):
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def end_with(parent_pid: int, token: str, folder: Path, interval: float = 0.5) -> None:
    """Start a thread that ends everything marked with `token`, this process last, once this one's parent is not `parent_pid`."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(interval)
        end(token)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Watch over the launch, and become `flower-superlink` unless told only to watch."""
    parent_pid, folder = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
    if sys.argv[1:2] == ["watch"]:
        end_with(parent_pid, sys.argv[2], folder)
        signal.pause()
    end_with(parent_pid, os.environ[MARK], folder)
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


if __name__ == "__main__":
    main()
