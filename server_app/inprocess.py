"""A whole federation in this process: the real ServerApp and ClientApp on a Grid that hands messages over by a call.

No Ray and no SuperLink, so it starts at once and keeps to one core; seeds depend on names and rounds only, so the
bits are those of a simulation. Nodes work one after the other, each when its reply is pulled: of the replies only
those of one pull are held. The names below are not public in Flower; this file and `server_app.control` are the only
places that use such names, and the requirements hold Flower at 1.42.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

try:
    from flwr.app.message import make_message
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise ImportError(
        f"flwr {version('flwr')} lacks a name that runs inside one process need ({error}); type: pip install 'flwr>=1.42,<1.43'"
    ) from error

SUPERLINK = 1
FIRST_NODE = 1000
_FAILED, _UNAVAILABLE = 2, 5  # Flower's error codes


def through_the_wire(content: RecordDict) -> RecordDict:
    """Return `content` serialised and read back as Flower does it."""
    objects = {key: value.deflate() for key, value in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, objects)  # type: ignore[return-value]


class InProcessGrid(Grid):
    """One ClientApp run for nodes with the given node_configs; node i has id 1000 + i.

    Args:
        app: the node half.
        node_configs: one a node.
        run_config: flat, the same for all.
        run_id: any number; Flower's identity of this process is set to it.
        wire: pass all contents through Flower's serialisation, to show that they survive it. Arrays are bytes in a
            record either way, so that neither numbers nor counted bytes depend on it.
    """

    def __init__(
        self,
        app: ClientApp,
        node_configs: Iterable[Mapping[str, Any]],
        run_config: Mapping[str, Any],
        run_id: int = 1,
        *,
        wire: bool = False,
    ) -> None:
        self.app, self.wire, self._run, self._run_config = app, wire, Run.create_empty(run_id), dict(run_config)
        self.contexts: dict[int, Context] = {}
        self._waiting: dict[str, Message] = {}
        self._pushed = 0
        for config in node_configs:
            self.join(config)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, SUPERLINK

    def join(self, node_config: Mapping[str, Any]) -> int:
        """Add a node and return its id."""
        node_id = FIRST_NODE + len(self.contexts)
        self.contexts[node_id] = Context(self._run.run_id, node_id, dict(node_config), RecordDict(), dict(self._run_config))
        return node_id

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, status="online") for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        if not isinstance(messages, (list, tuple)):
            raise TypeError("HttpGrid iterates over the messages twice: pass a list, not a generator")
        ids = []
        for message in messages:
            self._pushed += 1
            ids.append(f"message-{self._pushed}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.accept(ids[-1], message)
        return ids

    def accept(self, key: str, message: Message) -> None:
        """Take a pushed message; it is worked on when its reply is pulled."""
        self._waiting[key] = message

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answer(self._waiting.pop(key)) for key in message_ids if key in self._waiting]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def answer(self, message: Message) -> Message:
        """Return the node's reply, or the error reply that Flower would make of an absent node or an exception."""
        node = message.metadata.dst_node_id
        if node not in self.get_node_ids():
            return self._unavailable(message)
        context = deepcopy(self.contexts[node])  # a node that fails leaves its context as it was
        content = through_the_wire(message.content) if self.wire else message.content
        try:
            reply = self.app(make_message(metadata=deepcopy(message.metadata), content=content), context)
            left = through_the_wire(reply.content) if self.wire else reply.content
        except Exception as error:  # Flower turns whatever a ClientApp raises into an error reply
            return Message(Error(_FAILED, f"{type(error)}:<'{error}'>"), reply_to=message)
        came = self.deliver(message, left)
        if came is None:
            return Message(Error(_FAILED, "lost"), reply_to=message)
        self.contexts[node] = context
        return make_message(metadata=reply.metadata, content=came)

    def deliver(self, message: Message, content: RecordDict) -> RecordDict | None:
        """Return what arrives of the reply `content` to `message`; None for a reply that is lost."""
        return content

    def _unavailable(self, message: Message) -> Message:
        metadata = deepcopy(message.metadata)
        changed = {"_reply_to_message_id": message.metadata.message_id, "_src_node_id": SUPERLINK, "_dst_node_id": SUPERLINK}
        metadata.__dict__.update(changed)
        return make_message(metadata=metadata, error=Error(_UNAVAILABLE, "Node Unavailable"))


def simulated(run_config: Mapping[str, Any], nodes: int) -> InProcessGrid:
    """Return a Grid of `nodes` simulated nodes, told exactly what Flower tells them."""
    import heterofleet_app

    configs = [{"partition-id": index, "num-partitions": nodes} for index in range(nodes)]
    return InProcessGrid(heterofleet_app.client, configs, run_config)


def run(run_config: Mapping[str, Any], nodes: int, out_dir: Path) -> InProcessGrid:
    """Run the whole federation into `out_dir`, as `heterofleet simulate` would, and return the Grid with its nodes.

    Raises:
        SettingsError, CheckpointError, FleetError: as `server_app.app.main`; `status.json` says so too.
    """
    from server_app.app import main

    config = {**run_config, "resume" if run_config.get("resume") else "out-dir": str(out_dir)}
    grid = simulated(config, nodes)
    main(grid, Context(grid.run.run_id, SUPERLINK, {}, RecordDict(), config))
    return grid
