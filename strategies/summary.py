"""Numbers over nodes: mean, spread and the worst node, each counted as its name says."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any


def personalized(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of each node's own model on its own test split.

    Args:
        rows: one a node, with `node`, and `accuracy`, `loss`, `test_samples` where the node was evaluated; nodes
            without an evaluation or without test samples are left out.

    Returns:
        `accuracy_mean` (every node counts the same), `accuracy_weighted` (every sample counts the same),
        `accuracy_std` (over nodes, population), `accuracy_worst`, `worst_node`, `loss_mean`, `nodes`; the same three
        of `local_accuracy` (`local_accuracy_mean`, ...) where it was measured. {} where nothing was.
    """
    listed = [row for row in rows if row.get("test_samples")]
    result: dict[str, Any] = {}
    for name in ("accuracy", "local_accuracy"):
        have = [row for row in listed if name in row]
        if not have:
            continue
        values = [float(row[name]) for row in have]
        weights = [float(row["test_samples"]) for row in have]
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
