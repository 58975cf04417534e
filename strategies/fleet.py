"""Which nodes there are, what they said of themselves, and which of them take part in a round."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import INFO

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from client_app.protocol import ReplyError
from server_app.settings import FleetSettings
from strategies.exchange import Exchange
from strategies.messages import Scalar

_PAUSE = 0.2  # seconds between looks at who has joined
_GRACE = 10.0  # seconds without a newcomer after which real nodes that were all refused are not waited for any longer


class FleetError(RuntimeError):
    """The run cannot go on: too few nodes or too few replies; the message names the option or the reasons."""


@dataclass(frozen=True)
class Node:
    """A participant as it described itself.

    Attributes:
        name: stable name; Flower's node_id is random per run.
        node_id: Flower's address.
        facts: what the node's `describe` said (model, rank_ratio, num_train, input_shape, ...).
    """

    name: str
    node_id: int
    facts: dict[str, Scalar]


@dataclass
class Fleet:
    """The nodes of a run. Asks each new node once to describe itself; forgets the ones that left.

    Attributes:
        describe: node ids -> the messages that ask them.
        parse: a reply -> facts with at least `node_name`; raises ValueError with the reason to exclude the node.
        refused: node id -> reason, for nodes that could not be used and have not left.
        partitions: nodes in a simulated fleet; 0 for a real one.
    """

    grid: Grid
    exchange: Exchange
    settings: FleetSettings
    describe: Callable[[int], Message]
    parse: Callable[[RecordDict], dict[str, Scalar]]
    nodes: dict[str, Node] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    partitions: int = 0
    lost: set[str] = field(default_factory=set)

    def refresh(self, on_failure: Callable[[str, str], None]) -> list[Node]:
        """Return the nodes that are here and usable, sorted by name, after asking the new ones."""
        here = set(self.grid.get_node_ids())
        self.nodes = {name: node for name, node in self.nodes.items() if node.node_id in here}
        self.refused = {node_id: why for node_id, why in self.refused.items() if node_id in here}
        known = {node.node_id for node in self.nodes.values()} | self.refused.keys()
        unanswered = self.exchange.busy_nodes()
        asked = {str(i): self.describe(i) for i in sorted(here - known) if str(i) not in unanswered}
        for label, reply in self.exchange.send(asked, min(self.settings.round_timeout, 600.0)):
            self._admit(int(label), reply, on_failure)
        busy = self.exchange.busy_nodes()
        return [self.nodes[name] for name in sorted(self.nodes) if name not in busy]

    def wait(self, on_failure: Callable[[str, str], None], *, everyone: bool = True) -> list[Node]:
        """Return the usable nodes once enough are here; waits at most `fleet.join-timeout`.

        Enough is `fleet.min-nodes`, and with `everyone` in simulation each partition, refused or not. Where every node that
        is connected was refused, the wait ends early: somebody has to mend something first. Nodes `lost` since the last call
        are given `fleet.return-timeout` to come back.

        Raises:
            FleetError: fewer than `fleet.min-nodes` are usable in time, with the reasons of those that are not.
        """
        newest = time.monotonic()
        end, seen = newest + self.settings.join_timeout, 0
        lost, back = self.lost, newest + self.settings.return_timeout
        self.lost = set()
        while True:
            nodes = self.refresh(on_failure)
            known = len(nodes) + len(self.refused)
            if known != seen:
                seen, newest = known, time.monotonic()
            enough = len(nodes) >= self.settings.min_nodes and known >= (self.partitions if everyone else 0)
            enough = enough and (lost <= {node.name for node in nodes} or time.monotonic() >= back)
            hopeless = 0 < self.partitions <= known  # a simulated fleet is complete: nobody else will come
            hopeless |= time.monotonic() - newest > _GRACE and self._all_refused()
            if enough or hopeless or time.monotonic() >= end:
                break
            time.sleep(_PAUSE)
        if len(nodes) < self.settings.min_nodes:
            raise FleetError(self.too_few(len(nodes)))
        return nodes

    def _all_refused(self) -> bool:
        here = set(self.grid.get_node_ids())
        return bool(here) and here <= self.refused.keys()

    def sample(self, nodes: list[Node], seed: int, server_round: int) -> list[Node]:
        """Return ceil-free max(1, round(fraction * N)) nodes, drawn without replacement from (seed, round), sorted by name."""
        count = max(1, min(len(nodes), round(self.settings.fraction * len(nodes))))
        drawn = random.Random(f"{seed}/{server_round}").sample(sorted(nodes, key=lambda n: n.name), count)
        return sorted(drawn, key=lambda n: n.name)

    def needed(self, sampled: int) -> int:
        """Return how many of `sampled` nodes must reply for a round to count."""
        return max(1, math.ceil(self.settings.quorum * sampled - 1e-9))

    def _admit(self, node_id: int, reply: Message | str, on_failure: Callable[[str, str], None]) -> None:
        label = f"node {node_id}"
        try:
            if isinstance(reply, str):
                raise ValueError(reply)
            facts = self.parse(reply.content)
            label = str(facts["node_name"])
            twin = self.nodes.get(label)
            if twin is not None:
                raise ValueError(f"another node is already here under the name {label!r}; give each node its own name in --node-config")
        except ValueError as error:
            if isinstance(error, ReplyError):
                label, self.partitions = error.node or label, max(self.partitions, error.partitions)
            if str(node_id) not in self.exchange.busy.values():  # one that is only late is asked again
                self.refused[node_id] = str(error)
            on_failure(label, str(error))
            return
        self.nodes[label] = Node(label, node_id, facts)
        self.partitions = max(self.partitions, int(facts["num_partitions"]) if facts.get("simulated") else 0)
        log(INFO, "node %s joined: model %s, %s training samples", label, facts.get("model"), facts.get("num_train"))

    def refuse(self, node: Node, reason: str) -> None:
        """Count `node` among the refused until it leaves."""
        self.nodes.pop(node.name, None)
        self.refused[node.node_id] = reason

    def too_few(self, usable: int) -> str:
        """Return the message for a run that has only so many usable nodes."""
        wanted, seconds = self.settings.min_nodes, self.settings.join_timeout
        waited = f"of {self.partitions} simulated" if self.partitions else f"after {seconds:g} s (fleet.join-timeout)"
        if not self.partitions and not self.nodes and self.refused:
            waited = f"of {len(self.refused)} connected"
        text = f"{usable} usable nodes {waited}, fleet.min-nodes = {wanted} are needed"
        reasons = [f"- {why}" for why in sorted(set(self.refused.values()))[:5]]
        return "\n".join([text, *reasons])


def ask(node_id: int, message_type: str, content: RecordDict, *, group: str, timeout: float) -> Message:
    """Return the message to one node; it is void for the SuperLink a little after nobody waits for it any more."""
    return Message(content, dst_node_id=node_id, message_type=message_type, ttl=timeout + 60.0, group_id=group)
