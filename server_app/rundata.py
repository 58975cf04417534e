"""A run folder as it lies on disk, read: status, settings and the rows of `metrics.jsonl`.

The folder may be that of a run still going, killed half-way or resumed: the last line may be torn, and
a round that was run again has two sets of rows, of which the later counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class RunFolderError(ValueError):
    """The folder holds no run; the message says what was looked for."""


@dataclass
class RunData:
    """What a run left.

    Attributes:
        folder: where it lies.
        status: `status.json`, or empty.
        settings: the flat run config from `run.json`, or empty.
        nodes: run -> round -> node -> its row.
        rounds: run -> round -> the round's row.
        exports: run -> round -> the row of the export after it.
        failures: rows in the order written.
        skipped: lines of `metrics.jsonl` that were not JSON objects.
    """

    folder: Path
    status: Row = field(default_factory=dict)
    settings: Row = field(default_factory=dict)
    nodes: dict[str, dict[int, dict[str, Row]]] = field(default_factory=dict)
    rounds: dict[str, dict[int, Row]] = field(default_factory=dict)
    exports: dict[str, dict[int, Row]] = field(default_factory=dict)
    failures: list[Row] = field(default_factory=list)
    skipped: int = 0

    @property
    def state(self) -> str:
        """completed, failed or running; completed also where every round is there and only the report is missing."""
        state = str(self.status.get("state", "running"))
        planned, total = self.status.get("runs"), self.status.get("num_rounds")
        if state != "running" or not planned or not total:
            return state
        return "completed" if all(max(self.rounds.get(run, {0: {}})) >= total for run in planned) else state

    @property
    def runs(self) -> list[str]:
        """Names of the runs in the order in which they began."""
        return list(dict.fromkeys([*self.rounds, *self.nodes]))

    @property
    def main_run(self) -> str:
        """The chosen strategy: the last run that is not `local`, else `local`, else an empty string."""
        others = [run for run in self.runs if run != "local"]
        return (others or self.runs or [""])[-1]

    def traffic(self, run: str, key: str) -> int:
        """Return the sum of `key`, bytes_down or bytes_up, over all rounds of `run` and what was exported after them."""
        rows = [*self.rounds.get(run, {}).values(), *self.exports.get(run, {}).values()]
        return int(sum(finite(row.get(key)) or 0 for row in rows))

    def last(self, run: str, key: str, until: Mapping[str, int] | None = None) -> dict[str, Row]:
        """Return node -> its newest row of `run` that holds a finite `key`.

        Args:
            run: name of the run.
            key: what the row must hold.
            until: node -> last round to look at, where there is one.
        """
        found: dict[str, Row] = {}
        for number in sorted(self.nodes.get(run, {})):
            for node, row in self.nodes[run][number].items():
                late = until is not None and number > until.get(node, number)
                if finite(row.get(key)) is not None and not (late and node in found):
                    found[node] = row
        return found


def finite(value: Any) -> float | None:
    """Return `value` as a float, or None where it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def models_of(row: Mapping[str, Any]) -> str:
    """Return the model of a node (or of a group of nodes) in `summary.json`; "alone / together" where they are two."""
    alone, together = row.get("model_alone"), str(row["model"])
    return together if alone in (None, together) else f"{alone} / {together}"


def read_run(folder: Path) -> RunData:
    """Return what lies in a run folder.

    Raises:
        RunFolderError: it holds neither `metrics.jsonl` nor `status.json`.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() and not (folder / "status.json").is_file():
        raise RunFolderError(f"{folder} is not a run's folder: it holds neither metrics.jsonl nor status.json")
    data = RunData(folder, status=read_object(folder / "status.json"), settings=read_object(folder / "run.json").get("run_config") or {})
    for row in _rows(metrics, data):
        run, number = str(row.get("run", "")), row.get("round")
        if row.get("kind") == "failure":
            data.failures.append(row)
        elif isinstance(number, int) and row.get("kind") == "node":
            data.nodes.setdefault(run, {}).setdefault(number, {})[str(row.get("node"))] = row
        elif isinstance(number, int) and row.get("kind") == "round":
            data.rounds.setdefault(run, {})[number] = row
        elif isinstance(number, int) and row.get("kind") == "export":
            data.exports.setdefault(run, {})[number] = row
    return data


def _rows(path: Path, data: RunData) -> Iterator[Row]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if isinstance(row, dict):
                yield row
            elif line.strip():
                data.skipped += 1


def read_object(path: Path) -> Row:
    """Return the JSON object in a file; empty where there is no such file or it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
