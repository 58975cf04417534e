"""What goes wrong between nodes: it costs the node at fault its part, by name, and ends neither round nor run."""

from __future__ import annotations

import re

import pytest
import torch
from flwr.app import RecordDict

from strategies.fleet import FleetError
from strategies.messages import decode, decode_parts, encode
from tests.fedmuscle.muscle_fixture import STEPS, muscle, states
from tests.fleet_fixture import grid, rows, run


def failures(out):
    return [(f["round"], f["node"], f["phase"]) for f in rows(out, "failure")]


def changed(content, change):
    return RecordDict({**dict(content), **encode(change(decode(content)))})


@pytest.mark.parametrize("way", ["step", "gradient"])
def test_a_node_lost_in_mid_exchange_ends_neither_round_nor_run_and_comes_back(tmp_path, way):
    settings = muscle(tmp_path, fedmuscle__exchange=way, num_rounds=2)
    the_grid = grid(settings, 4)
    lost = []

    def lose(kind, node, content):
        if kind == "train.exchange" and node == 1001 and len(lost) == 0:
            lost.append(node)
            return None
        return content

    the_grid.tamper = lose
    run(settings, tmp_path / "out", the_grid)
    assert failures(tmp_path / "out") == [(1, "partition-1", "exchange")]
    numbers = [r["method"]["peers"] for r in rows(tmp_path / "out", "round")]
    # step 0: three of four answer, each with 3 peers; then two steps of three nodes, each with 2
    assert numbers[0] == pytest.approx((3 * 3 + 2 * 3 * 2) / 9)
    assert numbers[1] == 3.0
    asked = [node for kind, node, _ in the_grid.sent if kind == "train.exchange"]
    assert (asked.count(1000), asked.count(1001)) == (2 * STEPS, 1 + STEPS)
    assert [r["replied"] for r in rows(tmp_path / "out", "round")] == [4, 4]


def test_with_one_exchange_a_round_a_lost_node_is_nobodys_peer_in_the_next_and_comes_back(tmp_path):
    settings = muscle(tmp_path, num_rounds=3)
    the_grid = grid(settings, 4)
    lost = []

    def lose(kind, node, content):
        if kind == "train" and node == 1001 and not lost:
            lost.append(node)
            return None
        return content

    the_grid.tamper = lose
    run(settings, tmp_path / "out", the_grid)
    assert failures(tmp_path / "out") == [(1, "partition-1", "train")]
    met = [len(decode_parts(c)) for kind, _, c in sorted(the_grid.sent[4:], key=lambda sent: sent[1]) if kind == "train"]
    assert [met[i : i + 3] for i in range(0, 12, 3)] == [[0, 2, 3], [0, 3, 3], [0, 2, 3], [0, 2, 3]]
    assert [r["replied"] for r in rows(tmp_path / "out", "round")] == [3, 4, 4]


def test_a_silent_node_is_waited_for_once(tmp_path):
    settings = muscle(tmp_path, fedmuscle__exchange="step", num_rounds=1, fleet__round_timeout=0.4)
    the_grid = grid(settings, 3)

    def silence(kind, node, content):
        if kind == "train.exchange":
            the_grid.silent.add(1002)
        return content

    the_grid.tamper = silence
    run(settings, tmp_path / "out", the_grid)
    assert [f for f in failures(tmp_path / "out") if f[2] == "exchange"] == [(1, "partition-2", "exchange")]
    assert [node for kind, node, _ in the_grid.sent if kind == "train.exchange"].count(1002) == 1


def test_alone_in_an_exchange_a_node_skips_it(tmp_path):
    settings = muscle(tmp_path, fedmuscle__exchange="step", num_rounds=1)
    the_grid = grid(settings, 2)
    the_grid.tamper = lambda kind, node, content: None if (kind, node) == ("train", 1001) else content
    run(settings, tmp_path / "out", the_grid)
    assert not [kind for kind, _, _ in the_grid.sent if kind == "train.exchange"]
    assert rows(tmp_path / "out", "round")[0]["method"] == {}


def poison(row, value):
    def change(tensors):
        tensors["rows"][0, row] = tensors["rows"][0, row] * value
        return tensors

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (poison(2, 30.0), r"'partition-1' sent 1 rows that are not of length 1; row 2 has length 30"),
        (poison(5, 0.0), r"'partition-1' sent 1 rows .* row 5 has length 0"),
        (poison(1, float("nan")), r"rows holds NaN"),
        (lambda t: {**t, "tag": t["tag"] - 1}, r"'partition-1' uploaded representations of \(round, step\) \(0, -1\), now is \(1, 0\)"),
        (lambda t: {**t, "digest": t["digest"] ^ 1}, r"'partition-1' uploaded representations of other public items"),
        (lambda t: {**t, "rows": t["rows"][:, :-1].clone()}, r"rows is \(3, 7, 16\).*expected \(3, 8, 16\)"),
        (lambda t: {n: v for n, v in t.items() if n != "tag"}, r"missing \['tag'\]"),
    ],
)
def test_a_bad_upload_is_refused_by_name_and_reaches_nobody(tmp_path, change, words):
    settings = muscle(tmp_path, num_rounds=2)
    the_grid = grid(settings, 3)
    bad = []

    def tamper(kind, node, content):
        if kind == "train" and node == 1001 and not bad:
            bad.append(changed(content, change))
            return bad[0]
        return content

    the_grid.tamper = tamper
    run(settings, tmp_path / "out", the_grid)
    (failure,) = rows(tmp_path / "out", "failure")
    assert (failure["round"], failure["node"]) == (1, "partition-1")
    assert re.search(words, failure["reason"]), failure["reason"]
    second = {node: len(decode_parts(c)) for kind, node, c in the_grid.sent[6:] if kind == "train"}
    assert second == {1000: 1, 1001: 2, 1002: 1}


def test_an_upload_of_another_step_is_dropped_in_mid_exchange(tmp_path):
    settings = muscle(tmp_path, num_rounds=1, fedmuscle__exchange="step")
    the_grid = grid(settings, 3)
    old = {}

    def late(kind, node, content):
        if node == 1000 and kind == "train":
            old["tensors"] = decode(content)
        if node == 1000 and kind == "train.exchange":
            return changed(content, lambda _: old["tensors"])
        return content

    the_grid.tamper = late
    run(settings, tmp_path / "out", the_grid)
    (failure,) = rows(tmp_path / "out", "failure")
    assert failure["phase"] == "exchange"
    assert "'partition-0' uploaded representations of (round, step) (1, 0), now is (1, 1)" in failure["reason"]


def test_a_node_with_another_public_set_is_excluded_by_name(tmp_path):
    settings = muscle(tmp_path, num_rounds=2)
    the_grid = grid(settings, 4)

    def other(kind, node, content):
        if kind == "query.describe" and node == 1000:
            content["report"]["public_manifest"] = "f" * 64
        return content

    the_grid.tamper = other
    run(settings, tmp_path / "out", the_grid)
    (failure,) = rows(tmp_path / "out", "failure")
    assert failure["node"] == "partition-0"
    assert "is not the one of the run" in failure["reason"]
    assert "fedmuscle.public-source" in failure["reason"]
    assert {node for kind, node, _ in the_grid.sent if kind != "query.describe"} == {1001, 1002, 1003}


def test_too_few_nodes_with_one_public_set_end_the_run_with_the_reason(tmp_path):
    settings = muscle(tmp_path, num_rounds=2)
    the_grid = grid(settings, 2)

    def own(kind, node, content):
        if kind == "query.describe":
            content["report"]["public_manifest"] = str(node) * 16
        return content

    the_grid.tamper = own
    with pytest.raises(FleetError, match=r"1 usable nodes of 2 simulated, fleet.min-nodes = 2 are needed\n- its public set .*10011001"):
        run(settings, tmp_path / "out", the_grid)


def test_a_node_without_the_public_set_is_excluded_by_name(tmp_path, monkeypatch):
    import strategies.fedmuscle.trainer as half
    from tasks import DataError

    real = half.load_public
    asked = []

    def lacking(*arguments, **named):
        asked.append(1)
        if len(asked) == 1:
            raise DataError("/srv/public does not exist")
        return real(*arguments, **named)

    monkeypatch.setattr(half, "load_public", lacking)
    run(muscle(tmp_path, num_rounds=1), tmp_path / "out", nodes=3)
    (failure,) = rows(tmp_path / "out", "failure")
    assert (failure["node"], failure["phase"], failure["reason"]) == ("partition-0", "describe", "/srv/public does not exist")
    assert rows(tmp_path / "out", "round")[0]["replied"] == 2


def test_a_public_set_smaller_than_a_batch_is_named_before_round_one(tmp_path):
    with pytest.raises(FleetError, match=r"partition-0: the public set .* has 40 items, fedmuscle.public-batch = 41"):
        run(muscle(tmp_path, fedmuscle__public_batch=41), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["payload"].__setitem__("digest", "0" * 64), "public items of round 1, step 0 are not those of the server"),
        (lambda c: c["payload"].__setitem__("step", 1), "public items of round 1, step 1 are not those"),
        (lambda c: c.update(encode({"gradient": torch.full((8, 16), 1e6)})), r"gradient with a row of length 4e\+06"),
        (lambda c: c.update(encode({"gradient": torch.full((8, 16), float("nan"))})), "row of length nan"),
        (lambda c: c.update(encode({})), r"no gradient, expected \(8, 16\)"),
    ],
)
def test_a_node_refuses_what_cannot_come_from_its_peers_and_keeps_its_state(tmp_path, change, words):
    settings = muscle(tmp_path, num_rounds=1, fedmuscle__exchange="gradient", fedmuscle__steps=1)
    the_grid = grid(settings, 2)
    push = the_grid.push_messages

    def tampering(messages):
        for message in messages:
            if message.metadata.message_type == "train.exchange" and message.metadata.dst_node_id == 1000:
                change(message.content)
        return push(messages)

    the_grid.push_messages = tampering
    run(settings, tmp_path / "out", the_grid)
    (failure,) = rows(tmp_path / "out", "failure")
    assert (failure["node"], failure["phase"]) == ("partition-0", "exchange")
    assert re.search(words, failure["reason"]), failure["reason"]
    found = states(tmp_path / "out")
    assert float(found["partition-0/round-000001"]["adam.step"]) == 0
    assert float(found["partition-1/round-000001"]["adam.step"]) == 1
