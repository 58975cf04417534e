"""A shared model fine-tuned on every node: what a node gets that takes the average away and trains it once more for itself."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import strategies
from client_app.protocol import APP_DIR, Order, fingerprint
from server_app.checkpoint import CheckpointError, Checkpoints, write_text
from server_app.inprocess import simulated
from strategies.engine import HeteroStrategy
from strategies.summary import personalized


class _Memory:
    """A journal that keeps the nodes' rows and writes nothing."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []

    def node(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def round(self, row: dict[str, Any]) -> None:
        """The closing round is not one of the run."""

    def export(self, row: dict[str, Any]) -> None:
        """Nothing is exported."""

    def failure(self, server_round: int, node: str, phase: str, reason: str) -> None:
        self.failures.append({"round": server_round, "node": node, "phase": phase, "reason": reason})

    def checkpoint(self, server_round: int, strategy: HeteroStrategy) -> None:
        """The run's last checkpoint stays its last."""


def finetune(run_config: Mapping[str, Any], nodes: int, out_dir: Path) -> dict[str, Any]:
    """Let EVERY node train the finished run's average for its local epochs, write `finetuned.json` and return it.

    It is the round after the last with all nodes in it, whatever `fleet.fraction` says, measured before its updates
    are averaged: each node is counted, none by chance. Against a run of equal length each node has trained once more.

    Returns:
        `personalized` (with `local_accuracy_mean`, ...), `nodes` (their rows), `failures`, `cpu_seconds`.

    Raises:
        CheckpointError: the run has no checkpoint to start from.
        FleetError: fewer nodes than the quorum could train.
    """
    settings, config = strategies.settings_of({**run_config, "eval-local": True})
    run, started = settings.strategy, time.process_time()
    found = Checkpoints(out_dir / "checkpoint" / run).load()
    if found is None:
        raise CheckpointError(f"{out_dir} holds no checkpoint of {run} to fine-tune")
    done = found[0]
    everyone = settings.fleet.model_copy(update={"fraction": 1.0})
    order = Order(run, "finetune", "closing", done, done, fingerprint(), str(APP_DIR), str(out_dir / "state"))
    journal = _Memory()
    strategy = strategies.strategy_class(run)(settings.model_copy(update={"fleet": everyone}), config, order, journal)
    strategy.load_state_dict(found[1])
    strategy.first_round = done + 1
    strategy.start(simulated({**run_config, "eval-local": True}, nodes), num_rounds=done + 1)
    result = {
        "personalized": personalized(journal.rows),
        "nodes": journal.rows,
        "failures": journal.failures,
        "cpu_seconds": time.process_time() - started,
    }
    write_text(out_dir / "finetuned.json", json.dumps(result))
    return result
