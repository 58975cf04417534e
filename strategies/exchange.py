"""One exchange with many nodes over Flower's Grid: push, poll often, hand over each reply as it arrives.

Flower 1.42: `send_and_receive` polls every 3 s in deployment; errors made by the SuperLink carry its own
node id, so replies are matched by the id of the message they answer; a message that timed out stays valid
and its node stays busy. A SuperNode that is started again has lost the message it worked on, and the SuperLink says
so only if somebody asks in the moment between its last missed heartbeat and its return. In simulation a thread of the
server's process looks through all open messages for each node, ten times a second: 1,000 messages to 1,000 nodes are
a million looks, so few are open at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from flwr.app import Message
from flwr.serverapp import Grid

_CHUNK, _PULL = 8, 64e6  # replies and about bytes pulled at once: what bounds the server's memory
_POLL_FIRST, _POLL_LAST = 0.01, 0.5  # seconds
_LOOK = 5.0  # seconds between looks at who was started again
_RESTARTED = "the node was started again meanwhile and has lost its order"


@dataclass
class Exchange:
    """Messages on their way, across exchanges: a node with an unanswered message must not get a second one."""

    grid: Grid
    busy: dict[str, str] = field(default_factory=dict)  # message id -> node name
    window: int = 0  # messages open at once; 0: as fits the Grid

    def __post_init__(self) -> None:
        self.window = self.window or _window(self.grid)

    def busy_nodes(self) -> set[str]:
        """Return the names of nodes that still work on a message of an earlier exchange, after reading what came late."""
        for chunk in _chunks(list(self.busy), _CHUNK):
            for reply in self.grid.pull_messages(chunk):
                self.busy.pop(reply.metadata.reply_to_message_id, None)
        return set(self.busy.values())

    def send(self, messages: dict[str, Message], timeout: float, reply_bytes: int = 0) -> Iterator[tuple[str, Message | str]]:
        """Send one message a node; yield (node name, reply or the reason why there is none), each name once.

        Ends after `timeout` seconds at the latest, counted from the call. A reply is yielded as it arrives; the larger replies
        are (`reply_bytes`, about), the fewer are fetched at once. Each message is taken out of `messages` as it is sent.
        """
        at_once = max(1, min(_CHUNK, int(_PULL / max(1, reply_bytes))))
        end = time.monotonic() + timeout
        waiting: dict[str, str] = {}
        pause, begun, look = _POLL_FIRST, self._activations() if messages else {}, time.monotonic() + _LOOK
        ids = {node: message.metadata.dst_node_id for node, message in messages.items()} if begun else {}
        while messages or waiting:
            yield from ((node, "refused by the SuperLink: the node is unknown or has left") for node in self._fill(messages, waiting))
            arrived = False
            for chunk in _chunks(list(waiting), at_once):
                for reply in self.grid.pull_messages(chunk):
                    node = waiting.pop(reply.metadata.reply_to_message_id, None)
                    if node is not None:
                        arrived = True
                        yield node, _reason(reply) if reply.has_error() else reply
            if time.monotonic() >= end:
                break
            if begun and time.monotonic() >= look:
                look = time.monotonic() + _LOOK
                yield from ((node, _RESTARTED) for node in self._restarted(ids, waiting, begun))
            pause = _POLL_FIRST if arrived else min(pause * 1.3, _POLL_LAST)
            if waiting:
                time.sleep(min(pause, max(0.0, end - time.monotonic())))
        self.busy |= waiting
        yield from ((node, f"no reply within {timeout:g} s (fleet.round-timeout)") for node in [*waiting.values(), *messages])

    def _activations(self) -> dict[int, str]:
        """Return when each node was last activated; nothing where no SuperNodes are that could be started again."""
        if type(self.grid).__name__ != "HttpGrid":
            return {}
        return {info.node_id: info.last_activated_at for info in self.grid.get_nodes() if info.last_activated_at}

    def _restarted(self, ids: dict[str, int], waiting: dict[str, str], begun: dict[int, str]) -> list[str]:
        """Take the nodes out of `waiting` that were activated anew since `begun`, and return their names."""
        now = self._activations()
        lost = {node for node in waiting.values() if now.get(ids[node], begun.get(ids[node])) != begun.get(ids[node])}
        for key in [key for key, node in waiting.items() if node in lost]:
            del waiting[key]
        return sorted(lost)

    def _fill(self, unsent: dict[str, Message], waiting: dict[str, str]) -> list[str]:
        """Push as many of `unsent` as the window has room for, move them to `waiting`, and return the nodes that were refused."""
        pushed = {node: unsent.pop(node) for node in list(islice(unsent, max(0, self.window - len(waiting))))}
        accepted = self._push(pushed)
        waiting.update(accepted)
        return [node for node in pushed if node not in accepted.values()]

    def _push(self, messages: dict[str, Message]) -> dict[str, str]:
        listed = list(messages.values())  # never a generator: HttpGrid iterates twice
        if not listed:
            return {}
        ids = list(self.grid.push_messages(listed))
        if len(ids) == len(listed):  # HttpGrid puts "" or None for a refused message; the order is kept
            return {str(i): node for i, node in zip(ids, messages, strict=True) if i}
        accepted = set(ids)  # InMemoryGrid leaves a refused message out
        return {m.metadata.message_id: node for node, m in messages.items() if m.metadata.message_id in accepted}


def _window(grid: Grid) -> int:
    """Return how many messages may be open at once: in simulation enough for every worker, elsewhere all."""
    return max(16, 4 * (os.cpu_count() or 1)) if type(grid).__name__ == "InMemoryGrid" else sys.maxsize


def _chunks(ids: list[str], size: int) -> Iterator[list[str]]:
    return (ids[i : i + size] for i in range(0, len(ids), size))


_CODES = {
    0: "the node's process died",
    1: "the node could not load the app",
    5: "the node is unavailable",
    8: "the node's process stopped responding",
}


def is_away(reason: str) -> bool:
    """Return whether `reason`, of a node without a reply, says that its SuperNode went away or was started again."""
    return reason == _RESTARTED or reason.startswith(_CODES[5])


def _reason(reply: Message) -> str:
    """Return Flower's error as one line: its meaning, then the last line of the node's own text."""
    lines = [line.strip() for line in str(reply.error.reason or "").strip().splitlines() if line.strip()]
    meaning = _CODES.get(reply.error.code, f"Flower error {reply.error.code}")
    return f"{meaning}: {lines[-1][:400]}" if lines else meaning
