"""Server half of FedMuscle: draws each node's peers and passes representations on; holds no model."""

from __future__ import annotations

import math
from collections import Counter
from typing import cast

import torch

from client_app.protocol import Order
from server_app.settings import Section, Settings
from strategies.engine import HeteroStrategy, Journal
from strategies.fedmuscle.config import Config
from strategies.fedmuscle.exchange import Batches, graded, layout, relayed, unpack
from strategies.fleet import Node
from strategies.messages import Payload, Tensors, Update

_NOTHING = Payload()


class Strategy(HeteroStrategy):
    """Keeps uploads for as long as they may be a peer's: a step, or with `exchange = round` until the next round is over."""

    _manifest, _num_items = "", 0
    _uploads: dict[str, torch.Tensor]
    _losses: list[float]
    _met: list[float]
    _plain = _NOTHING
    _previous_round = 0

    def __init__(self, settings: Settings, config: Section, order: Order, journal: Journal) -> None:
        super().__init__(settings, config, order, journal)
        self._payloads: dict[str, Payload] = {}
        self._previous: dict[str, torch.Tensor] = {}

    @property
    def method(self) -> Config:
        """The method's settings."""
        return cast(Config, self.config)

    @property
    def uploads(self) -> bool:  # type: ignore[override]
        return self.method.exchanges

    def prepare(self, nodes: list[Node]) -> None:
        """Take the public set most nodes hold (at the first round) and leave out the nodes that hold another."""
        if not self.uploads:
            return
        held = {node.name: str(node.facts["public_manifest"]) for node in nodes}
        if not self._manifest:
            self._manifest = Counter(held[name] for name in sorted(held)).most_common(1)[0][0]
        for node in list(nodes):
            if held[node.name] == self._manifest:
                self._num_items = int(node.facts["public_items"])
            else:
                self.exclude(
                    node,
                    f"its public set ({node.facts['public_items']} items, {held[node.name][:12]}) is not the one of the run "
                    f"({self._manifest[:12]}); give all nodes the same fedmuscle.public-source",
                )

    def begin_round(self, server_round: int, nodes: list[Node]) -> None:
        self._uploads, self._losses, self._met = {}, [], []
        self._payloads, self._plain = {}, Payload(settings={"now": server_round})
        if not self.uploads:
            return
        self._batches = self._at(server_round)
        names = [node.name for node in nodes]
        if self.method.exchange == "round" and self._previous_round == server_round - 1 > 0:
            self._payloads = relayed(self.method, self.settings.seed, names, self._previous, self._at(server_round - 1))
            for payload in self._payloads.values():
                payload.settings["now"] = server_round

    def payload_for(self, node: Node) -> Payload:
        return self._payloads.get(node.name, self._plain)

    def expected(self, node: Node) -> Tensors:
        return layout(self.method, len(self._batches.indices)) if self.uploads else {}

    def fold(self, node: Node, update: Update) -> None:
        if self.uploads:
            self._uploads[node.name] = unpack(update.tensors, self._batches, sender=node.name)
        self._note_loss(update)

    def align(self, server_round: int) -> None:
        """Hold the T exchanges of `step` and `gradient`; a node that fails one takes no part in the rest of this round's."""
        if not self.uploads or self.method.exchange == "round":
            return
        for step in range(self.method.steps):
            present = dict(sorted(self._uploads.items()))
            now = self._at(server_round, step)
            if self.method.exchange == "gradient":
                payloads = graded(self.method, self.settings.seed, present, now)
            else:
                payloads = relayed(self.method, self.settings.seed, present, present, now)
            if not payloads:
                return
            self._uploads = {}
            coming = self._at(server_round, step + 1)
            for node, update in self.exchange(payloads, server_round):
                self._note_loss(update)
                if step + 1 == self.method.steps:
                    continue
                try:
                    self._uploads[node.name] = unpack(update.tensors, coming, sender=node.name)
                except ValueError as error:
                    self._ledger.fail(server_round, node.name, "exchange", str(error))

    def end_round(self) -> dict[str, float]:
        self._payloads, self._plain = {}, _NOTHING  # evaluation and export need none
        if self.uploads and self.method.exchange == "round":
            self._previous, self._previous_round = dict(sorted(self._uploads.items())), self._batches.server_round
        self._uploads = {}
        if not self._losses:
            return {}
        # Sorted: replies come in any order, and the same run must print the same digits.
        return {"contrastive_loss": math.fsum(sorted(self._losses)) / len(self._losses), "peers": math.fsum(self._met) / len(self._met)}

    def state_dict(self) -> Tensors:
        if not self._previous_round:
            return {}
        return {"round": torch.tensor(self._previous_round), **{f"rows.{name}": rows for name, rows in self._previous.items()}}

    def load_state_dict(self, state: Tensors) -> None:
        if state:
            self._previous_round = int(state["round"])
            self._previous = {name.removeprefix("rows."): rows for name, rows in state.items() if name != "round"}

    def shared_tensors(self) -> Tensors:
        return {}

    def _at(self, server_round: int, step: int = 0) -> Batches:
        return Batches.of(self.method, self.settings.seed, self._manifest, self._num_items, server_round, step)

    def _note_loss(self, update: Update) -> None:
        if "contrastive_loss" in update.metrics:
            self._losses.append(update.metrics["contrastive_loss"])
            self._met.append(update.metrics["peers"])
