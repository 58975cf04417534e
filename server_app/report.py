"""A run folder -> `summary.json`, `plots/*.png` and `report.html`. Works on a run that is not over.

`summary.json` holds

    version        1
    state, reason  as in status.json
    metric         name of the main metric
    main_run       the chosen strategy; what "together" means
    settings       the flat run config, from run.json
    runs           name -> rounds (number done), round (of the numbers below), mean, std, worst, worst_node, weighted
                   (each node's own model on its own test split), shared (the shared model on the common test set, or
                   null), bytes_down, bytes_up (of all rounds and the export), seconds, seconds_per_round (median, first round
                   excluded), failures
    nodes          per node: node, model (that it used together), model_alone (null where it did not run alone), samples
                   (training), alone (run `local` after as many rounds, or null), together, gain (their difference, or
                   null), round (of `together`)
    models         per pair of models: model, model_alone, nodes, compared, samples, alone, together, gain (means)
    totals         nodes, compared (nodes that the means are over), samples, alone, together, gain (means over nodes),
                   delta_percent (mean over nodes of 100 gain / alone), better, worse, same (nodes),
                   bytes_down, bytes_up, seconds, failures
    failures       run, node, phase, reason, count, first_round, last_round
    skipped_lines  lines of metrics.jsonl that could not be read

A number that was not measured is null. Means are over nodes, each counted once; where nodes were run alone and together,
over those that have both numbers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from server_app.rundata import Row, RunData, finite, models_of, read_run

METRIC = "accuracy"
# Differences below half a test sample of a large node are noise of float printing, not a gain.
SAME = 1e-6


def write_report(out_dir: Path, against: Path | None = None) -> Path:
    """Write `summary.json`, `plots/` and `report.html` into a run's folder and return the path of the last.

    Args:
        out_dir: the run's folder.
        against: folder of another run, to be shown beside this one.

    Raises:
        RunFolderError: a folder holds no run.
    """
    from server_app import page, plots

    data = read_run(out_dir)
    other = read_run(against) if against else None
    summary = summarise(data)
    _replace(out_dir / "summary.json", json.dumps(summary, indent=1, allow_nan=False))
    images = plots.draw(data, summary, other)
    folder = out_dir / "plots"
    folder.mkdir(exist_ok=True)
    for image in images:
        (folder / f"{image.name}.png").write_bytes(image.png)
    target = out_dir / "report.html"
    _replace(target, page.render(summary, images, out_dir.name, compare(summary, summarise(other)) if other else None))
    return target


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def summarise(data: RunData) -> dict[str, Any]:
    """Return the content of `summary.json`."""
    runs = {run: _summarise_run(data, run) for run in data.runs}
    nodes = _node_table(data)
    totals = {
        "nodes": len(nodes),
        "samples": sum(row["samples"] or 0 for row in nodes),
        **_means(nodes),
        "delta_percent": _mean(100.0 * row["gain"] / row["alone"] for row in nodes if row["gain"] is not None and row["alone"]),
        "better": sum(_sign(row["gain"]) > 0 for row in nodes),
        "worse": sum(_sign(row["gain"]) < 0 for row in nodes),
        "same": sum(row["gain"] is not None and _sign(row["gain"]) == 0 for row in nodes),
        **{key: sum(run[key] for run in runs.values()) for key in ("bytes_down", "bytes_up", "seconds", "failures")},
    }
    return {
        "version": 1,
        "state": data.state,
        "reason": data.status.get("reason") or "",
        "metric": METRIC,
        "main_run": data.main_run,
        "settings": data.settings,
        "runs": runs,
        "nodes": nodes,
        "models": _model_table(nodes),
        "totals": totals,
        "failures": _failure_table(data.failures),
        "skipped_lines": data.skipped,
    }


def _summarise_run(data: RunData, run: str) -> dict[str, Any]:
    rounds = data.rounds.get(run, {})
    measured = [number for number in sorted(rounds) if (rounds[number].get("personalized") or {}).get(f"{METRIC}_mean") is not None]
    last: Row = rounds[measured[-1]] if measured else {}
    own: Row = last.get("personalized") or {}
    seconds = [value for number in sorted(rounds) if (value := finite(rounds[number].get("seconds"))) is not None]
    return {
        "rounds": len(rounds),
        "round": measured[-1] if measured else None,
        "mean": finite(own.get(f"{METRIC}_mean")),
        "std": finite(own.get(f"{METRIC}_std")),
        "worst": finite(own.get(f"{METRIC}_worst")),
        "worst_node": own.get("worst_node"),
        "weighted": finite(own.get(f"{METRIC}_weighted")),
        "shared": finite((last.get("shared") or {}).get(METRIC)),
        **{key: data.traffic(run, key) for key in ("bytes_down", "bytes_up")},
        "seconds": sum(seconds),
        "seconds_per_round": statistics.median(seconds[1:] or seconds) if seconds else None,
        "failures": sum(str(row.get("run", "")) == run for row in data.failures),
    }


def _node_table(data: RunData) -> list[Row]:
    main = data.main_run
    together = data.last(main, METRIC)
    reached = {node: int(row["round"]) for node, row in together.items()}
    alone = data.last("local", METRIC, until=reached) if main != "local" else {}
    trained = {**data.last("local", "num_examples"), **data.last(main, "num_examples")}  # not in the row of a round that failed
    table = []
    for node in sorted({*together, *alone}, key=_natural):
        row = together.get(node, alone.get(node, {}))
        mine, joint = finite(alone.get(node, {}).get(METRIC)), finite(together.get(node, {}).get(METRIC))
        table.append(
            {
                "node": node,
                "model": str(row.get("model", "?")),
                "model_alone": str(alone[node].get("model", "?")) if node in alone else None,
                "samples": trained.get(node, {}).get("num_examples"),
                "alone": mine,
                "together": joint,
                "gain": joint - mine if joint is not None and mine is not None else None,
                "round": together.get(node, {}).get("round"),
            }
        )
    return table


def _natural(name: str) -> tuple[str, int, str]:
    """Order partition-2 before partition-10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1), name


def _model_table(nodes: list[Row]) -> list[Row]:
    groups: dict[str, list[Row]] = {}
    for row in nodes:
        groups.setdefault(models_of(row), []).append(row)
    return [
        {
            **{key: rows[0][key] for key in ("model", "model_alone")},
            "nodes": len(rows),
            "samples": sum(row["samples"] or 0 for row in rows),
            **_means(rows),
        }
        for _, rows in sorted(groups.items(), key=lambda group: _natural(group[0]))
    ]


def _means(rows: list[Row]) -> dict[str, Any]:
    """Return the means, and as `compared` over how many nodes: with numbers of both kinds only the nodes that have both are compared."""
    both = all(any(row[key] is not None for row in rows) for key in ("alone", "together"))
    counted = [row for row in rows if row["gain"] is not None or not both]
    means = {key: _mean(row[key] for row in counted) for key in ("alone", "together", "gain")}
    return {"compared": sum(row["together"] is not None or row["alone"] is not None for row in counted), **means}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _sign(gain: float | None) -> int:
    return 0 if gain is None or abs(gain) <= SAME else (1 if gain > 0 else -1)


def _failure_table(failures: list[Row]) -> list[Row]:
    """Return one row for each (run, node, phase, reason), the most frequent first."""
    grouped: dict[tuple[str, ...], list[int]] = {}
    for row in failures:
        key = tuple(str(row.get(name, "")) for name in ("run", "node", "phase", "reason"))
        grouped.setdefault(key, []).append(int(row.get("round") or 0))
    table = [
        {"run": run, "node": node, "phase": phase, "reason": reason, "count": len(at), "first_round": min(at), "last_round": max(at)}
        for (run, node, phase, reason), at in grouped.items()
    ]
    return sorted(table, key=lambda row: (-int(row["count"]), _natural(str(row["node"]))))


def compare(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[Row]:
    """Return, for each node of either run, node, model, mine, other and difference of what it reached together."""
    left = {row["node"]: row for row in mine["nodes"]}
    right = {row["node"]: row for row in other["nodes"]}
    table = []
    for node in sorted({*left, *right}, key=_natural):
        a, b = left.get(node, {}).get("together"), right.get(node, {}).get("together")
        models = dict.fromkeys(side[node]["model"] for side in (left, right) if node in side)
        table.append(
            {
                "node": node,
                "model": " / ".join(models),
                "mine": a,
                "other": b,
                "difference": a - b if a is not None and b is not None else None,
            }
        )
    return table
