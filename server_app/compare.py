"""Finished jobs -> the comparison: `compare.json`, `compare.html` and the table of `heterofleet compare`.

`compare.json` holds `version`, `metric`, `nodes`, `seeds`, `target`, `settings` (of every case), `search` (what was
tried), `cost` (jobs, done, cpu_seconds: over all of them, those of a search too; other_code: jobs run by another version
of this code), `best_baseline` and `rows`, one a case:

    case, strategy, settings, chosen (searched values), rounds
    seeds          seed -> what `measure` found in that run, with `state`, `reason` and `job` (its folder)
    done           seeds that ended as planned
    mean, std      over those seeds, of the last round's mean accuracy over nodes; std is the sample's, null for one seed
    min, max       over those seeds
    worst          mean over seeds of the worst node's accuracy; worst_min: the lowest of all
    val            mean over seeds of the accuracy on validation data, where there is some
    gain, gain_std over the best of the three baselines, paired by seed; null for that one
    oracle         the best round, chosen on test data: not a result, only how far the last round is from it
    target         reached (seeds), and over those the mean rounds, bytes and seconds to it; null without --target
    bytes, seconds, cpu_seconds   of one run, mean over seeds
    searched       each choice: chosen, done, val, mean; [] without a search
    notes          what a reader must know: divergence, failures, seeds that are missing
    command        runs the row's first seed again

Accuracy is that of each node's own model on its own test split, nodes counted once. `fedavg fine-tuned` is the run of
`fedavg` whose average every node trains once more on its own data at the end (`server_app.finetune`).
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from client_app.protocol import fingerprint
from server_app.cases import BASELINES, Case, Comparison, Job, Values, Variant
from server_app.checkpoint import write_text
from server_app.jobs import job_record
from server_app.overrides import read_defaults
from server_app.rundata import Row, RunData, finite, read_run

METRIC = "accuracy"
FELL = 0.1  # a last round this far below the best one is told


def write_comparison(comparison: Comparison, out_dir: Path) -> dict[str, Any]:
    """Write `compare.json` and `compare.html` from what the jobs' folders hold by now, and return the first's content."""
    from server_app import compare_page

    result = summarise(comparison, out_dir / "jobs")
    write_text(out_dir / "compare.json", json.dumps(result, indent=1, allow_nan=False))
    write_text(out_dir / "compare.html", compare_page.render(result, out_dir.name))
    return result


def summarise(comparison: Comparison, jobs_dir: Path) -> dict[str, Any]:
    """Return the content of `compare.json` from the folder that holds the jobs' folders."""
    rows = [_row(case, comparison, jobs_dir) for case in comparison.cases]
    known = [row for row in rows if row["case"] in BASELINES and row["mean"] is not None]
    best = max(known, key=lambda row: (row["done"], row["mean"]), default=None)
    for row in rows:
        row |= _gain(row, best)
    records = [job_record(jobs_dir / job.folder) for job in comparison.jobs]
    return {
        "version": 1,
        "metric": METRIC,
        "nodes": comparison.nodes,
        "seeds": list(comparison.seeds),
        "target": comparison.target,
        "settings": comparison.common,
        "search": {key: list(values) for key, values in comparison.search.items()},
        "best_baseline": best["case"] if best else None,
        "cost": {
            "jobs": len(records),
            "done": sum(record.get("state") == "done" for record in records),
            "cpu_seconds": sum(float(record.get("cpu_seconds", 0.0)) for record in records),
            "other_code": sum(record.get("fingerprint", fingerprint()) != fingerprint() for record in records),
        },
        "rows": rows,
    }


def _row(case: Case, comparison: Comparison, jobs_dir: Path) -> Row:
    tried = [(variant, _variant_row(case, variant, comparison, jobs_dir)) for variant in case.variants]
    variant, row = max(tried, key=lambda pair: (pair[1]["done"], pair[1]["val"] or 0.0))
    job = variant.jobs[0]
    kept = ("chosen", "done", "val", "mean")
    return {
        "case": case.name,
        "strategy": job.strategy,
        "settings": case.settings,
        "rounds": int(job.config["num-rounds"]),
        **row,
        "searched": [{key: other[key] for key in kept} for _, other in tried] if len(tried) > 1 else [],
        "command": _command(job),
    }


def _variant_row(case: Case, variant: Variant, comparison: Comparison, jobs_dir: Path) -> Row:
    """Return the numbers of one choice of values over its seeds."""
    seeds = {str(job.seed): measure(job, jobs_dir / job.folder, case.measure, comparison.target) for job in variant.jobs}
    done = [found for found in seeds.values() if found["state"] == "done" and found["mean"] is not None]
    means = [found["mean"] for found in done]
    worst = [found["worst"] for found in done if found["worst"] is not None]
    return {
        "chosen": variant.chosen,
        "seeds": seeds,
        "done": len(done),
        "mean": _mean(means),
        "std": statistics.stdev(means) if len(means) > 1 else None,
        "min": min(means, default=None),
        "max": max(means, default=None),
        "worst": _mean(worst),
        "worst_min": min(worst, default=None),
        "val": _mean(found["val"] for found in done),
        "oracle": _mean(found["oracle"]["mean"] for found in done if found["oracle"]),
        "target": _to_target(done, comparison.target),
        **{key: _mean(found[key] for found in done) for key in ("bytes", "seconds", "cpu_seconds")},
        "notes": [f"seed {seed}: {note}" for seed, found in seeds.items() for note in found["notes"]],
    }


def measure(job: Job, folder: Path, prefix: str = "", target: float | None = None) -> Row:
    """Return what one job reached.

    Args:
        job: what was run.
        folder: where it lies; it need not exist.
        prefix: "" for the accuracy after each round, "local_" for that right after local training, of which the last
            is that of the closing round with all nodes.
        target: accuracy to count rounds, bytes and seconds to.

    Returns:
        `state` (of `job.json`, or waiting), `reason`, `job`, `mean`, `std` and `worst` over nodes, `worst_node`, `val`, `round`,
        `oracle` {round, mean}, `target` {rounds, bytes, seconds} or null, `bytes`, `seconds`, `cpu_seconds`, `curve`
        [[round, mean]], `notes`.
    """
    record = job_record(folder)
    data = read_run(folder) if (folder / "status.json").is_file() or (folder / "metrics.jsonl").is_file() else RunData(folder)
    rounds = data.rounds.get(job.strategy, {})
    curve = [
        (number, value)
        for number in sorted(rounds)
        if (value := finite((rounds[number].get("personalized") or {}).get(f"{prefix}{METRIC}_mean"))) is not None
    ]
    own: Row = (rounds[max(rounds)].get("personalized") or {}) if rounds else {}
    closing = _closing(folder) if job.finetune else {}
    cpu = float(record.get("cpu_seconds", 0.0))
    if prefix:
        own = closing.get("personalized", {})
    else:
        cpu -= float(closing.get("cpu_seconds", 0.0))
    everyone = not prefix or float(job.config["fleet.fraction"]) == 1.0  # else the curve is that of other nodes each round
    mean, best = finite(own.get(f"{prefix}{METRIC}_mean")), max(curve, key=lambda point: point[1], default=None) if everyone else None
    return {
        "state": record.get("state", "waiting"),
        "reason": record.get("reason", ""),
        "job": folder.name,
        "round": max(rounds, default=0),
        "mean": mean,
        "std": finite(own.get(f"{prefix}{METRIC}_std")),
        "worst": finite(own.get(f"{prefix}{METRIC}_worst")),
        "worst_node": own.get(f"{prefix}worst_node"),
        "val": finite(own.get(f"{prefix}val_{METRIC}_mean")),
        "oracle": {"round": best[0], "mean": best[1]} if best else None,
        "target": _reach(rounds, curve, target) if target is not None and everyone else None,
        "bytes": int(sum(_bytes(row) for row in rounds.values())),
        "seconds": sum(finite(row.get("seconds")) or 0.0 for row in rounds.values()),
        "cpu_seconds": cpu,
        "curve": [list(point) for point in curve],
        "notes": _notes(record, data, mean, best) + _missed(closing if prefix else {}),
    }


def _closing(folder: Path) -> Row:
    path = folder / "finetuned.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _missed(closing: Mapping[str, Any]) -> list[str]:
    """Return a note on nodes that could not be fine-tuned."""
    names = sorted({row["node"] for row in closing.get("failures", ())})
    return [f"{len(names)} nodes are not in it: {', '.join(names[:5])}"] if names else []


def _reach(rounds: Mapping[int, Row], curve: list[tuple[int, float]], target: float) -> Row | None:
    first = next((number for number, value in curve if value >= target), None)
    if first is None:
        return None
    until = [row for number, row in rounds.items() if number <= first]
    return {"rounds": first, "bytes": int(sum(map(_bytes, until))), "seconds": sum(finite(row.get("seconds")) or 0.0 for row in until)}


def _bytes(row: Mapping[str, Any]) -> float:
    return (finite(row.get("bytes_down")) or 0.0) + (finite(row.get("bytes_up")) or 0.0)


def _notes(record: Mapping[str, Any], data: RunData, mean: float | None, best: tuple[int, float] | None) -> list[str]:
    state, reason = record.get("state", "waiting"), " ".join(str(record.get("reason", "")).split())
    notes = []
    lost = [row for row in data.failures if _diverged(str(row.get("reason", "")))]
    gone = bool(lost) or _diverged(reason)
    if gone:
        nodes = {str(row.get("node")) for row in lost}
        since = min((int(row.get("round") or 0) for row in lost), default=0)
        notes.append("DIVERGED" + (f" on {len(nodes)} node{'s' * (len(nodes) > 1)}, first in round {since}" if nodes else ""))
    if state != "done":
        rounds = len(next(iter(data.rounds.values()), {}))
        notes.append(
            f"{state} after {rounds} rounds"
            + (f": {shorten(reason, 100 if gone else 300, placeholder=' ...')}" if state == "failed" else "")
        )
    elif others := len(data.failures) - len(lost):
        notes.append(f"{others} failures of nodes")
    if state == "done" and mean is not None and best is not None and best[1] - mean > FELL:
        notes.append(f"fell from {best[1]:.1%} in round {best[0]}")
    return notes


def _diverged(reason: str) -> bool:
    return "diverged" in reason or "not finite" in reason


def _to_target(done: list[Row], target: float | None) -> Row | None:
    if target is None:
        return None
    there = [found["target"] for found in done if found["target"]]
    return {"reached": len(there), **{key: _mean(found[key] for found in there) for key in ("rounds", "bytes", "seconds")}}


def _gain(row: Row, best: Row | None) -> Row:
    """Return the difference to the best baseline over the seeds that both have."""
    if best is None or row["case"] == best["case"]:
        return {"gain": None, "gain_std": None}
    pairs = [(found, best["seeds"].get(seed, {})) for seed, found in row["seeds"].items()]
    gains = [a["mean"] - b["mean"] for a, b in pairs if all(x.get("state") == "done" and x.get("mean") is not None for x in (a, b))]
    return {"gain": _mean(gains), "gain_std": statistics.stdev(gains) if len(gains) > 1 else None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _command(job: Job) -> str:
    defaults = read_defaults()
    changed: Values = {key: value for key, value in job.config.items() if value != defaults.get(key) and key not in ("strategy", "alone")}
    told = [f"-c {shlex.quote(f'{key}={str(value).lower() if isinstance(value, bool) else value}')}" for key, value in changed.items()]
    return " ".join([f"heterofleet simulate --nodes {job.nodes} --strategy {job.strategy} --no-alone", *told])
