"""A comparison on the terminal: how far its jobs are, then its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from server_app import compare_page, show
from server_app.cases import BASELINES, Comparison
from server_app.jobs import Progress as Jobs
from server_app.page import duration
from server_app.progress import text_of


class JobWatch:
    """Shows a bar for all jobs and one for each running job on a terminal, and a line for each ended job elsewhere."""

    def __init__(self, console: Console, comparison: Comparison, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.live = console.is_terminal and not quiet
        self.names: dict[str, str] = {}
        for case in comparison.cases:
            for variant in case.variants:
                chosen = f" ({compare_page.settings(variant.chosen)})" if variant.chosen else ""
                for job in variant.jobs:
                    self.names.setdefault(job.folder, f"{case.name}{chosen}, seed {job.seed}")
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.progress = Progress(*columns, console=console, disable=not self.live)
        self.all = self.progress.add_task("runs", total=len(comparison.jobs), text="")
        self.tasks: dict[str, TaskID] = {}
        self.told: set[str] = set()

    def __enter__(self) -> JobWatch:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def __call__(self, jobs: Jobs) -> None:
        """Show how far the jobs are now."""
        count = jobs.skipped + len(jobs.over)
        left = "" if jobs.eta_seconds is None else f"about {duration(jobs.eta_seconds)} left"
        self.progress.update(self.all, completed=count, total=jobs.total, text=left)
        for name, status in jobs.running.items():
            if name not in self.tasks:
                self.tasks[name] = self.progress.add_task(self.names[name], total=None, text="starting")
            if status:
                number, total = int(status.get("round") or 0), int(status.get("num_rounds") or 0)
                self.progress.update(self.tasks[name], completed=number, total=total or None, text=text_of(status))
        for name, record in jobs.over.items():
            if name in self.told:
                continue
            self.told.add(name)
            if name in self.tasks:
                self.progress.remove_task(self.tasks.pop(name))
            if not self.quiet:
                why = "" if record.get("state") == "done" else f": {str(record.get('reason', '')).splitlines()[0]}"
                spent = duration(float(record.get("cpu_seconds", 0.0)))
                line = f"[{jobs.skipped + len(self.told)}/{jobs.total}] {self.names[name]}: {record.get('state')}{why}, {spent} of CPU"
                self.console.print(line + ("" if self.live or not left else f", {left}"), markup=False, highlight=False, soft_wrap=True)


def results(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table of a comparison, what must be said beside it, and what it cost."""
    rows = result["rows"]
    _print_table(console, compare_page.score_heads(result), [compare_page.score_cells(row) for row in rows])
    _print_table(console, compare_page.cost_heads(result), [compare_page.cost_cells(row, result) for row in rows])
    for note in compare_page.notes(result):
        console.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(compare_page.FINETUNED_NOTE, markup=False, highlight=False, soft_wrap=True)
    console.print(compare_page.cost(result), markup=False, highlight=False)


def _print_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    shown = show.table("", heads, numbers=len(heads) - 1)
    for index, row in enumerate(rows):
        if index == len(BASELINES):
            shown.add_section()
        shown.add_row(*map(escape, row))
    console.print(shown)
