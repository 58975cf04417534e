"""What a round cost and gave, node by node: kept while it runs, written as rows at its end."""

from __future__ import annotations

from logging import WARNING
from typing import TYPE_CHECKING, Any, Protocol

from flwr.app import RecordDict
from flwr.common.logger import log

from strategies.messages import Scalar, wire_bytes
from strategies.summary import personalized

if TYPE_CHECKING:
    from strategies.engine import HeteroStrategy
    from strategies.fleet import Node


class Journal(Protocol):
    """Where the engine reports to (see `server_app.recorder`)."""

    def node(self, row: dict[str, Any]) -> None: ...
    def round(self, row: dict[str, Any]) -> None: ...
    def export(self, row: dict[str, Any]) -> None: ...
    def failure(self, server_round: int, node: str, phase: str, reason: str) -> None: ...
    def checkpoint(self, server_round: int, strategy: HeteroStrategy) -> None: ...


class Ledger:
    """The rows of one round.

    Args:
        journal: takes finished rows, and failures at once.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._rows: dict[str, dict[str, Any]] = {}
        self._folded: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._exchanges: list[float] = []

    def begin(self, names: list[str]) -> None:
        """Start the rows of a round, or of its repetition, for the sampled nodes."""
        self._rows, self._folded, self._reasons = {name: {} for name in names}, set(), {}
        self._exchanges = []

    def sent(self, node: str, content: RecordDict) -> None:
        """Count the bytes of a message to `node`."""
        self._count(node, "bytes_down", wire_bytes(content))

    def received(self, node: str, content: RecordDict) -> None:
        """Count the bytes of a reply of `node`."""
        self._count(node, "bytes_up", wire_bytes(content))

    def exchanged(self, seconds: float) -> None:
        """Note that an exchange with all nodes is over, from the first message sent to the last reply folded."""
        self._exchanges.append(seconds)

    def measured(self, node: str, report: dict[str, Scalar]) -> None:
        """Take over the numbers of a node's report; the time to load adds up over the messages of a round."""
        row = self._rows.setdefault(node, {})
        numbers = {k: v for k, v in report.items() if k not in ("node_name", "has_state") and isinstance(v, (int, float))}
        load = float(row.get("seconds_load", 0.0)) + float(numbers.get("seconds_load", 0.0))
        row.update(numbers, seconds_load=load)

    def folded(self, node: str) -> None:
        """Note that the update of `node` counts in this round."""
        self._folded.add(node)

    def is_folded(self, node: str) -> bool:
        """Return whether the update of `node` counts."""
        return node in self._folded

    @property
    def count(self) -> int:
        """Number of updates that count."""
        return len(self._folded)

    def fail(self, server_round: int, node: str, phase: str, reason: str) -> None:
        """Log and write why a node did not take part in a phase of a round."""
        log(WARNING, "round %d, %s, node %s: %s", server_round, phase, node, reason)
        self._reasons[node] = reason
        self._journal.failure(server_round, node, phase, reason)

    def reasons(self, most: int) -> list[str]:
        """Return a line for each node that failed in this round, by name."""
        return [f"- {name}: {reason}" for name, reason in sorted(self._reasons.items())][:most]

    def write(
        self, server_round: int, seconds: float, sampled: int, method: dict[str, float], nodes: list[Node], shared: dict[str, float] | None
    ) -> None:
        """Write the rows of the nodes and of the round; `shared` is None in a round without evaluation."""
        models = {node.name: node.facts.get("model", "") for node in nodes}
        rows = [{"round": server_round, "node": name, "model": models.get(name, ""), **row} for name, row in sorted(self._rows.items())]
        for row in rows:
            self._journal.node(row)
        summary: dict[str, Any] = {"round": server_round, "seconds": seconds, "sampled": sampled, "replied": self.count}
        summary |= self._bytes()
        summary |= {"exchanges": len(self._exchanges), "seconds_exchanges": sum(self._exchanges), "method": method}
        if shared is not None:
            summary |= {"personalized": personalized(rows), "shared": shared}
        self._journal.round(summary)

    def write_export(self, server_round: int) -> None:
        """Write the bytes of the export after `server_round`, which is no part of a round."""
        self._journal.export({"round": server_round, **self._bytes()})

    def _bytes(self) -> dict[str, int]:
        return {key: sum(int(row.get(key, 0)) for row in self._rows.values()) for key in ("bytes_down", "bytes_up")}

    def _count(self, node: str, key: str, size: int) -> None:
        row = self._rows.setdefault(node, {})
        row[key] = row.get(key, 0) + size
