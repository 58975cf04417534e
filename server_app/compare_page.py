"""`compare.html`: one file that opens without a network, in the style of a run's report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from server_app.cases import BASELINES
from server_app.page import document, duration, percent, picture, points, size, table
from server_app.plots import ALONE, INK, MORE, TOGETHER, Image, new_figure, percent_axis, round_axis, to_png, use_writable_cache

Row = Mapping[str, Any]

NOTE = (
    "Mean over seeds of the last round's mean accuracy over nodes, each node's own model on its own test split. The worst node is the "
    "mean over seeds of the lowest of them; the gain is paired by seed, in percentage points."
)
FINETUNED_NOTE = (
    "fedavg fine-tuned: after the last round every node trains the average once more on its own data, all nodes, sampled or not; "
    "a node's budget there is one local training longer than elsewhere."
)
ONE_SEED = (
    "One seed says little: another split and start can turn a gain round, and there is no spread to hold it against; "
    "--seeds 1,2,3 gives one, and keeps the runs that are done."
)
ORACLE_NOTE = "Best round (oracle) was chosen on test data: it is no result, only how far the last round is from it."


def score_heads(result: Row) -> tuple[str, ...]:
    """Return the heads of `score_cells`."""
    return ("case", "seeds", "mean", "min – max", "worst node", f"against {result['best_baseline'] or 'baselines'}")


def score_cells(row: Row) -> tuple[str, ...]:
    """Return how well a case did, as text."""
    span = "–" if row["done"] < 2 else f"{percent(row['min'])} – {percent(row['max'])}"
    done = f"{row['done']} of {len(row['seeds'])}"
    gain = points(row["gain"]) + spread(row["gain_std"])
    return (row["case"], done, percent(row["mean"]) + spread(row["std"]), span, percent(row["worst"]), gain)


def cost_heads(result: Row) -> tuple[str, ...]:
    """Return the heads of `cost_cells`; those of the target only where there is one."""
    target = result["target"]
    return ("case", *((f"rounds to {target:.0%}", "bytes to it", "time to it") if target else ()), "rounds", "bytes", "CPU")


def cost_cells(row: Row, result: Row) -> tuple[str, ...]:
    """Return what a run of a case cost, as text."""
    to = target_cells(row["target"], row["done"]) if result["target"] else ()
    return (row["case"], *to, str(row["rounds"]), "–" if row["bytes"] is None else size(row["bytes"]), _time(row["cpu_seconds"]))


def target_cells(target: Row | None, done: int) -> tuple[str, str, str]:
    """Return mean rounds (and the seeds that reached it, unless all), bytes and seconds to the target."""
    if not target or not target["reached"]:
        return "–", "–", "–"
    part = "" if target["reached"] == done else f" ({target['reached']} of {done})"
    return f"{target['rounds']:.1f}{part}", size(target["bytes"]), _time(target["seconds"])


def spread(std: float | None) -> str:
    """Return a standard deviation of accuracies, in points, to put behind its mean."""
    return "" if std is None else f" ± {100 * std:.1f}"


def notes(result: Row) -> list[str]:
    """Return what must be said beside the table: of the whole, then case by case."""
    told = [ONE_SEED] if len(result["seeds"]) == 1 else []
    told += [f"{row['case']}: {note}" for row in result["rows"] for note in row["notes"]]
    told += [f"{row['case']}: chosen {settings(row['chosen'])}" for row in result["rows"] if row["searched"] and row["done"]]
    if other := result["cost"]["other_code"]:
        told.append(f"{other} jobs were run by another version of this code; remove their folders to run them again")
    return told


def cost(result: Row) -> str:
    """Return what all of it cost, as a sentence."""
    spent = result["cost"]
    search = ", the search included" if result["search"] else ""
    return f"{spent['done']} of {spent['jobs']} runs done, {_time(spent['cpu_seconds'])} of CPU{search}"


def settings(values: Mapping[str, Any]) -> str:
    """Return settings as they are typed."""
    return ", ".join(f"{key} = {value}" for key, value in values.items()) or "–"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def render(result: Row, name: str) -> str:
    """Return the page; `result` is the content of `compare.json`, `name` that of its folder."""
    use_writable_cache()
    line = f"{result['nodes']} nodes, seeds {', '.join(map(str, result['seeds']))}; {cost(result)}"
    head = f'<h1>{escape(f"Comparison · {name}")}</h1><p class="soft">{escape(line)}</p>'
    shown = [draw(result) for draw in (_bars, _curves)]
    parts = [head, _result_section(result), *(picture(image) for image in shown if image), _seed_section(result)]
    return document(f"Comparison · {name}", [*parts, _search_section(result), _settings_section(result)])


def _result_section(result: Row) -> str:
    told = "".join(f"<li>{escape(note)}</li>" for note in notes(result))
    scores = table(score_heads(result), [score_cells(row) for row in result["rows"]])
    costs = table(cost_heads(result), [cost_cells(row, result) for row in result["rows"]])
    listed = f"<ul>{told}</ul>" if told else ""
    return f'<section><h2>Result</h2>{scores}{listed}{costs}<p class="soft">{escape(NOTE)} {escape(FINETUNED_NOTE)}</p></section>'


def _seed_section(result: Row) -> str:
    rows = []
    for row in result["rows"]:
        for seed, found in row["seeds"].items():
            best = found["oracle"]
            oracle = f"{percent(best['mean'])} in {best['round']}" if best else "–"
            numbers = (percent(found["mean"]), percent(found["std"]), percent(found["worst"]), oracle, size(found["bytes"]))
            rows.append((row["case"], seed, found["state"], f"{found['round']} of {row['rounds']}", *numbers, _time(found["seconds"])))
    columns = ("case", "seed", "state", "rounds", "mean", "over nodes ±", "worst node", "best round (oracle)", "bytes", "in rounds")
    return f'<section><h2>Every run</h2>{table(columns, rows, text=3)}<p class="soft">{escape(ORACLE_NOTE)}</p></section>'


def _search_section(result: Row) -> str:
    rows = [
        (row["case"], settings(tried["chosen"]), str(tried["done"]), percent(tried["val"]), percent(tried["mean"]))
        for row in result["rows"]
        for tried in row["searched"]
    ]
    if not rows:
        return ""
    note = f"Chosen for each case by validation accuracy over the same seeds, never by test accuracy. Cost of it all: {cost(result)}."
    columns = ("case", "tried", "seeds", "validation", "test")
    return f'<section><h2>Search</h2>{table(columns, rows, text=2, long=1)}<p class="soft">{escape(note)}</p></section>'


def _settings_section(result: Row) -> str:
    rows = [("every case", settings(result["settings"]))]
    rows += [(row["case"], settings({**row["settings"], **row["chosen"]})) for row in result["rows"]]
    rows += [(f"{row['case']}, seed {result['seeds'][0]} again", row["command"]) for row in result["rows"]]
    return f"<section><details><summary>Settings</summary>{table(('case', 'settings'), rows, text=2, long=1)}</details></section>"


def _colors(rows: Sequence[Row]) -> list[str]:
    own = iter((TOGETHER, *MORE) * len(rows))
    plain = dict(zip(BASELINES, (ALONE, "#7c8792", "#5c6873"), strict=True))
    return [plain.get(row["case"]) or next(own) for row in rows]


def _bars(result: Row) -> Image | None:
    rows = [row for row in result["rows"] if row["mean"] is not None]
    if not rows:
        return None
    figure, axes = new_figure(height=0.55 * len(rows) + 1.4)
    places, means = list(range(len(rows))), [row["mean"] for row in rows]
    several = any(row["done"] > 1 for row in rows)
    reach = [[row["mean"] - row["min"] for row in rows], [row["max"] - row["mean"] for row in rows]] if several else None
    axes.barh(places, means, 0.62, xerr=reach, color=_colors(rows), error_kw={"ecolor": INK, "capsize": 3}, zorder=2)
    axes.scatter([row["worst"] or 0.0 for row in rows], places, marker="|", s=160, color="white", zorder=3)
    axes.set_yticks(places, [row["case"] for row in rows], fontsize=11)
    axes.invert_yaxis()
    percent_axis(axes, "x")
    line = "; line: lowest to highest seed" if several else ", one seed"
    axes.set_xlabel(f"mean test accuracy of the nodes{line}; white mark: worst node", fontsize=10)
    told = "; ".join(f"{row['case']} {row['mean']:.1%}" for row in rows)
    return Image("cases", "Last round", f"Bars of the mean accuracy of each case: {told}.", to_png(figure))


def _curves(result: Row) -> Image | None:
    figure, axes = new_figure(height=4.8)
    told = []
    for row, color in zip(result["rows"], _colors(result["rows"]), strict=True):
        at = mean_curve([found["curve"] for found in row["seeds"].values() if found["curve"]])
        if not at:
            continue
        label, line = row["case"], "--" if row["case"] in BASELINES else "-"
        axes.plot(list(at), list(at.values()), color=color, linewidth=2.0, linestyle=line, label=label)
        told.append(f"{row['case']} ends at {list(at.values())[-1]:.1%}")
    if not told:
        return None
    if result["target"]:
        axes.axhline(result["target"], color=INK, linewidth=0.8, linestyle=":")
    percent_axis(axes)
    round_axis(axes)
    axes.set_ylabel("mean test accuracy of the nodes", fontsize=12)
    axes.legend(frameon=False, fontsize=10, loc="lower right")
    alt = f"Accuracy over rounds, mean over seeds; fedavg fine-tuned over the nodes sampled in each round: {'; '.join(told)}."
    return Image("curves", "Accuracy over rounds, mean over seeds", alt, to_png(figure))


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> dict[int, float]:
    """Return round -> mean over the curves, at the rounds that all of them have."""
    tables = [{int(number): float(value) for number, value in curve} for curve in curves]
    common = set.intersection(*map(set, tables)) if tables else set()
    return {number: statistics.fmean(curve[number] for curve in tables) for number in sorted(common)}
