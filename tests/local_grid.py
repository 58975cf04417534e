"""An in-process Grid: the real ClientApp, every array through Flower's serialisation, no Ray, no SuperLink.

Faults can be asked for: nodes that left (`offline`), that never answer (`silent`), whose reply is changed on its
way (`tamper`). Replies are handed over in a chosen order (`shuffle`), a few at a time, as over a network.
Touches private names of Flower; nothing else in the project does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SUPERLINK = 1
FIRST_NODE = 1000


def through_the_wire(content: RecordDict) -> RecordDict:
    """Return `content` serialised and read back as Flower does it."""
    objects = {key: value.deflate() for key, value in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, objects)  # type: ignore[return-value]


class LocalGrid(Grid):
    """One ClientApp run for nodes with the given node_configs; node i has id 1000 + i."""

    def __init__(self, app: ClientApp, node_configs: list[dict[str, Any]], run_config: dict[str, Any], run_id: int = 7) -> None:
        self.app, self._run, self._run_config = app, Run.create_empty(run_id), run_config
        self.contexts: dict[int, Context] = {}
        self.offline: set[int] = set()
        self.silent: set[int] = set()
        self.tamper: Callable[[str, int, RecordDict], RecordDict | None] | None = None
        self.shuffle: random.Random | None = None
        self.sent: list[tuple[str, int, RecordDict]] = []
        self.received: list[tuple[str, int, RecordDict]] = []
        self._ready: dict[str, Message] = {}
        for config in node_configs:
            self.join(config)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, SUPERLINK

    def join(self, node_config: dict[str, Any]) -> int:
        """Add a node and return its id."""
        node_id = FIRST_NODE + len(self.contexts)
        self.contexts[node_id] = Context(self._run.run_id, node_id, dict(node_config), RecordDict(), dict(self._run_config))
        return node_id

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node not in self.offline]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, status="online") for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        if not isinstance(messages, (list, tuple)):
            raise TypeError("HttpGrid iterates over the messages twice: pass a list, not a generator")
        ids = []
        for message in messages:
            key = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = key
            kind, node = message.metadata.message_type, message.metadata.dst_node_id
            self.sent.append((kind, node, message.content))
            ids.append(key)
            if node not in self.silent:
                self._ready[key] = self._answer(message, kind, node)
        return ids

    def _answer(self, message: Message, kind: str, node: int) -> Message:
        if node in self.offline or node not in self.contexts:
            metadata = deepcopy(message.metadata)
            changed = {"_reply_to_message_id": message.metadata.message_id, "_src_node_id": SUPERLINK, "_dst_node_id": SUPERLINK}
            metadata.__dict__.update(changed)
            return make_message(metadata=metadata, error=Error(5, "Node Unavailable"))
        context = deepcopy(self.contexts[node])
        sent = make_message(metadata=deepcopy(message.metadata), content=through_the_wire(message.content))
        try:
            reply = self.app(sent, context)
            content: RecordDict | None = through_the_wire(reply.content)
        except Exception as error:  # Flower turns whatever a ClientApp raises into an error reply
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        if self.tamper is not None:
            content = self.tamper(kind, node, content)
        if content is None:
            return Message(Error(2, "lost"), reply_to=message)
        self.contexts[node] = context
        self.received.append((kind, node, content))
        return make_message(metadata=reply.metadata, content=content)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = [key for key in message_ids if key in self._ready]
        if self.shuffle is not None:
            self.shuffle.shuffle(wanted)
            wanted = wanted[: max(1, len(wanted) // 2)]
        return [self._ready.pop(key) for key in wanted]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
