"""`report.html`: one file with its pictures inside, readable on a phone and without a network."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import strategies
from server_app.rundata import models_of

if TYPE_CHECKING:
    from server_app.plots import Image

_STYLE = """
:root{color-scheme:light;--ink:#20262d;--soft:#5b6570;--line:#e3e7eb;--blue:#2463b0}
*{box-sizing:border-box}
body{margin:0;background:#f5f7f9;color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;margin:.5rem 0 0}h2{font-size:1.15rem;margin:0 0 .6rem}
p{margin:.3rem 0}.soft{color:var(--soft)}
section,.card{background:#fff;border:1px solid var(--line);border-radius:.6rem;padding:1rem;margin:1rem 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.8rem;margin:1rem 0}
.card{margin:0}.card b{display:block;font-size:1.45rem;line-height:1.3}.card span{color:var(--soft);font-size:.9rem}
img{display:block;width:100%;height:auto}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-size:.85rem;color:var(--soft)}
.text{text-align:left}.long{white-space:normal;min-width:16rem}
.up{color:#1d7a46}.down{color:#b3361f}
.bad{border-left:.35rem solid #b3361f}
summary{cursor:pointer;font-weight:600}
code{font:.9em ui-monospace,monospace;overflow-wrap:anywhere}
"""


def render(summary: Mapping[str, Any], images: Sequence[Image], name: str, comparison: list[dict[str, Any]] | None = None) -> str:
    """Return the page.

    Args:
        summary: the content of `summary.json`.
        images: pictures in the order shown.
        name: of the run's folder.
        comparison: rows of `report.compare`, where another run is shown beside this one.
    """
    title = f"{summary['main_run'] or 'run'} · {name}"
    parts = [_head(summary, title), _cards(summary), *map(picture, images), _node_section(summary), _run_section(summary)]
    if comparison is not None:
        parts.append(_comparison_section(comparison))
    parts += [_failure_section(summary), _settings_section(summary)]
    return document(title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page of these pieces of HTML; empty ones are left out."""
    body = "\n".join(part for part in parts if part)
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
    head = f"<head>{meta}<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    return f'<!doctype html>\n<html lang="en">{head}\n<body><main>\n{body}\n</main></body></html>\n'


def percent(value: float | None) -> str:
    """Return an accuracy as text, a dash where it was not measured."""
    return "–" if value is None else f"{value:.1%}"


def points(value: float | None) -> str:
    """Return a difference of two accuracies in percentage points with its sign, a dash where one is missing."""
    return "–" if value is None else f"{100 * value:+.1f}".replace("-0.0", "+0.0")


def size(count: float) -> str:
    """Return bytes in the unit that reads best (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss, m:ss or, below a minute, seconds."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def model_head(summary: Mapping[str, Any]) -> str:
    """Return the head of a column of `models_of`."""
    return "model" if all(models_of(row) == row["model"] for row in summary["nodes"]) else "model alone / together"


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Return what must be known to read the table of nodes."""
    found, totals = [], summary["totals"]
    if model_head(summary) != "model":
        found.append("Nodes use another model together than alone: the gain is that of the other model and of joining.")
    if out := totals["nodes"] - totals["compared"]:
        found.append(f"The means are over {totals['compared']} nodes; {_left_out(out)} no result both alone and together.")
    if not summary["nodes"] and summary["settings"].get("data.test-fraction") == 0:
        found.append("No node has test samples: data.test-fraction = 0.")
    return found


def _left_out(count: int) -> str:
    return "1 was left out, it has" if count == 1 else f"{count} were left out, they have"


def _head(summary: Mapping[str, Any], title: str) -> str:
    totals = summary["totals"]
    line = f"{totals['nodes']} nodes, {len(summary['models'])} models, {totals['samples']:,} training samples"
    head = f'<h1>{escape(title)}</h1><p class="soft">{line}</p>'
    if summary["state"] == "completed":
        return head
    reason = f": {escape(summary['reason'])}" if summary["reason"] else ""
    return f'{head}<section class="bad"><b>This run is {escape(summary["state"])}</b>{reason}. The numbers are those so far.</section>'


def _cards(summary: Mapping[str, Any]) -> str:
    totals = summary["totals"]
    cards = [(percent(totals["together"]), "mean accuracy together")]
    if totals["alone"] is not None:
        paired = totals["better"] + totals["worse"] + totals["same"]
        cards = [
            (percent(totals["alone"]), "mean accuracy alone"),
            (f"{percent(totals['together'])}", f"together ({points(totals['gain'])} points)"),
            (f"{totals['better']} of {paired}", f"nodes do better together, {totals['worse']} worse"),
        ]
    cards.append((size(totals["bytes_down"] + totals["bytes_up"]), "sent in all"))
    cards.append((duration(totals["seconds"]), "in rounds"))
    return (
        '<div class="cards">' + "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards) + "</div>"
    )


def picture(image: Image) -> str:
    """Return a picture as HTML, its bytes inside."""
    data = base64.b64encode(image.png).decode("ascii")
    return f'<section><h2>{escape(image.title)}</h2><img alt="{escape(image.alt)}" src="data:image/png;base64,{data}"></section>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1, long: int = -1) -> str:
    """Return a table; the first `text` columns are text, column `long` may wrap, the rest are numbers; cells are escaped here."""

    def kind(column: int, cell: str) -> str:
        if column == long:
            return ' class="text long"'
        if column < text:
            return ' class="text"'
        return ' class="up"' if cell.startswith("+") and cell != "+0.0" else ' class="down"' if cell.startswith("-") else ""

    head = "".join(f'<th scope="col"{kind(i, "")}>{escape(cell)}</th>' for i, cell in enumerate(heads))
    body = "".join("<tr>" + "".join(f"<td{kind(i, cell)}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _node_section(summary: Mapping[str, Any]) -> str:
    if not summary["nodes"]:
        note = " ".join(["No node has been evaluated yet.", *remarks(summary)])
        return f"<section><h2>Nodes</h2><p>{escape(note)}</p></section>"
    rows = [
        (
            row["node"],
            models_of(row),
            "–" if row["samples"] is None else f"{row['samples']:,}",
            percent(row["alone"]),
            percent(row["together"]),
            points(row["gain"]),
        )
        for row in summary["nodes"]
    ]
    shown = table(("node", model_head(summary), "samples", "alone", "together", "gain"), rows, text=2)
    note = " ".join(["Test accuracy of each node's own model on its own test split; gain in percentage points.", *remarks(summary)])
    return f'<section><h2>Nodes</h2>{shown}<p class="soft">{escape(note)}</p></section>'


def _run_section(summary: Mapping[str, Any]) -> str:
    heads = ("run", "rounds", "mean", "spread", "worst", "worst node", "shared model", "to nodes", "from nodes", "s a round", "failures")
    rows = [
        (
            name,
            str(run["rounds"]),
            percent(run["mean"]),
            percent(run["std"]),
            percent(run["worst"]),
            str(run["worst_node"] or "–"),
            percent(run["shared"]),
            size(run["bytes_down"]),
            size(run["bytes_up"]),
            "–" if run["seconds_per_round"] is None else f"{run['seconds_per_round']:.2f}",
            str(run["failures"]),
        )
        for name, run in summary["runs"].items()
    ]
    return f"<section><h2>Runs</h2>{table(heads, rows)}</section>" if rows else ""


def _comparison_section(rows: list[dict[str, Any]]) -> str:
    cells = [(row["node"], row["model"], percent(row["mine"]), percent(row["other"]), points(row["difference"])) for row in rows]
    shown = table(("node", "model", "this run", "other run", "difference"), cells, text=2)
    return f"<section><h2>Against the other run</h2>{shown}</section>"


def _failure_section(summary: Mapping[str, Any]) -> str:
    if not summary["failures"]:
        return "<section><h2>Failures</h2><p>None: every sampled node took part in every round.</p></section>"
    rows = [
        (row["run"], row["node"], row["phase"], row["reason"], str(row["count"]), _span(row["first_round"], row["last_round"]))
        for row in summary["failures"]
    ]
    return f"<section><h2>Failures</h2>{table(('run', 'node', 'phase', 'reason', 'times', 'rounds'), rows, text=4, long=3)}</section>"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _settings_section(summary: Mapping[str, Any]) -> str:
    if not summary["settings"]:
        return ""
    run = {*summary["runs"], summary["settings"].get("strategy")}
    others = set(strategies.names()) - run
    shown_keys = [key for key in sorted(summary["settings"]) if "." not in key or key.partition(".")[0] not in others]
    rows = [(key, str(value) if (value := summary["settings"][key]) != "" else "–") for key in shown_keys]
    shown = table(("setting", "value"), rows, text=2, long=1)
    return f"<section><details><summary>Settings</summary>{shown}</details></section>"
