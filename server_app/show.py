"""Tables for the terminal."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server_app.overrides import APP_DIR, Scalar
from server_app.page import duration, model_head, percent, points, remarks, size
from server_app.rundata import models_of

_MOST_NODES, _MOST_FAILURES = 40, 8


def table(title: str, heads: Sequence[str], numbers: int = 0) -> Table:
    """Return an empty table whose last `numbers` columns are numbers."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="bold")
    for index, head in enumerate(heads):
        made.add_column(head, justify="right" if index >= len(heads) - numbers else "left", no_wrap=index >= len(heads) - numbers)
    return made


def results(console: Console, summary: Mapping[str, Any]) -> None:
    """Print how each node (each model, where there are many nodes) did alone and together."""
    totals, rows = summary["totals"], summary["nodes"]
    if not rows:
        console.print("No node has been evaluated.")
        _print_notes(console, summary)
        return
    both = totals["alone"] is not None
    by_model = len(rows) > _MOST_NODES
    head = model_head(summary)
    first = (head, "nodes") if by_model else ("node", head)
    shown = table("", (*first, "samples", *(("alone", "together", "gain") if both else ("accuracy",))), numbers=4 if both else 2)
    for row in summary["models"] if by_model else rows:
        names = (models_of(row), str(row["nodes"])) if by_model else (escape(row["node"]), models_of(row))
        shown.add_row(*names, str(row["samples"] or "–"), *_scores(row, both))
    shown.add_section()
    shown.add_row("mean", f"{totals['compared']} nodes", str(totals["samples"]), *_scores(totals, both), style="bold")
    console.print(shown)
    if both:
        console.print(f"better together: {totals['better']}, worse: {totals['worse']}, the same: {totals['same']}")
    sent = f"{size(totals['bytes_down'])} to the nodes, {size(totals['bytes_up'])} from them, {duration(totals['seconds'])} in rounds"
    failures = f", [red]{totals['failures']} failures[/red] (see the report)" if totals["failures"] else ""
    console.print(f"{sent}{failures}", highlight=False)
    _print_notes(console, summary)


def _print_notes(console: Console, summary: Mapping[str, Any]) -> None:
    for remark in remarks(summary):
        console.print(remark, markup=False, soft_wrap=True)
    listed = failure_lines(summary["failures"])
    for line in listed[:_MOST_FAILURES]:
        console.print(f"- {line}", markup=False, soft_wrap=True)
    if len(listed) > _MOST_FAILURES:
        console.print(f"and {len(listed) - _MOST_FAILURES} more, in the report", soft_wrap=True)


def failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each node, phase and reason: in which runs, how often, and why (its first line)."""
    grouped: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in failures:
        grouped.setdefault((row["node"], row["phase"], row["reason"]), []).append(row)
    lines = []
    for (node, phase, reason), rows in grouped.items():
        times = sum(row["count"] for row in rows)
        often = "" if times == len(rows) else f", {times} times"
        what = "refused" if phase == "describe" else f"failed to {phase}"
        name = node if node.startswith("node ") else f"node {node}"
        lines.append(f"{name} {what} ({', '.join(row['run'] for row in rows)}{often}): {reason.splitlines()[0] if reason else '?'}")
    return lines


def _scores(row: Mapping[str, Any], both: bool) -> tuple[str, ...]:
    return (percent(row["alone"]), percent(row["together"]), points(row["gain"])) if both else (percent(row["together"]),)


def comparison(console: Console, rows: Sequence[Mapping[str, Any]], mine: str, other: str) -> None:
    """Print two runs beside each other, node by node."""
    shown = table("", ("node", "model", mine, other, "difference"), numbers=3)
    for row in rows:
        shown.add_row(row["node"], row["model"], percent(row["mine"]), percent(row["other"]), points(row["difference"]))
    console.print(shown)
    known = [row["difference"] for row in rows if row["difference"] is not None]
    if known:
        console.print(f"mean difference {points(sum(known) / len(known))} points over {len(known)} nodes")


def settings(console: Console, title: str, defaults: Mapping[str, Scalar], comments: Mapping[str, str]) -> None:
    """Print settings with their defaults and what they are."""
    shown = table(title, ("setting", "default", "meaning"))
    for key, value in defaults.items():
        text = str(value).lower() if isinstance(value, bool) else '""' if value == "" else str(value)
        shown.add_row(key, text, comments.get(key, ""))
    console.print(shown)
    console.print()


def method_line(name: str) -> str:
    """Return the first line of a method's docstring, read without importing it."""
    source = (APP_DIR / "strategies" / name / "__init__.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "no description").splitlines()[0]


def count(number: float) -> str:
    """Return a large count in thousands, millions or billions."""
    for unit in ("", " k", " M"):
        if number < 1000:
            return f"{number:.0f}" if not unit else f"{number:.2f}{unit}"
        number /= 1000
    return f"{number:.2f} G"
