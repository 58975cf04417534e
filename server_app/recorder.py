"""Writes what a run leaves behind while it runs: `status.json`, `metrics.jsonl`, checkpoints (docs/architecture.md)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.checkpoint import Checkpoints, write_text

if TYPE_CHECKING:
    from strategies.engine import HeteroStrategy


class Recorder:
    """One out-dir. Rows are appended and flushed one by one, so that a killed run leaves all complete ones.

    Args:
        out_dir: absolute.
        header: goes into every checkpoint (settings, lineage, ...).
        runs: the strategies that run one after the other, for the estimate of the time left.
        num_rounds: of each.
    """

    def __init__(self, out_dir: Path, header: dict[str, Any], runs: tuple[str, ...], num_rounds: int) -> None:
        self.out_dir, self._header, self._runs, self._num_rounds = out_dir, header, runs, num_rounds
        self._run = runs[0]
        self._status: dict[str, Any] = {"state": "running", "reason": "", "num_rounds": num_rounds, "round": 0, "runs": list(runs)}
        self._seconds: list[float] = []

    def rewind(self, run: str, server_round: int) -> None:
        """Remove the rows of strategy `run` after its newest complete round; what is written next is of that strategy."""
        self._run = run
        self._drop_rows_after(run, server_round)

    def enter(self, run: str, server_round: int) -> None:
        """Go over to strategy `run`, whose newest complete round is `server_round`."""
        self._run = run
        self.status(run=run, round=server_round)

    def status(self, **values: Any) -> None:
        """Replace status.json, with `values` changed."""
        self._status |= {**values, "updated": time.time()}
        write_text(self.out_dir / "status.json", json.dumps(self._status))

    def node(self, row: dict[str, Any]) -> None:
        """Append a node's row of a round."""
        self._append({"kind": "node", "run": self._run, **row})

    def export(self, row: dict[str, Any]) -> None:
        """Append what the nodes' writing of their models at the end cost."""
        self._append({"kind": "export", "run": self._run, **row})

    def failure(self, server_round: int, node: str, phase: str, reason: str) -> None:
        """Append why a node did not take part."""
        self._append({"kind": "failure", "run": self._run, "round": server_round, "node": node, "phase": phase, "reason": reason})

    def round(self, row: dict[str, Any]) -> None:
        """Append a round's row and show it in the status."""
        self._append({"kind": "round", "run": self._run, **row})
        self._seconds.append(row["seconds"])
        recent = self._seconds[-5:]
        left = self._num_rounds - row["round"] + self._num_rounds * (len(self._runs) - 1 - self._runs.index(self._run))
        shown = {"metric": "accuracy_mean", "value": row["personalized"].get("accuracy_mean")} if row.get("personalized") else {}
        self.status(round=row["round"], seconds=row["seconds"], eta_seconds=left * sum(recent) / len(recent), nodes=row["sampled"], **shown)

    def checkpoint(self, server_round: int, strategy: HeteroStrategy) -> None:
        """Write the strategy's state after `server_round`."""
        self.checkpoints(self._run).save(strategy.state_dict(), server_round=server_round, header=self._header)

    def checkpoints(self, run: str) -> Checkpoints:
        """Return the checkpoints of strategy `run`."""
        return Checkpoints(self.out_dir / "checkpoint" / run)

    def _append(self, row: dict[str, Any]) -> None:
        with open(self.out_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _drop_rows_after(self, run: str, server_round: int) -> None:
        path = self.out_dir / "metrics.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # the line a killed run was writing
                continue
            if row["run"] != run or row["round"] <= server_round:
                kept.append(line)
        write_text(path, "".join(line + "\n" for line in kept))
