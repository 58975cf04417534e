"""Server half of local training: counts the nodes and sends nothing."""

from __future__ import annotations

from strategies.engine import HeteroStrategy
from strategies.fleet import Node
from strategies.messages import Payload, Tensors, Update


class Strategy(HeteroStrategy):
    """Local training: no tensors in either direction."""

    uploads = False
    _payload = Payload()

    def prepare(self, nodes: list[Node]) -> None:
        """Nodes need not fit together."""

    def begin_round(self, server_round: int, nodes: list[Node]) -> None:
        """Nothing is summed."""

    def payload_for(self, node: Node) -> Payload:
        return self._payload

    def fold(self, node: Node, update: Update) -> None:
        """Nothing is summed."""

    def end_round(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> Tensors:
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """There is none."""
