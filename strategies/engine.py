"""The round engine: what every method's server half is built on.

A method writes `prepare`, `payload_for`, `begin_round`, `fold`, `end_round` and its state; it never sees a Message
and never loops over replies. Replies are folded as they arrive; what a method folds into must not depend on their
order (see `strategies.aggregation`), so that the same seed gives the same bits with 1 or 4 workers.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from client_app.protocol import ORDER, PAYLOAD, Order, report_of
from server_app.settings import Section, Settings
from strategies.aggregation import UpdateError, check_growth, check_update
from strategies.exchange import Exchange, is_away
from strategies.fleet import Fleet, FleetError, Node, ask
from strategies.ledger import Journal, Ledger
from strategies.messages import Outbox, Payload, Tensors, TransportError, Update, decode, encode, wire_bytes


class HeteroStrategy(FlowerStrategy):
    """Server half of a method over nodes with different models.

    Args:
        settings: the run's settings.
        config: the method's own settings.
        order: fixed part of every message (run, experiment, lineage, state_dir).
        journal: takes rows and checkpoints.
    """

    uploads = True  # False where nodes send no tensors

    def __init__(self, settings: Settings, config: Section, order: Order, journal: Journal) -> None:
        self.settings, self.config, self.order, self.journal = settings, config, order, journal
        self.first_round = 1
        self._grid: Grid
        self._fleet: Fleet
        self._exchange: Exchange
        self._here: list[Node] = []
        self._sampled: list[Node] = []
        self._ledger = Ledger(journal)
        self._outbox = Outbox(settings.transport.dtype)

    # What a method writes ------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, nodes: list[Node]) -> None:
        """Make or check the server's state for these nodes; called whenever nodes may have joined.

        It may `exclude` nodes that the others can do without.

        Raises:
            FleetError: the nodes do not fit together.
        """

    @abstractmethod
    def begin_round(self, server_round: int, nodes: list[Node]) -> None:
        """Start new sums for the sampled nodes; called again when a round is repeated."""

    @abstractmethod
    def payload_for(self, node: Node) -> Payload:
        """Return what `node` gets; return the same object for nodes that get the same."""

    @abstractmethod
    def fold(self, node: Node, update: Update) -> None:
        """Add one node's update; raises UpdateError to refuse it. Must not keep the update."""

    def align(self, server_round: int) -> None:
        """Hold the method's further exchanges of a round by `exchange`; all updates have been folded, none has ended the round."""

    @abstractmethod
    def end_round(self) -> dict[str, float]:
        """Make the new state from what was folded; return the method's own numbers."""

    @abstractmethod
    def state_dict(self) -> Tensors:
        """Return everything of the server that survives a round."""

    @abstractmethod
    def load_state_dict(self, state: Tensors) -> None:
        """Take over a checkpoint; raises ValueError where it does not fit."""

    def expected(self, node: Node) -> Tensors:
        """Return names, shapes and dtypes of `node`'s update: by default those of what it was sent."""
        return self.payload_for(node).tensors if self.uploads else {}

    def evaluate_shared(self) -> dict[str, float]:
        """Return metrics of the shared model on the common test set; {} where there is none."""
        return {}

    def shared_tensors(self) -> Tensors:
        """Return the shared part as it is handed out at the end of a run."""
        return self.state_dict()

    # The loop ------------------------------------------------------------------------------------------------

    def meet(self, grid: Grid) -> int:
        """Ask all nodes who they are, leave out those that do not fit, and return how many are simulated (0: real ones).

        Raises:
            FleetError: too few nodes joined, or too few fit together.
        """
        self._grid, self._exchange = grid, Exchange(grid)
        self._fleet = Fleet(grid, self._exchange, self.settings.fleet, self._describe, report_of)
        self.summary()
        self._here = self._fleet.wait(self._failure_of(self.first_round))
        self._prepare()
        return self._fleet.partitions

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run rounds `first_round` to `num_rounds`; the arguments after it are Flower's and not used.

        Raises:
            FleetError: too few nodes joined, or a round stayed below the quorum; the last checkpoint is intact.
        """
        if not hasattr(self, "_fleet"):
            self.meet(grid)
        self._here = self._fleet.wait(self._failure_of(self.first_round))  # some may have come or left since
        result = Result()
        for server_round in range(self.first_round, num_rounds + 1):
            started = time.perf_counter()
            self._outbox.clear()
            if server_round > self.first_round:
                self._here = self._fleet.wait(self._failure_of(server_round), everyone=False)
            method = self._train_round(grid, server_round)
            shared = self._evaluate_round(grid, server_round, last=server_round == num_rounds)
            self._ledger.write(server_round, time.perf_counter() - started, len(self._sampled), method, self._here, shared)
            self.journal.checkpoint(server_round, self)
            self.order = replace(self.order, checkpoint_round=server_round)
        result.arrays = cast(ArrayRecord, encode(self.shared_tensors())["arrays"])
        return result

    def _train_round(self, grid: Grid, server_round: int) -> dict[str, float]:
        fleet = self._fleet
        for attempt in range(self.settings.fleet.retries + 1):
            if attempt:
                log(WARNING, "round %d is repeated (fleet.retries)", server_round)
                self._here = fleet.wait(self._failure_of(server_round), everyone=False)
            messages = self.configure_train(server_round, ArrayRecord(), ConfigRecord(), grid)
            _, metrics = self.aggregate_train(server_round, self._replies(messages, server_round, "train"))
            if metrics is not None:
                return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
        needed, quorum = fleet.needed(len(self._sampled)), self.settings.fleet.quorum
        lines = [
            f"round {server_round}: {self._ledger.count} of {len(self._sampled)} sampled nodes gave a usable update, {needed} are needed "
            f"(fleet.quorum = {quorum:g}); the last complete round is {self.order.checkpoint_round}",
            *self._ledger.reasons(8),
        ]
        raise FleetError("\n".join(lines))

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Return one message for each node sampled for this round, heaviest model first (it would finish last)."""
        self._prepare()
        self._sampled = self._fleet.sample(self._here, self.settings.seed, server_round)
        self._ledger.begin([node.name for node in self._sampled])
        self.begin_round(server_round, self._sampled)
        heaviest_first = sorted(self._sampled, key=lambda n: -int(n.facts.get("parameters", 0)) * int(n.facts.get("num_train", 1)))
        return [self._message(node, "train", server_round) for node in heaviest_first]

    def _prepare(self) -> None:
        self.prepare(self._here)
        if len(self._here) < self.settings.fleet.min_nodes:
            raise FleetError(self._fleet.too_few(len(self._here)))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold each reply as it comes; return (None, None) below the quorum, else the method's numbers."""
        for reply in replies:
            node = self._by_id(reply)
            try:
                self._fold_reply(node, reply.content)
            except ValueError as error:
                self._ledger.fail(server_round, node.name, "train", str(error))
        if self._ledger.count < self._fleet.needed(len(self._sampled)):
            return None, None
        self.align(server_round)
        return None, MetricRecord(dict(self.end_round()))

    def exchange(self, payloads: dict[str, Payload], server_round: int) -> Iterator[tuple[Node, Update]]:
        """Send each named node its payload and yield the updates as they come; a node that fails is noted and left out.

        The node half answers with `Trainer.exchange`, on the private state of its training of this round, and saves
        the state after it. Tensors are not checked against a layout: the method does that.
        """
        self._outbox.clear()
        nodes = {node.name: node for node in self._sampled}
        messages = [self._message(nodes[name], "train.exchange", server_round, payload) for name, payload in payloads.items()]
        for reply in self._replies(messages, server_round, "exchange"):
            node = self._by_id(reply)
            try:
                report, tensors = report_of(reply.content), decode(reply.content)
            except ValueError as error:
                self._ledger.fail(server_round, node.name, "exchange", str(error))
                continue
            self._ledger.received(node.name, reply.content)
            metrics = {k: float(v) for k, v in report.items() if isinstance(v, (int, float))}
            yield node, Update(tensors, int(report.get("num_examples", 0)), metrics)

    def exclude(self, node: Node, reason: str) -> None:
        """Leave `node` out of the run until it comes anew, and note why."""
        self._fleet.refuse(node, reason)
        self._here = [other for other in self._here if other.node_id != node.node_id]
        self._failure_of(self.order.checkpoint_round + 1)(node.name, reason)

    def folded_nodes(self) -> list[Node]:
        """Return the sampled nodes whose update of this round was folded, sorted by name."""
        return [node for node in self._sampled if self._ledger.is_folded(node.name)]

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Return one message for each node that is here: all are evaluated, sampled or not."""
        self._outbox.clear()
        return [self._message(node, "evaluate", server_round) for node in self._here]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Note each node's own metrics; the ledger makes the summary over nodes."""
        for reply in replies:
            node = self._by_id(reply)
            try:
                report = report_of(reply.content)
                self._ledger.received(node.name, reply.content)
                self._ledger.measured(node.name, report)
            except ValueError as error:
                self._ledger.fail(server_round, node.name, "evaluate", str(error))
        return None

    def summary(self) -> None:
        """Log every effective setting of the method."""
        log(
            INFO,
            "strategy %s: %s",
            self.order.run,
            ", ".join(f"{k} = {v}" for k, v in self.config.model_dump(by_alias=True).items()) or "no settings",
        )

    def export(self, server_round: int) -> dict[str, str]:
        """Ask every node to write its own model; return node name -> path on that node."""
        paths: dict[str, str] = {}
        self._outbox.clear()
        self._ledger.begin([node.name for node in self._here])
        messages = [self._message(node, "query.export", server_round) for node in self._here]
        for reply in self._replies(messages, server_round, "export"):
            node = self._by_id(reply)
            self._ledger.received(node.name, reply.content)
            try:
                paths[node.name] = str(report_of(reply.content)["path"])
            except ValueError as error:
                self._ledger.fail(server_round, node.name, "export", str(error))
        self._ledger.write_export(server_round)
        return paths

    # Messages ------------------------------------------------------------------------------------------------

    def _describe(self, node_id: int) -> Message:
        content = RecordDict({ORDER: self.order.record()})
        return ask(node_id, "query.describe", content, group="0", timeout=self.settings.fleet.round_timeout)

    def _message(self, node: Node, kind: str, server_round: int, payload: Payload | None = None) -> Message:
        payload = payload or self.payload_for(node)
        try:
            content = self._outbox.content(payload)
        except TransportError as error:
            raise FleetError(f"round {server_round}: {error}") from None
        content[ORDER], content[PAYLOAD] = replace(self.order, server_round=server_round).record(), ConfigRecord(dict(payload.settings))
        self._ledger.sent(node.name, content)
        return ask(node.node_id, kind, content, group=str(server_round), timeout=self.settings.fleet.round_timeout)

    def _replies(self, messages: list[Message], server_round: int, phase: str) -> Iterator[Message]:
        names = {node.node_id: node.name for node in [*self._here, *self._sampled]}
        asked = {names[message.metadata.dst_node_id]: message for message in messages}
        started = time.perf_counter()
        largest = max((wire_bytes(message.content) for message in messages), default=0)  # replies are about as large
        messages.clear()  # what has been sent is not kept: one copy of each payload
        self._outbox.clear()
        for name, reply in self._exchange.send(asked, self.settings.fleet.round_timeout, largest):
            if isinstance(reply, str):
                self._ledger.fail(server_round, name, phase, reply)
                if is_away(reply) and not self._fleet.partitions:
                    self._fleet.lost.add(name)
            else:
                yield reply
        self._ledger.exchanged(time.perf_counter() - started)

    def _by_id(self, reply: Message) -> Node:
        return next(node for node in [*self._here, *self._sampled] if node.node_id == reply.metadata.src_node_id)

    def _fold_reply(self, node: Node, content: RecordDict) -> None:
        report = report_of(content)
        self._ledger.received(node.name, content)
        tensors = decode(content, take=True)
        count = report.get("num_examples", 0)
        if isinstance(count, (str, bool)) or not count > 0:
            raise UpdateError(f"the node reports {count!r} training samples: it has no weight in this round")
        sent = self.expected(node)
        check_update(tensors, sent)
        check_growth(tensors, sent)
        metrics = {k: float(v) for k, v in report.items() if isinstance(v, (int, float))}
        self.fold(node, Update(tensors, int(count), metrics))
        self._ledger.measured(node.name, report)
        self._ledger.folded(node.name)

    def _failure_of(self, server_round: int) -> Callable[[str, str], None]:
        return lambda node, reason: self._ledger.fail(server_round, node, "describe", reason)

    def _evaluate_round(self, grid: Grid, server_round: int, *, last: bool) -> dict[str, float] | None:
        """Evaluate every node, and return the shared model's metrics; None in a round without evaluation."""
        every = self.settings.eval_every
        if not last and (every == 0 or server_round % every):
            return None
        messages = self.configure_evaluate(server_round, ArrayRecord(), ConfigRecord(), grid)
        self.aggregate_evaluate(server_round, self._replies(messages, server_round, "evaluate"))
        return self.evaluate_shared()
