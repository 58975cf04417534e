"""An in-process Grid with faults: the real ClientApp, every array through Flower's serialisation, no Ray, no SuperLink.

Faults can be asked for: nodes that left (`offline`), that never answer (`silent`), whose reply is changed on its
way (`tamper`). Replies are handed over in a chosen order (`shuffle`), a few at a time, as over a network.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from server_app.inprocess import InProcessGrid, through_the_wire

__all__ = ["LocalGrid", "through_the_wire"]


class LocalGrid(InProcessGrid):
    """Nodes work when a message is pushed, so that a test can count what was sent and received."""

    def __init__(self, app: ClientApp, node_configs: list[dict[str, Any]], run_config: dict[str, Any], run_id: int = 7) -> None:
        self.offline: set[int] = set()
        self.silent: set[int] = set()
        self.tamper: Callable[[str, int, RecordDict], RecordDict | None] | None = None
        self.shuffle: random.Random | None = None
        self.sent: list[tuple[str, int, RecordDict]] = []
        self.received: list[tuple[str, int, RecordDict]] = []
        self._ready: dict[str, Message] = {}
        super().__init__(app, node_configs, run_config, run_id, wire=True)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node not in self.offline]

    def accept(self, key: str, message: Message) -> None:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        self.sent.append((kind, node, message.content))
        if node not in self.silent:
            self._ready[key] = self.answer(message)

    def deliver(self, message: Message, content: RecordDict) -> RecordDict | None:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        came = content if self.tamper is None else self.tamper(kind, node, content)
        if came is not None:
            self.received.append((kind, node, through_the_wire(came)))  # the server takes the arrays out as it reads them
        return came

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = [key for key in message_ids if key in self._ready]
        if self.shuffle is not None:
            self.shuffle.shuffle(wanted)
            wanted = wanted[: max(1, len(wanted) // 2)]
        return [self._ready.pop(key) for key in wanted]
