"""Makes run folders by hand, as the ServerApp would leave them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Accuracies = Mapping[str, Sequence[Mapping[str, float]]]


def make(folder: Path, accuracies: Accuracies, *, num_rounds: int, models: Mapping[str, str] | None = None, **status: Any) -> Path:
    """Write a run's folder and return it.

    Args:
        folder: made if missing.
        accuracies: run -> for each round, node -> accuracy.
        num_rounds: planned, of each run.
        models: node -> model; "cnn1" where not named.
        status: more keys of status.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for run, rounds in accuracies.items():
        for number, nodes in enumerate(rounds, start=1):
            for node, accuracy in nodes.items():
                model = (models or {}).get(node, "cnn1")
                rows.append({"kind": "node", "run": run, "round": number, "node": node, "model": model})
                rows[-1] |= {"num_examples": 40, "test_samples": 10, "accuracy": accuracy, "loss": 1.0 - accuracy}
            worst = min(nodes, key=lambda node: nodes[node])
            own = {"accuracy_mean": statistics.fmean(nodes.values()), "accuracy_std": statistics.pstdev(nodes.values())}
            own |= {"accuracy_worst": nodes[worst], "worst_node": worst, "accuracy_weighted": statistics.fmean(nodes.values())}
            rows.append({"kind": "round", "run": run, "round": number, "seconds": 2.0 * number, "sampled": len(nodes)})
            rows[-1] |= {"replied": len(nodes), "personalized": own, "bytes_down": 1000 * number, "bytes_up": 500}
    append(folder, *rows)
    standing = {"state": "completed", "reason": "", "runs": list(accuracies), "num_rounds": num_rounds, **status}
    (folder / "status.json").write_text(json.dumps(standing), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"run_config": {"strategy": "fedmrl", "seed": 3}}), encoding="utf-8")
    return folder


def append(folder: Path, *rows: Mapping[str, Any]) -> None:
    """Append rows to the folder's metrics.jsonl."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def two_runs(folder: Path, **status: Any) -> Path:
    """Write three nodes, two models, two rounds of `local` and of `fedmrl`."""
    accuracies = {
        "local": [
            {"partition-0": 0.3, "partition-2": 0.4, "partition-10": 0.5},
            {"partition-0": 0.5, "partition-2": 0.6, "partition-10": 0.7},
        ],
        "fedmrl": [
            {"partition-0": 0.2, "partition-2": 0.5, "partition-10": 0.8},
            {"partition-0": 0.75, "partition-2": 0.6, "partition-10": 0.65},
        ],
    }
    return make(folder, accuracies, num_rounds=2, models={"partition-0": "cnn2"}, **status)
