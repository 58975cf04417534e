"""Runs `flower-superlink` for as long as the process that asked for it lives.

Started as a file, `python superlink.py PARENT_PID [flower-superlink options]`: a SuperLink is a daemon,
and one whose launcher was killed would go on serving for ever. Its own children watch it in turn.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time


def stop_with(parent_pid: int, interval: float = 0.5) -> None:
    """Start a thread that interrupts this process once its parent is no longer `parent_pid`."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(interval)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Watch the parent named by the first argument and become `flower-superlink` with the others."""
    stop_with(int(sys.argv.pop(1)))
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


if __name__ == "__main__":
    main()
