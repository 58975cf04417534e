"""Numbers over nodes: mean, spread and the worst node, each counted as its name says."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

# measurement -> the samples it was made on
_COUNTED = {
    "accuracy": "test_samples",
    "local_accuracy": "test_samples",
    "val_accuracy": "val_samples",
    "local_val_accuracy": "local_val_samples",
}


def personalized(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of each node's own model on its own test split.

    Args:
        rows: one a node, with `node`, and `accuracy`, `loss`, `test_samples` where the node was evaluated; nodes
            without an evaluation or without test samples are left out.

    Returns:
        `accuracy_mean` (every node counts the same), `accuracy_weighted` (every sample counts the same),
        `accuracy_std` (over nodes, population), `accuracy_worst`, `worst_node`, `loss_mean`, `nodes`; the same four
        of `local_accuracy` (right after local training), `val_accuracy` and `local_val_accuracy` (validation split)
        where they were measured (`local_accuracy_mean`, ...). {} where nothing was.
    """
    every = list(rows)
    listed = [row for row in every if row.get("test_samples")]
    result: dict[str, Any] = {}
    for name, counted in _COUNTED.items():
        have = [row for row in every if name in row and row.get(counted)]
        if not have:
            continue
        values = [float(row[name]) for row in have]
        weights = [float(row[counted]) for row in have]
        worst = min(have, key=lambda row: (row[name], row["node"]))
        result |= {
            f"{name}_mean": statistics.fmean(values),
            f"{name}_weighted": statistics.fmean(values, weights),
            f"{name}_std": statistics.pstdev(values),
            f"{name}_worst": float(worst[name]),
        }
        if name == "accuracy":
            result |= {"worst_node": worst["node"], "nodes": len(have)}
    losses = [float(row["loss"]) for row in listed if "loss" in row]
    if losses:
        result["loss_mean"] = statistics.fmean(losses)
    return result
