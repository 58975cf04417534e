"""Both halves together on the in-process Grid: rounds, privacy, state, order, resume."""

import json
import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from client_app.protocol import ORDER
from server_app.checkpoint import CheckpointError
from strategies.fleet import FleetError
from strategies.messages import decode, wire_bytes
from tests.fleet_fixture import config, grid, rows, run


def shared(out: Path, name="fedmrl"):
    return load_file(out / "shared" / f"{name}.safetensors")


def accuracies(out: Path, name="fedmrl"):
    kept = ("round", "node", "accuracy", "loss", "train_loss", "num_examples")
    return [{k: r.get(k) for k in kept} for r in rows(out, "node", name)]


def states(out: Path):
    return {p.parent.name + "/" + p.name: load_file(p) for p in sorted((out / "state").rglob("*.safetensors"))}


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("strategy", ["local", "fedavg", "fedmrl"])
def test_every_method_learns_the_easy_pictures(tmp_path, strategy):
    run(config(tmp_path, strategy=strategy, num_rounds=8, train__learning_rate=0.1), tmp_path / "out")
    rounds = rows(tmp_path / "out", "round")
    assert [r["round"] for r in rounds] == list(range(1, 9))
    assert rounds[-1]["personalized"]["accuracy_mean"] > 0.9
    assert rounds[-1]["personalized"]["nodes"] == 3
    assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "completed"
    assert not rows(tmp_path / "out", "failure")


def test_the_export_counts_in_the_totals_and_in_no_round(tmp_path):
    the_grid = run(config(tmp_path, strategy="fedavg", export="own", num_rounds=1), tmp_path / "out")
    sent, received = (
        sum(wire_bytes(content) for kind, _, content in messages if kind != "query.describe")
        for messages in (the_grid.sent, the_grid.received)
    )
    totals = json.loads((tmp_path / "out/summary.json").read_text())["totals"]
    assert (totals["bytes_down"], totals["bytes_up"]) == (sent, received)
    (exported,), (one,) = rows(tmp_path / "out", "export"), rows(tmp_path / "out", "round")
    asked = sum(wire_bytes(content) for kind, _, content in the_grid.sent if kind == "query.export")
    assert (exported["round"], exported["bytes_down"], one["bytes_down"]) == (1, asked, sent - asked)


def test_only_the_small_model_travels_and_no_private_name_is_in_any_message(tmp_path):
    the_grid = run(config(tmp_path), tmp_path / "out")
    small = set(shared(tmp_path / "out"))
    private = {name for state in states(tmp_path / "out").values() for name in state}
    assert {n.split(".")[0] for n in private} == {"private", "projector", "rounds"}
    carried = 0
    for kind, _, content in [*the_grid.sent, *the_grid.received]:
        names = set(decode(content)) if "arrays" in content else set()
        assert not names & private
        if kind == "train":
            assert names == small
            carried += 1
    assert carried == 2 * 2 * 3


def test_equal_payloads_are_one_record(tmp_path):
    the_grid = run(config(tmp_path), tmp_path / "out")
    sent = [c["arrays"] for kind, _, c in the_grid.sent if kind == "train"]
    assert len({id(record) for record in sent}) == 2


def test_private_state_changes_each_round_and_a_skipped_round_leaves_it_bit_identical(tmp_path):
    run(config(tmp_path, fleet__fraction=0.34, num_rounds=4), tmp_path / "out")
    trained: dict[str, list[int]] = {}
    for row in rows(tmp_path / "out", "node"):
        if "train_loss" in row:
            trained.setdefault(row["node"], []).append(row["round"])
    assert sum(map(len, trained.values())) == 4
    for node, when in trained.items():
        files = sorted((tmp_path / "out/state").rglob(f"{node}/round-*.safetensors"))
        assert int(files[-1].stem.split("-")[1]) == when[-1]
    run(config(tmp_path, num_rounds=2), tmp_path / "all")
    kept = states(tmp_path / "all")
    for node in ("partition-0", "partition-1", "partition-2"):
        first, second = kept[f"{node}/round-000001.safetensors"], kept[f"{node}/round-000002.safetensors"]
        assert all(not torch.equal(first[name], second[name]) for name in first if first[name].is_floating_point())


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_replies_does_not_change_a_bit(tmp_path, seed):
    run(config(tmp_path, fleet__models="mlp"), tmp_path / "straight", nodes=5)
    shuffled = grid(config(tmp_path, fleet__models="mlp"), 5)
    shuffled.shuffle = random.Random(seed)
    run(config(tmp_path, fleet__models="mlp"), tmp_path / "shuffled", shuffled)
    assert same(shared(tmp_path / "straight"), shared(tmp_path / "shuffled"))
    assert accuracies(tmp_path / "straight") == accuracies(tmp_path / "shuffled")


def test_another_seed_gives_other_bits(tmp_path):
    run(config(tmp_path), tmp_path / "one")
    run(config(tmp_path, seed=2), tmp_path / "two")
    assert not same(shared(tmp_path / "one"), shared(tmp_path / "two"))


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("after", [4, 7, 9, 12, 14])
def test_a_run_killed_after_any_message_and_resumed_ends_with_the_same_bits(tmp_path, after):
    options = {"fleet__fraction": 0.67, "num_rounds": 3, "alone": True}
    run(config(tmp_path, **options), tmp_path / "straight")
    cut = grid(config(tmp_path, **options))

    def kill(kind, node, content):
        if len(cut.received) >= after:
            raise Killed
        return content

    cut.tamper = kill
    with pytest.raises(Killed):
        run(config(tmp_path, **options), tmp_path / "cut", cut)
    run(config(tmp_path, **options, resume=str(tmp_path / "cut")), tmp_path / "cut")
    assert same(shared(tmp_path / "straight"), shared(tmp_path / "cut"))
    for name in ("local", "fedmrl"):
        assert accuracies(tmp_path / "straight", name) == accuracies(tmp_path / "cut", name)


def test_a_finished_run_goes_on_for_more_rounds_as_if_it_had_never_stopped(tmp_path):
    run(config(tmp_path, num_rounds=4), tmp_path / "straight")
    run(config(tmp_path, num_rounds=2), tmp_path / "parts")
    run(config(tmp_path, num_rounds=4, resume=str(tmp_path / "parts")), tmp_path / "parts")
    assert same(shared(tmp_path / "straight"), shared(tmp_path / "parts"))
    assert accuracies(tmp_path / "straight") == accuracies(tmp_path / "parts")


@pytest.mark.parametrize(("key", "value"), [("fleet__models", "mlp,cnn1"), ("fedmrl__shared_dim", 9), ("seed", 3), ("strategy", "fedavg")])
def test_resume_with_other_settings_is_refused_with_the_difference(tmp_path, key, value):
    run(config(tmp_path), tmp_path / "out")
    with pytest.raises(CheckpointError, match=rf"{key.replace('__', '.').replace('_', '-')}: .* then, .* now"):
        run(config(tmp_path, **{key: value}, resume=str(tmp_path / "out")), tmp_path / "out")


def test_a_node_does_not_depend_on_who_ran_before_in_the_same_process(tmp_path):
    run(config(tmp_path, strategy="local", fleet__fraction=0.34, num_rounds=1), tmp_path / "one")
    (alone,) = [r for r in accuracies(tmp_path / "one", "local") if r["train_loss"] is not None]
    run(config(tmp_path, strategy="local", num_rounds=1), tmp_path / "all")
    (beside,) = [r for r in accuracies(tmp_path / "all", "local") if r["node"] == alone["node"]]
    assert alone == beside


def test_evaluation_uses_the_nodes_own_fused_model_and_twice_gives_the_same(tmp_path):
    the_grid = run(config(tmp_path, num_rounds=1), tmp_path / "out")
    before = states(tmp_path / "out")
    message = next(c for kind, _, c in the_grid.sent if kind == "evaluate")
    assert dict(message[ORDER])["server_round"] == 1
    first = [dict(c["report"]) for kind, _, c in the_grid.received if kind == "evaluate"]
    the_grid.received.clear()
    again = [m for kind, n, m in the_grid.sent if kind == "evaluate"]
    from flwr.app import Message

    replies = the_grid.pull_messages(the_grid.push_messages([Message(m, 1000 + i, "evaluate") for i, m in enumerate(again)]))
    second = [dict(r.content["report"]) for r in replies]
    for a, b in zip(first, second, strict=True):
        assert (a["accuracy"], a["loss"]) == (b["accuracy"], b["loss"])
    assert all(same(before[k], v) for k, v in states(tmp_path / "out").items())


def test_a_node_that_joins_late_is_in_the_next_round(tmp_path):
    settings = config(tmp_path, num_rounds=3)
    the_grid = grid(settings, 2)
    the_grid.contexts[1000].node_config["num-partitions"] = the_grid.contexts[1001].node_config["num-partitions"] = 3

    def join_after_round_one(kind, node, content):
        if kind == "evaluate" and len(the_grid.contexts) == 2:
            the_grid.join({"partition-id": 2, "num-partitions": 3})
        return content

    the_grid.tamper = join_after_round_one
    run(settings | {"fleet.join-timeout": 0.3}, tmp_path / "out", the_grid)
    assert [r["sampled"] for r in rows(tmp_path / "out", "round")] == [2, 3, 3]


def test_a_node_that_leaves_does_not_end_the_run_and_is_named(tmp_path):
    settings = config(tmp_path, num_rounds=2)
    the_grid = grid(settings, 3)

    def leave(kind, node, content):
        if kind == "train" and node == 1002:
            the_grid.offline.add(1002)
            return None
        return content

    the_grid.tamper = leave
    run(settings, tmp_path / "out", the_grid)
    (gone,) = {(f["node"], f["round"], f["phase"]) for f in rows(tmp_path / "out", "failure") if f["phase"] == "train"}
    assert gone == ("partition-2", 1, "train")
    assert [r["sampled"] for r in rows(tmp_path / "out", "round")] == [3, 2]


def test_too_few_nodes_end_in_time_and_name_the_option(tmp_path):
    with pytest.raises(FleetError, match=r"3 usable nodes of 3 simulated, fleet.min-nodes = 4"):
        run(config(tmp_path, fleet__min_nodes=4), tmp_path / "out")


def test_a_fleet_in_which_nobody_can_work_fails_at_once_with_the_reason(tmp_path):
    with pytest.raises(FleetError, match=r"0 usable nodes of 3 simulated.*\n- .*mlpp"):
        run(config(tmp_path, fleet__models="nowhere:mlpp", fleet__join_timeout=60.0), tmp_path / "out")


def test_below_the_quorum_the_round_is_repeated_then_the_run_fails_and_the_checkpoint_stays(tmp_path):
    settings = config(tmp_path, num_rounds=3)
    the_grid = grid(settings, 3)
    the_grid.tamper = lambda kind, node, content: None if kind == "train" and node > 1000 and trained() > 3 else content

    def trained():
        return sum(kind == "train" for kind, _, _ in the_grid.sent)

    with pytest.raises(FleetError, match=r"round 2: 1 of 3 sampled nodes.*2 are needed.*last complete round is 1\n- partition-1"):
        run(settings, tmp_path / "out", the_grid)
    assert trained() == 9
    assert (tmp_path / "out/checkpoint/fedmrl/round-000001.safetensors").exists()
    assert not (tmp_path / "out/checkpoint/fedmrl/round-000002.safetensors").exists()


def test_nodes_that_never_answer_are_waited_for_no_longer_than_asked_and_get_no_second_message(tmp_path):
    settings = config(tmp_path, num_rounds=3, fleet__round_timeout=0.2, fleet__join_timeout=0.5)
    the_grid = grid(settings, 3)
    for index, context in enumerate(the_grid.contexts.values()):
        context.node_config["name"] = f"real-{index}"

    def go_silent(kind, node, content):
        if kind == "evaluate":
            the_grid.silent |= {1001, 1002}
        return content

    the_grid.tamper = go_silent
    with pytest.raises(FleetError, match=r"1 usable nodes after 0.5 s \(fleet.join-timeout\), fleet.min-nodes = 2"):
        run(settings, tmp_path / "out", the_grid)
    assert [node for kind, node, _ in the_grid.sent if kind == "train"] == [1000, 1001, 1002]


@pytest.mark.parametrize(("seconds", "sampled"), [(30.0, [3, 3, 3]), (0.0, [3, 3, 2])])
def test_a_round_is_held_for_a_real_node_that_was_lost_in_the_one_before(tmp_path, monkeypatch, seconds, sampled):
    monkeypatch.setattr("strategies.fleet._PAUSE", 0.05)
    settings = config(tmp_path, strategy="fedavg", alone=False, num_rounds=3, eval_every=0, fleet__return_timeout=seconds)
    the_grid = grid(settings, 3)
    for index, context in enumerate(the_grid.contexts.values()):
        context.node_config["name"] = f"real-{index}"

    def lose(kind, node, content):
        if kind == "train" and node == 1000 and sum(k == "train" for k, _, _ in the_grid.sent) == 4:
            the_grid.offline.add(1002)
            threading.Timer(0.5, the_grid.offline.clear).start()
        return content

    the_grid.tamper = lose
    run(settings, tmp_path / "out", the_grid)
    assert [row["sampled"] for row in rows(tmp_path / "out", "round")] == sampled
    (failure,) = rows(tmp_path / "out", "failure")
    assert (failure["round"], failure["node"]) == (2, "real-2")
