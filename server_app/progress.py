"""A run's progress on the terminal, from what `status.json` says."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from server_app.page import duration


class Watch:
    """Shows a bar for each strategy on a terminal, and a line for each round elsewhere. Call it with every new status."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.live = console.is_terminal and not quiet
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
        self.progress = Progress(*columns, console=console, transient=False, disable=not self.live)
        self.start = self.progress.add_task("starting Flower and the nodes", total=None, text="")
        self.tasks: dict[str, TaskID] = {}
        self.printed: set[tuple[str, int]] = set()

    def __enter__(self) -> Watch:
        if not self.live and not self.quiet:
            self.console.print("starting Flower and the nodes; the first round takes about half a minute to come", highlight=False)
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def __call__(self, status: Mapping[str, Any]) -> None:
        """Show a new status."""
        run, number, total = str(status.get("run") or ""), int(status.get("round") or 0), int(status.get("num_rounds") or 0)
        if not run or self.quiet:
            return
        if not self.live:
            if number and (run, number) not in self.printed:
                self.printed.add((run, number))
                self.console.print(f"{run}: {text_of(status)}", markup=False, highlight=False)
            return
        self.progress.update(self.start, visible=False)
        if run not in self.tasks:
            for earlier in self.tasks.values():  # its last round may have come and gone between two looks
                self.progress.update(earlier, completed=total, text=f"{total} rounds done")
            self.tasks[run] = self.progress.add_task(run, total=total, text="")
        self.progress.update(self.tasks[run], completed=number, text=text_of(status))


def text_of(status: Mapping[str, Any]) -> str:
    """Return a status as words: round i of n, the main metric, seconds of the round, time left."""
    number, total = int(status.get("round") or 0), int(status.get("num_rounds") or 0)
    parts = [f"round {number} of {total}"]
    if (value := status.get("value")) is not None and status.get("metric"):
        parts.append(f"{str(status['metric']).removesuffix('_mean')} {value:.3f}")
    if number and (seconds := status.get("seconds")) is not None:
        parts.append(f"{seconds:.1f} s")
    if number and (left := status.get("eta_seconds")):
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)
