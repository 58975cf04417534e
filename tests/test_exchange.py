"""One exchange with many nodes: how many messages are open at once, refusals, errors and time-outs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.exchange import Exchange


class Counter:
    """A Grid that answers each message at its second pull, and counts those that are open."""

    def __init__(self, silent: Iterable[str] = (), unknown: Iterable[str] = ()) -> None:
        self.silent, self.unknown, self.ids = set(silent), set(unknown), itertools.count()
        self.open: dict[str, str] = {}
        self.pulled: set[str] = set()
        self.most, self.largest_pull, self.order = 0, 0, []

    def push_messages(self, messages: list[str]) -> list[str]:
        taken = []
        for node in messages:
            self.order.append(node)
            taken.append("" if node in self.unknown else f"m{next(self.ids)}")
            if taken[-1]:
                self.open[taken[-1]] = node
        self.most = max(self.most, len(self.open))
        return taken

    def pull_messages(self, ids: list[str]) -> list[Any]:
        ready = [i for i in ids if i in self.open and i in self.pulled and self.open[i] not in self.silent]
        self.pulled |= set(ids)
        self.largest_pull = max(self.largest_pull, len(ids))
        return [_reply(i, self.open.pop(i)) for i in ready]


class InMemoryGrid(Counter):
    """Named as the Grid of Flower's simulation, by which the exchange knows it."""


class HttpGrid(Counter):
    """Named as the Grid of a deployment, which also knows when nodes were started; `restart` of them after the first push."""

    def __init__(self, restart: Iterable[int], **faults: Any) -> None:
        super().__init__(**faults)
        self.restart = set(restart)

    def push_messages(self, messages: list[Any]) -> list[str]:
        return super().push_messages([message.name for message in messages])

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=i, last_activated_at="later" if self.order and i in self.restart else "once") for i in range(3)]


def _reply(message_id: str, node: str) -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=message_id), has_error=lambda: False, content=node)


def _messages(count: int) -> dict[str, Any]:
    return {f"node-{i}": f"node-{i}" for i in range(count)}  # a message is never looked into


@pytest.mark.parametrize("window", [1, 3, 50])
def test_no_more_messages_are_open_than_the_window_allows_and_all_are_answered_in_the_order_given(window: int) -> None:
    grid = Counter()
    replies = dict(Exchange(grid, window=window).send(_messages(20), 10.0))
    assert {node: reply.content for node, reply in replies.items()} == _messages(20)
    assert grid.most == min(window, 20)
    assert grid.order == list(_messages(20))


def test_in_simulation_the_window_is_narrow_and_in_deployment_there_is_none() -> None:
    simulated, deployed = InMemoryGrid(), Counter()
    for grid in (simulated, deployed):
        assert len(list(Exchange(grid).send(_messages(500), 30.0))) == 500
    assert simulated.most == max(16, 4 * (os.cpu_count() or 1))
    assert deployed.most == 500


def test_a_silent_node_holds_its_place_and_at_the_end_all_without_a_reply_are_named_once() -> None:
    grid = Counter(silent=["node-0", "node-1"])
    exchange = Exchange(grid, window=2)
    replies = list(exchange.send(_messages(4), 0.1))
    assert sorted(replies) == [(f"node-{i}", "no reply within 0.1 s (fleet.round-timeout)") for i in range(4)]
    assert exchange.busy_nodes() == {"node-0", "node-1"}  # the others never got their message
    assert grid.order == ["node-0", "node-1"]


def test_a_refused_node_is_named_and_the_next_takes_its_place() -> None:
    replies = dict(Exchange(Counter(unknown=["node-0", "node-2"]), window=1).send(_messages(4), 5.0))
    refused = {node: reply for node, reply in replies.items() if isinstance(reply, str)}
    assert refused == dict.fromkeys(("node-0", "node-2"), "refused by the SuperLink: the node is unknown or has left")
    assert {replies["node-1"].content, replies["node-3"].content} == {"node-1", "node-3"}


def test_a_node_that_was_started_again_is_not_waited_for_and_is_free_for_the_next_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.exchange._LOOK", 0.02)
    exchange = Exchange(HttpGrid(restart=[0, 1], silent=["node-1", "node-2"]))  # node-0 answers at once all the same
    messages = {f"node-{i}": SimpleNamespace(name=f"node-{i}", metadata=SimpleNamespace(dst_node_id=i)) for i in range(3)}
    replies = dict(exchange.send(messages, 0.3))
    assert replies["node-0"].content == "node-0"
    assert replies["node-1"] == "the node was started again meanwhile and has lost its order"
    assert replies["node-2"] == "no reply within 0.3 s (fleet.round-timeout)"
    assert exchange.busy_nodes() == {"node-2"}


@pytest.mark.parametrize(("reply_bytes", "at_once"), [(0, 8), (10**6, 8), (20 * 10**6, 3), (45 * 10**6, 1), (10**9, 1)])
def test_large_replies_are_fetched_few_at_a_time(reply_bytes: int, at_once: int) -> None:
    grid = Counter()
    replies = dict(Exchange(grid, window=50).send(_messages(20), 10.0, reply_bytes))
    assert replies.keys() == _messages(20).keys()
    assert grid.largest_pull == at_once


def test_nothing_to_send_is_over_at_once() -> None:
    assert list(Exchange(Counter()).send({}, 5.0)) == []


def test_a_message_is_taken_out_as_it_is_sent_and_one_that_waits_for_its_turn_is_kept() -> None:
    messages = _messages(4)
    for _ in Exchange(Counter(silent=["node-1"]), window=2).send(messages, 0.2):
        break
    assert list(messages) == ["node-2", "node-3"]
