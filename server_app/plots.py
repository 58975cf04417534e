"""The report's pictures as PNG, drawn without a display and without matplotlib's global state."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.page import model_head, points
from server_app.rundata import RunData, finite, models_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALONE, TOGETHER, INK, GRID = "#9aa3ad", "#2463b0", "#20262d", "#e3e7eb"
MORE = ("#c2571a", "#3b8a5a", "#8455a8", "#b0892b")
_MOST_BARS = 40


@dataclass(frozen=True)
class Image:
    """One picture: its file name without the ending, a heading, a text that says what it shows, and its bytes."""

    name: str
    title: str
    alt: str
    png: bytes


def draw(data: RunData, summary: Mapping[str, Any], other: RunData | None = None) -> list[Image]:
    """Return the pictures for which the run has numbers.

    Args:
        data: the run.
        summary: what `report.summarise` made of it.
        other: another run, whose curve is drawn beside this one's.
    """
    use_writable_cache()
    made = (_accuracy(data, summary, other), _nodes(summary), _models(summary), _bytes(data))
    return [image for image in made if image is not None]


def use_writable_cache() -> None:
    """Name a folder for matplotlib's font cache where it would find none (a service's HOME is often not writable)."""
    if "MPLCONFIGDIR" in os.environ or os.access(os.path.expanduser("~"), os.W_OK):
        return
    folder = Path(tempfile.gettempdir()) / f"heterofleet-matplotlib-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["MPLCONFIGDIR"] = str(folder)


def new_figure(width: float = 8.0, height: float = 4.2) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes in the report's style; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ALONE)
    axes.tick_params(colors=INK, labelsize=11)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    return figure, axes


def to_png(figure: Figure) -> bytes:
    """Return the figure's PNG, the same bytes for the same figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def _colors(runs: list[str], main: str) -> dict[str, str]:
    rest = iter(MORE * len(runs))
    return {run: TOGETHER if run == main else ALONE if run == "local" else next(rest) for run in runs}


def percent_axis(axes: Axes, which: str = "y") -> None:
    """Let the axis "x" or "y", and only that one, have a grid and show fractions as percent."""
    from matplotlib.ticker import PercentFormatter

    axes.grid(visible=False)
    axes.grid(axis=which, color=GRID)  # type: ignore[arg-type]
    getattr(axes, f"{which}axis").set_major_formatter(PercentFormatter(1.0, decimals=0))


def round_axis(axes: Axes) -> None:
    """Let the horizontal axis count rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round", fontsize=12)


def _curve(data: RunData, run: str, key: str) -> tuple[list[int], list[float]]:
    rounds = data.rounds.get(run, {})
    values = [(number, finite((rounds[number].get("personalized") or {}).get(key))) for number in sorted(rounds)]
    known = [(number, value) for number, value in values if value is not None]
    return [number for number, _ in known], [value for _, value in known]


def _accuracy(data: RunData, summary: Mapping[str, Any], other: RunData | None) -> Image | None:
    figure, axes = new_figure()
    colors = _colors(data.runs, data.main_run)
    told = []
    for run in data.runs:
        at, mean = _curve(data, run, "accuracy_mean")
        if not at:
            continue
        told.append(f"{run} ends at {mean[-1]:.1%} in round {at[-1]}")
        name = "alone" if run == "local" and data.main_run != "local" else run
        axes.plot(
            at, mean, color=colors[run], linewidth=2.4, label=f"{name}: mean of the nodes", marker="o", markersize=4 if len(at) < 30 else 0
        )
        spread_at, spread = _curve(data, run, "accuracy_std")
        if spread_at == at:
            low = [max(0.0, m - s) for m, s in zip(mean, spread, strict=True)]
            high = [min(1.0, m + s) for m, s in zip(mean, spread, strict=True)]
            axes.fill_between(at, low, high, color=colors[run], alpha=0.15, linewidth=0)
        axes.plot(*_curve(data, run, "accuracy_worst"), color=colors[run], linewidth=1.3, linestyle=":", label=f"{name}: worst node")
    if other is not None and (curve := _curve(other, other.main_run, "accuracy_mean"))[0]:
        axes.plot(*curve, color=MORE[0], linewidth=1.8, linestyle="--", label=f"{other.folder.name} ({other.main_run}): mean")
    if not told:
        return None
    percent_axis(axes)
    round_axis(axes)
    axes.set_ylabel("accuracy on each node's test split", fontsize=12)
    axes.legend(frameon=False, fontsize=10, loc="lower right")
    alt = f"Accuracy over rounds, mean over the nodes with one standard deviation shaded and the worst node dotted: {'; '.join(told)}."
    return Image("accuracy", "Accuracy over rounds", alt, to_png(figure))


def _nodes(summary: Mapping[str, Any]) -> Image | None:
    rows = [row for row in summary["nodes"] if row["together"] is not None or row["alone"] is not None]
    if not rows:
        return None
    rows.sort(key=models_of)  # stable: nodes stay in their order within a model
    paired = [row for row in rows if row["gain"] is not None]
    if len(rows) > _MOST_BARS and paired:
        return _scatter(paired)
    if len(rows) > _MOST_BARS:
        rows = sorted(rows, key=lambda row: row["together"] or 0.0)[:_MOST_BARS]
    figure, axes = new_figure(width=max(8.0, 0.42 * len(rows) + 2.0), height=4.6)
    places = _bars(axes, [row["alone"] for row in rows], [row["together"] for row in rows])
    for left in range(1, len(rows)):
        if models_of(rows[left]) != models_of(rows[left - 1]):
            axes.axvline(left - 0.5, color=ALONE, linewidth=0.8, linestyle="--")
    labels = [f"{row['node'].removeprefix('partition-')}\n{models_of(row)}" for row in rows]
    steep = len(rows) > 12 or any(len(models_of(row)) > 8 or len(row["node"]) > 14 for row in rows)
    axes.set_xticks(places, [label.replace("\n", " · ") if steep else label for label in labels], rotation=60 if steep else 0, fontsize=10)
    axes.set_xlabel(f"node and its {model_head(summary)}", fontsize=12)
    told = (
        f" {summary['totals']['better']} of {len(paired)} nodes do better together, {summary['totals']['worse']} worse." if paired else ""
    )
    return Image("nodes", "Each node, alone and together", f"Bars of each node's test accuracy, grouped by model.{told}", to_png(figure))


def _bars(axes: Axes, alone: list[float | None], together: list[float | None]) -> list[int]:
    """Draw pairs of bars with their legend and return the places of the pairs; one bar a place where nothing was run alone."""
    places = list(range(len(together)))
    both = any(value is not None for value in alone)
    width = 0.38 if both else 0.6
    if both:
        axes.bar([p - width / 2 for p in places], [v or 0.0 for v in alone], width, color=ALONE, label="alone")
    shift = width / 2 if both else 0.0
    axes.bar([p + shift for p in places], [v or 0.0 for v in together], width, color=TOGETHER, label="together")
    axes.set_xlim(-0.7, len(places) - 0.3)
    axes.set_ylim(0, 1)
    percent_axis(axes)
    axes.set_ylabel("test accuracy", fontsize=12)
    if both:
        axes.figure.legend(frameon=False, fontsize=11, ncols=2, loc="outside upper right")
    return places


def _scatter(rows: list[Mapping[str, Any]]) -> Image:
    from matplotlib.ticker import PercentFormatter

    figure, axes = new_figure(height=5.6)
    palette = (TOGETHER, *MORE, "#1f8f9c", "#c23b6a", INK)
    for index, model in enumerate(dict.fromkeys(map(models_of, rows))):
        chosen = [row for row in rows if models_of(row) == model]
        color = palette[index % len(palette)]
        axes.scatter([r["alone"] for r in chosen], [r["together"] for r in chosen], s=18, alpha=0.7, color=color, label=model)
    values = [row[key] for row in rows for key in ("alone", "together")]
    ends = (min(values), max(values))
    axes.plot(ends, ends, color=ALONE, linewidth=1)
    percent_axis(axes)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("accuracy alone", fontsize=12)
    axes.set_ylabel("accuracy together", fontsize=12)
    axes.legend(frameon=False, fontsize=10, title="above the line: better together")
    better = sum(row["gain"] > 0 for row in rows)
    alt = f"One dot a node, accuracy alone to the right and together upwards: {better} of {len(rows)} nodes lie above the diagonal."
    return Image("nodes", "Each node, alone and together", alt, to_png(figure))


def _models(summary: Mapping[str, Any]) -> Image | None:
    rows = [row for row in summary["models"] if row["together"] is not None or row["alone"] is not None]
    if len(rows) < 2:
        return None
    figure, axes = new_figure(width=max(8.0, 1.1 * len(rows) + 2.0))
    places = _bars(axes, [row["alone"] for row in rows], [row["together"] for row in rows])
    for place, row in zip(places, rows, strict=True):
        if row["together"] is not None:
            top = max(row["together"], row["alone"] or 0.0)
            text = f"{row['together']:.0%}" if row["gain"] is None else points(row["gain"])
            axes.annotate(text, (place, min(top, 0.94)), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=11, color=INK)
    axes.set_xticks(places, [f"{models_of(row)}\n{row['nodes']} node{'s' if row['nodes'] > 1 else ''}" for row in rows], fontsize=11)
    told = ", ".join(f"{models_of(row)} {points(row['gain'])}" for row in rows if row["gain"] is not None)
    alt = "Mean accuracy of the nodes with each model" + (f"; gain in points of being together: {told}." if told else ".")
    return Image("models", "By model, mean over its nodes, and the gain in points", alt, to_png(figure))


def _bytes(data: RunData) -> Image | None:
    traffic = {run: _traffic(data, run) for run in data.runs}
    most = max((max(down) + max(up) for _, down, up in traffic.values() if down), default=0.0)
    shown = {run: lists for run, lists in traffic.items() if lists[1] and max(lists[1]) + max(lists[2]) > 0.01 * most}
    if not shown:
        return None
    figure, axes = new_figure(height=3.6)
    colors, told, width = _colors(data.runs, data.main_run), [], 0.8 / len(shown)
    for index, (run, (at, down, up)) in enumerate(shown.items()):
        places = [number + (index - (len(shown) - 1) / 2) * width for number in at]
        axes.bar(places, down, 0.95 * width, color=colors[run], label=f"{run}: to the nodes, {sum(down):.1f} MB in all")
        axes.bar(
            places, up, 0.95 * width, bottom=down, color=colors[run], alpha=0.5, label=f"{run}: from the nodes, {sum(up):.1f} MB in all"
        )
        told.append(f"{run} {sum(down):.1f} MB to the nodes and {sum(up):.1f} MB back")
    round_axis(axes)
    axes.set_ylabel("MB, all nodes", fontsize=12)
    figure.legend(frameon=False, fontsize=10, ncols=2, loc="outside upper right")
    return Image("bytes", "Bytes of each round", f"Bars of megabytes a round over all nodes: {'; '.join(told)}.", to_png(figure))


def _traffic(data: RunData, run: str) -> tuple[list[int], list[float], list[float]]:
    """Return the rounds of a run and the megabytes each sent to the nodes and back."""
    rounds = data.rounds.get(run, {})
    at = sorted(rounds)
    down, up = ([(finite(rounds[number].get(key)) or 0.0) / 1e6 for number in at] for key in ("bytes_down", "bytes_up"))
    return at, down, up
