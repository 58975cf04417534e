"""Conditions that broke other systems: each works, or is one error that names the node, the key and the cure."""

import re

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import load_file, save_file

from client_app.training import batch_indices
from server_app.settings import SettingsError
from strategies.fleet import FleetError
from strategies.messages import decode
from tests.edge_fixture import BN, failures, shared, tampering, with_tensors
from tests.fleet_fixture import config, grid, pictures, rows, run

# Sizes of batches and splits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size", "lengths"), [(33, 32, [33]), (65, 32, [32, 33]), (64, 32, [32, 32]), (1, 32, [1]), (20, 64, [20])]
)
def test_no_batch_of_one_sample_unless_there_is_only_one(count, size, lengths):
    batches = batch_indices(count, size, torch.Generator().manual_seed(0))
    assert [len(b) for b in batches] == lengths
    assert torch.equal(torch.cat(batches).sort().values, torch.arange(count))


@pytest.mark.parametrize(("samples", "batch"), [(33, 32), (20, 64), (1, 32), (2, 1)])
def test_batch_norm_trains_on_any_number_of_samples_and_the_weights_move(tmp_path, samples, batch):
    pictures(tmp_path / "pictures", count=2 * samples)
    settings = config(
        tmp_path,
        num_rounds=1,
        fedmrl__small_model=BN,
        fleet__models=BN,
        data__test_fraction=0.0,
        train__batch_size=batch,
        fleet__fraction=1.0,
    )
    the_grid = run(settings, tmp_path / "out", nodes=2)
    assert not failures(tmp_path / "out")
    sent = decode(next(c for kind, _, c in the_grid.sent if kind == "train"))
    after = shared(tmp_path / "out")
    moved = [name for name in after if after[name].is_floating_point() and not torch.equal(after[name], sent[name])]
    assert "extractor.0.weight" in moved


def test_one_empty_node_has_no_weight_and_is_named(tmp_path):
    settings = config(tmp_path, num_rounds=1)

    def empty(content):
        content["report"]["num_examples"] = 0
        return content

    run(settings, tmp_path / "out", tampering(settings, empty))
    assert "0 training samples" in failures(tmp_path / "out")["partition-1", "train"]
    assert rows(tmp_path / "out", "round")[0]["replied"] == 2


def test_when_every_node_is_empty_the_run_stops_and_names_them(tmp_path):
    settings = config(tmp_path, num_rounds=1)
    the_grid = grid(settings)

    def empty(kind, node, content):
        if kind == "train":
            content["report"]["num_examples"] = 0
        return content

    the_grid.tamper = empty
    with pytest.raises(FleetError, match=r"0 of 3 sampled.*\n- partition-0: .*0 training samples.*\n- partition-1.*\n- partition-2"):
        run(settings, tmp_path / "out", the_grid)
    assert not (tmp_path / "out/shared").exists()


def test_a_class_that_no_node_has_does_no_harm(tmp_path):
    settings = config(tmp_path, num_rounds=2, data__num_classes=7)
    run(settings, tmp_path / "out")
    assert shared(tmp_path / "out")["head.weight"].shape[0] == 7
    assert all(0 < r["train_loss"] < 100 for r in rows(tmp_path / "out", "node"))


# What a node may send back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {**t, "head.bias": t["head.bias"][:1].clone()}, r"head.bias is \(1,\).*expected \(3,\)"),
        (lambda t: {**t, "head.bias": t["head.bias"].expand(2, -1).clone()}, r"head.bias is \(2, 3\)"),
        (lambda t: {k: v for k, v in t.items() if k != "head.bias"}, r"missing \['head.bias'\]"),
        (lambda t: {**t, "private.w": torch.ones(2)}, r"unexpected \['private.w'\]"),
        (lambda t: {**t, "head.bias": t["head.bias"] * float("nan")}, "NaN or infinity"),
        (lambda t: {**t, "head.bias": t["head.bias"] + 1e30}, "diverged"),
        (lambda t: {**t, "head.bias": t["head.bias"].double()}, "float64"),
    ],
)
def test_a_bad_update_is_refused_by_name_and_the_others_are_averaged(tmp_path, change, words):
    settings = config(tmp_path, num_rounds=2)
    run(settings, tmp_path / "bad", tampering(settings, lambda content: with_tensors(content, change)))
    reason = failures(tmp_path / "bad")["partition-1", "train"]
    assert re.search(words, reason), reason
    run(settings, tmp_path / "lost", tampering(settings, lambda content: None))
    bad, lost = shared(tmp_path / "bad"), shared(tmp_path / "lost")
    assert all(torch.equal(bad[name], lost[name]) for name in lost)


def test_a_bad_update_in_the_second_round_only(tmp_path):
    settings = config(tmp_path, num_rounds=3)
    count = {"n": 0}

    def second(content):
        count["n"] += 1
        return (
            with_tensors(content, lambda t: {k: v / 0 if v.is_floating_point() else v for k, v in t.items()})
            if count["n"] == 2
            else content
        )

    run(settings, tmp_path / "out", tampering(settings, second))
    assert [f["round"] for f in rows(tmp_path / "out", "failure")] == [2]
    assert all(bool(torch.isfinite(t).all()) for t in shared(tmp_path / "out").values())


def test_extra_and_missing_metrics_hurt_nobody(tmp_path):
    settings = config(tmp_path, num_rounds=1)

    def odd(content):
        content["report"]["novel"] = 5.0
        del content["report"]["train_loss"]
        return content

    run(settings, tmp_path / "out", tampering(settings, odd))
    by_node = {r["node"]: r for r in rows(tmp_path / "out", "node")}
    assert by_node["partition-1"]["novel"] == 5.0
    assert "train_loss" not in by_node["partition-1"]
    assert by_node["partition-0"]["train_loss"] > 0
    assert not failures(tmp_path / "out")


def test_training_that_diverges_is_named_and_keeps_the_private_state_of_the_round_before(tmp_path):
    run(config(tmp_path, num_rounds=1), tmp_path / "out")
    settings = {**config(tmp_path, num_rounds=2), "resume": str(tmp_path / "out")}
    the_grid = grid({**settings, "train.learning-rate": 1e30})
    before = {p: load_file(p) for p in (tmp_path / "out/state").rglob("*.safetensors")}
    with pytest.raises(FleetError, match=r"train\.learning-rate"):
        run(settings, tmp_path / "out", the_grid)
    assert set((tmp_path / "out/state").rglob("*.safetensors")) == set(before)
    for path, state in before.items():
        assert all(torch.equal(state[name], load_file(path)[name]) for name in state)


def test_all_nodes_raise_and_no_model_is_saved(tmp_path):
    settings = config(tmp_path, num_rounds=1)
    the_grid = grid(settings)
    the_grid.tamper = lambda kind, node, content: None if kind == "train" else content
    with pytest.raises(FleetError, match="0 of 3 sampled nodes"):
        run(settings, tmp_path / "out", the_grid)
    assert not (tmp_path / "out/shared").exists()
    assert not (tmp_path / "out/checkpoint").exists()


def test_a_node_with_other_code_is_refused_and_both_folders_are_named(tmp_path):
    settings = config(tmp_path, num_rounds=1)

    def other(content):
        content["report"]["fingerprint"], content["report"]["app_dir"] = "0" * 64, "/elsewhere/heterofleet"
        return content

    run(settings, tmp_path / "out", tampering(settings, other))
    reason = failures(tmp_path / "out")["partition-1", "train"]
    assert "/elsewhere/heterofleet" in reason
    assert "here /" in reason


def test_a_server_with_other_code_is_refused_by_the_node(tmp_path):
    settings = config(tmp_path)
    the_grid = grid(settings, 2)
    from client_app.protocol import Order
    from strategies.fleet import ask

    order = Order("fedmrl", "e", "l", 0, 0, "f" * 64, "/elsewhere/heterofleet")
    message = ask(1000, "query.describe", RecordDict({"order": order.record()}), group="0", timeout=5)
    (reply,) = the_grid.pull_messages(the_grid.push_messages([message]))
    assert "/elsewhere/heterofleet" in dict(reply.content["failure"])["reason"]
    (reply,) = the_grid.pull_messages(
        the_grid.push_messages([ask(1000, "train", RecordDict({"x": ConfigRecord({})}), group="0", timeout=5)])
    )
    assert "another version" in dict(reply.content["failure"])["reason"]


# BatchNorm, dtypes, transport ------------------------------------------------------------------------------------


def test_batch_norm_of_the_small_model_is_averaged_and_counters_keep_the_largest(tmp_path):
    settings = config(tmp_path, num_rounds=3, fedmrl__small_model=BN, data__partitioner="pathological", data__classes_per_node=1)
    the_grid = run(settings, tmp_path / "out")
    last = [decode(c) for kind, _, c in the_grid.received if kind == "train"][-3:]
    counts = [r["num_examples"] for r in sorted(rows(tmp_path / "out", "node"), key=lambda r: (r["round"], r["node"]))][-3:]
    after = shared(tmp_path / "out")
    mean = sum(n * u["extractor.1.running_mean"].double() for n, u in zip(counts, last, strict=True)) / sum(counts)
    torch.testing.assert_close(after["extractor.1.running_mean"].double(), mean, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(last[0]["extractor.1.running_mean"], after["extractor.1.running_mean"])
    assert after["extractor.1.num_batches_tracked"].dtype == torch.int64
    assert int(after["extractor.1.num_batches_tracked"]) == max(int(u["extractor.1.num_batches_tracked"]) for u in last) > 3
    assert after["extractor.mask"].tolist() == [True, False]
    assert int(after["extractor.calls"]) == 3


def test_private_batch_norm_stays_on_the_node(tmp_path):
    the_grid = run(config(tmp_path, fleet__models=BN), tmp_path / "out")
    means = [load_file(p)["private.extractor.1.running_mean"] for p in sorted((tmp_path / "out/state").rglob("round-000002.safetensors"))]
    assert len(means) == 3
    assert not torch.equal(means[0], means[1])
    assert not any("running_mean" in name for kind, _, c in the_grid.received if kind == "train" for name in decode(c))


def test_evaluation_leaves_running_statistics_alone(tmp_path):
    run(config(tmp_path, fleet__models=BN, num_rounds=1, eval_every=1), tmp_path / "often")
    run(config(tmp_path, fleet__models=BN, num_rounds=1, eval_local=True), tmp_path / "twice")
    often = {p.parent.name: load_file(p) for p in (tmp_path / "often/state").rglob("*.safetensors")}
    twice = {p.parent.name: load_file(p) for p in (tmp_path / "twice/state").rglob("*.safetensors")}
    assert all(torch.equal(often[n][k], twice[n][k]) for n in often for k in often[n])


def test_a_bfloat16_small_model_works_and_stays_bfloat16(tmp_path):
    settings = config(tmp_path, fedmrl__small_model="tests.user_models:brain_float_net", train__learning_rate=0.1)
    run(settings, tmp_path / "out")
    assert {t.dtype for t in shared(tmp_path / "out").values()} == {torch.bfloat16}
    assert not failures(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrow_transport_halves_the_bytes_and_learns_the_same(tmp_path, dtype):
    for name in ("float32", dtype):
        run(config(tmp_path, transport__dtype=name, num_rounds=5, train__learning_rate=0.1), tmp_path / name)
    wide, narrow = (rows(tmp_path / name, "round")[-1] for name in ("float32", dtype))
    assert narrow["bytes_up"] < 0.7 * wide["bytes_up"]
    assert shared(tmp_path / dtype)["head.weight"].dtype == torch.float32
    assert abs(narrow["personalized"]["accuracy_mean"] - wide["personalized"]["accuracy_mean"]) < 0.15


# Evaluation and state --------------------------------------------------------------------------------------------


def test_evaluation_is_of_the_nodes_own_model_even_when_it_disagrees_with_the_shared_one(tmp_path):
    method = {"train__learning_rate": 0.1, "fedmrl__predict": "fine"}  # the private head decides alone
    run(config(tmp_path, num_rounds=6, **method), tmp_path / "out")
    before = {r["node"]: r["accuracy"] for r in rows(tmp_path / "out", "node") if r["round"] == 6}
    path = next((tmp_path / "out/state").rglob("partition-1/round-000006.safetensors"))
    state = load_file(path)
    state["private.head.weight"] = state["private.head.weight"].roll(1, 0)
    state["private.head.bias"] = state["private.head.bias"].roll(1, 0)
    save_file(state, path)
    settings = config(tmp_path, num_rounds=7, resume=str(tmp_path / "out"), **method)
    run(settings, tmp_path / "out", grid({**settings, "train.learning-rate": 1e-12}))
    after = {r["node"]: r["accuracy"] for r in rows(tmp_path / "out", "node") if r["round"] == 7}
    assert before["partition-1"] > 0.8
    assert after["partition-1"] < 0.4
    assert min(after["partition-0"], after["partition-2"]) > 0.8


def test_a_node_whose_state_is_of_another_model_is_named_and_the_others_go_on(tmp_path):
    run(config(tmp_path, num_rounds=1), tmp_path / "out")
    path = next((tmp_path / "out/state").rglob("partition-1/*.safetensors"))
    save_file({"private.odd": torch.ones(2)}, path)
    run(config(tmp_path, num_rounds=2, resume=str(tmp_path / "out")), tmp_path / "out")
    assert "private.odd is unexpected" in failures(tmp_path / "out")["partition-1", "train"]
    assert rows(tmp_path / "out", "round")[-1]["replied"] == 2


def test_a_fresh_run_under_an_old_experiment_name_starts_afresh_and_keeps_the_old_state(tmp_path):
    for out in ("one", "two"):
        run(config(tmp_path, experiment="same", state_dir=str(tmp_path / "state")), tmp_path / out)
    files = sorted((tmp_path / "state").rglob("partition-0/round-000002.safetensors"))
    assert len(files) == 2
    first, second = map(load_file, files)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_out_dir_that_holds_a_run_is_not_overwritten(tmp_path):
    run(config(tmp_path), tmp_path / "out")
    with pytest.raises(SettingsError, match="already holds a run; go on with it by resume"):
        run(config(tmp_path), tmp_path / "out")


def test_a_model_that_float16_cannot_carry_ends_the_run_with_what_to_set(tmp_path):
    settings = config(tmp_path, strategy="fedavg", fedavg__model="tests.user_models:with_an_offset", transport__dtype="float16")
    with pytest.raises(FleetError, match=r"round 1: .*offset holds 7e\+04, more than float16 carries"):
        run(settings, tmp_path / "out")
