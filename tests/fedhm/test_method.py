"""FedHM's two halves together: the rounds, the average, the ranks, what travels."""

import math
import random

import pytest
import torch

import strategies
from strategies.fedhm.config import Config
from strategies.fedhm.tiers import Tier, drawn_ratio
from strategies.messages import decode, encode
from tests.fedhm.whole import GROUPED, config, full, node, payloads, ratios_by_round, same, updates
from tests.fleet_fixture import defaults, grid, rows, run

BN = "tests.user_models:batch_norm_net"
CUT = "extractor.fc2.weight"


def lost(settings, node, first=1, last=99):
    """Return a Grid that loses the training replies of one node in rounds `first` to `last`."""
    the_grid = grid(settings)
    rounds = iter(range(1, 1000))

    def tamper(kind, who, content):
        if kind != "train" or who != 1000 + node:
            return content
        return None if first <= next(rounds) <= last else content

    the_grid.tamper = tamper
    return the_grid


@pytest.mark.parametrize("model", ["mlp", BN, GROUPED])
def test_ratio_one_on_every_node_is_fedavg(tmp_path, model):
    common = {"num_rounds": 3, "data__partitioner": "dirichlet", "data__alpha": 1.0, "train__weight_decay": 0.01}
    run(config(tmp_path, strategy="fedavg", fedavg__model=model, **common), tmp_path / "fedavg")
    settings = config(
        tmp_path, fedhm__model=model, fleet__rank_ratios="1.0", fedhm__weighting="uniform", fedhm__times_samples=True, **common
    )
    run(settings, tmp_path / "fedhm")
    mine, theirs = full(tmp_path / "fedhm"), full(tmp_path / "fedavg", "fedavg")
    floating = [name for name in theirs if theirs[name].is_floating_point()]
    assert any(name.endswith("weight") for name in floating)
    for name in floating:
        # BatchNorm over batches of two samples divides by small deviations, which magnifies the last bit.
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6 if model == "mlp" else 5e-5)
    assert [r["train_loss"] for r in rows(tmp_path / "fedhm", "node")] == pytest.approx(
        [r["train_loss"] for r in rows(tmp_path / "fedavg", "node")], rel=1e-4
    )


def test_every_tier_and_the_full_model_are_tested_and_learn(tmp_path):
    run(config(tmp_path, num_rounds=5), tmp_path / "out")
    last = rows(tmp_path / "out", "round")[-1]
    assert {"accuracy", "accuracy_0.25", "accuracy_0.125", "loss_0.25"} <= last["shared"].keys()
    assert min(last["shared"]["accuracy"], last["shared"]["accuracy_0.125"], last["personalized"]["accuracy_worst"]) > 0.8
    assert not rows(tmp_path / "out", "failure")


@pytest.mark.parametrize("aggregation", ["paper", "delta"])
def test_the_average_is_of_the_nodes_that_replied_with_weights_that_sum_to_one(tmp_path, aggregation):
    settings = config(tmp_path, num_rounds=1, fedhm__temperature=0.5, fedhm__aggregation=aggregation)
    the_grid = run(settings, tmp_path / "out", lost(settings, 0))
    replies = {who - 1000: tensors for who, tensors in updates(the_grid)}
    assert replies.keys() == {1, 2}
    a, b = math.exp(0.25 / 0.5), math.exp(0.125 / 0.5)
    alphas = {1: a / (a + b), 2: b / (a + b)}
    products = {i: t[f"{CUT}.ut"].double().T @ t[f"{CUT}.vt"].double() for i, t in replies.items()}
    if aggregation == "delta":
        sent = dict(payloads(the_grid))
        start = sent[1000].tensors[CUT].double()
        had = {i: sent[1000 + i].tensors for i in products}
        products = {i: start + p - had[i][f"{CUT}.ut"].double().T @ had[i][f"{CUT}.vt"].double() for i, p in products.items()}
    expected = sum(alphas[i] * products[i] for i in products)
    torch.testing.assert_close(full(tmp_path / "out")[CUT].double(), expected, rtol=0, atol=1e-6)
    head = sum(alphas[i] * replies[i]["head.weight"].double() for i in replies)
    torch.testing.assert_close(full(tmp_path / "out")["head.weight"].double(), head, rtol=0, atol=1e-6)


def test_a_round_without_the_largest_tier(tmp_path):
    """With `accept` the rank is what replied; with `history` the server's model takes part with alpha of ratio 1."""
    ranks = {}
    for rule in ("accept", "history"):
        settings = config(tmp_path, num_rounds=1, fedhm__missing_largest=rule)
        the_grid = run(settings, tmp_path / rule, lost(settings, 0))
        ranks[rule] = int(torch.linalg.matrix_rank(full(tmp_path / rule)[CUT].double(), rtol=1e-4))
    assert 32 <= ranks["accept"] <= 32 + 16  # the products that replied, whose spaces nearly coincide after so few steps
    assert ranks["history"] == 128
    replies, before = dict(updates(the_grid)), dict(payloads(the_grid))[1000].tensors["head.weight"]
    parts = [(math.exp(1.0), before), (math.exp(0.25), replies[1001]["head.weight"]), (math.exp(0.125), replies[1002]["head.weight"])]
    expected = sum(w * t.double() for w, t in parts) / sum(w for w, _ in parts)
    torch.testing.assert_close(full(tmp_path / "history")["head.weight"].double(), expected, rtol=0, atol=1e-6)


def test_a_reply_with_nan_in_a_factor_is_left_out_by_name_and_reaches_no_tier(tmp_path):
    """The round ends with the bits of one in which that reply was lost."""
    settings = config(tmp_path, num_rounds=2)
    run(settings, tmp_path / "lost", lost(settings, 1))
    broken = grid(settings)

    def tamper(kind, who, content):
        if kind == "train" and who == 1001:
            tensors = decode(content)
            tensors[f"{CUT}.vt"][3, 5] = float("nan")
            content.update(encode(tensors))
        return content

    broken.tamper = tamper
    run(settings, tmp_path / "broken", broken)
    assert same(full(tmp_path / "lost"), full(tmp_path / "broken"))
    failures = rows(tmp_path / "broken", "failure")
    assert [(f["node"], f["phase"]) for f in failures] == [("partition-1", "train")] * 2
    assert all(f"{CUT}.vt holds NaN" in f["reason"] for f in failures)


def test_history_is_not_used_where_the_largest_tier_replied(tmp_path):
    for rule in ("accept", "history"):
        run(config(tmp_path, fedhm__missing_largest=rule, fedhm__warmup_rounds=1), tmp_path / rule)
    torch.testing.assert_close(full(tmp_path / "accept"), full(tmp_path / "history"), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("aggregation", "rule"), [("paper", "accept"), ("paper", "history"), ("delta", "accept"), ("delta-decay", "accept")]
)
def test_the_largest_tier_may_be_missing_for_rounds(tmp_path, aggregation, rule):
    settings = config(tmp_path, num_rounds=4, fedhm__aggregation=aggregation, fedhm__missing_largest=rule)
    run(settings, tmp_path / "out", lost(settings, 0, 2, 3))
    listed = rows(tmp_path / "out", "round")
    assert [r["replied"] for r in listed] == [3, 2, 2, 3]
    assert listed[-1]["shared"]["accuracy"] > 0.8


def test_plain_averaging_loses_energy_beyond_the_small_ranks_and_delta_keeps_it(tmp_path):
    left = {}
    for aggregation in ("paper", "delta", "delta-decay"):
        run(config(tmp_path, num_rounds=3, fedhm__aggregation=aggregation, fedhm__keep=0.5), tmp_path / aggregation)
        left[aggregation] = [r["method"]["energy_beyond_0.125"] for r in rows(tmp_path / aggregation, "round")]
        method = rows(tmp_path / aggregation, "round")[-1]["method"]
        assert method["energy_beyond_0.125/extractor.fc2"] == method["energy_beyond_0.125"]
        assert 1 <= method["effective_rank"] <= 128
    assert left["delta"][2] > 0.9 * left["delta"][0]
    assert left["paper"][2] < 0.5 * left["paper"][0]
    assert left["paper"][2] < left["delta-decay"][2] < left["delta"][2]


def test_delta_may_begin_after_rounds_of_the_papers_average(tmp_path):
    """Two rounds have the paper's bits; then what is left beyond the small ranks stays."""
    for name, options in {"paper": {}, "later": {"fedhm__aggregation": "delta", "fedhm__delta_after": 2}}.items():
        run(config(tmp_path, num_rounds=4, **options), tmp_path / name)
    left = {name: [r["method"]["energy_beyond_0.125"] for r in rows(tmp_path / name, "round")] for name in ("paper", "later")}
    assert left["later"][:2] == left["paper"][:2]
    assert left["later"][3] > 0.9 * left["later"][1] > 2 * left["paper"][3]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_delta_without_learning_changes_nothing_whatever_the_transport_rounds(tmp_path, dtype):
    settings = config(
        tmp_path, fedhm__aggregation="delta", fleet__rank_ratios="0.25,0.125", transport__dtype=dtype, train__learning_rate=1e-30
    )
    the_grid = run(settings, tmp_path / "out")
    start = node(settings).full.state_dict()  # any node can build the run's random start
    torch.testing.assert_close(full(tmp_path / "out")[CUT], start[CUT], rtol=0, atol=1e-6)
    assert len(updates(the_grid)) == 6


@pytest.mark.parametrize("model", ["mlp", "cnn5", GROUPED])
def test_a_ratio_of_one_percent_works(tmp_path, model):
    changes = {"fedhm__model": model, "fleet__rank_ratios": "1.0,0.01"}
    if model == "cnn5":
        pytest.importorskip("torchvision")
        changes |= {"data__source": "embedded", "data__samples_per_node": 40}
    the_grid = run(config(tmp_path, num_rounds=1, **changes), tmp_path / "out", nodes=2)
    small = dict(updates(the_grid))[1001]
    thin = [t for name, t in small.items() if name.endswith(".ut")]
    assert thin
    assert {len(t) for t in thin} <= {1, 2, 3, 4, 5, 8}
    assert not rows(tmp_path / "out", "failure")


def test_grouped_convolutions_are_cut_by_group_and_depthwise_and_1x1_stay_full(tmp_path):
    the_grid = run(config(tmp_path, fedhm__model=GROUPED, fedhm__rho=1, fleet__rank_ratios="1.0,0.25"), tmp_path / "out", nodes=2)
    small = dict(updates(the_grid))[1001]
    assert small["extractor.3.weight.ut"].shape == (2, 2 * 8 * 3)
    assert small["extractor.3.weight.vt"].shape == (2, 2 * 4 * 3)
    assert {"extractor.0.weight", "extractor.6.weight", "extractor.7.weight", "head.weight"} <= small.keys()
    assert not rows(tmp_path / "out", "failure")


def test_children_of_attention_stay_full(tmp_path):
    from tests.fedhm.nets import attentive

    tier = Tier.of(attentive((1, 8, 8), 3), 0.125, Config(rho=0))
    assert tier.ranks.keys() == {"extractor.block.linear1", "extractor.block.linear2"}
    run(config(tmp_path, fedhm__model="tests.fedhm.nets:attentive", num_rounds=1), tmp_path / "out")
    assert not rows(tmp_path / "out", "failure")


@pytest.mark.parametrize("aggregation", ["paper", "delta"])
def test_ratios_drawn_anew_each_round(tmp_path, aggregation):
    drawing = {"fedhm__rank_ratio": "dynamic", "fleet__rank_ratios": "1.0,0.25,0.125,0.125"}
    settings = config(tmp_path, num_rounds=4, fedhm__aggregation=aggregation, **drawing)
    run(settings, tmp_path / "out")
    drawn = ratios_by_round(tmp_path / "out")
    assert len(drawn) == 12
    assert all(ratio == drawn_ratio((1.0, 0.25, 0.125, 0.125), 1, node, number) for (number, node), ratio in drawn.items())
    assert len({drawn[n, "partition-0"] for n in range(1, 5)}) > 1
    assert not rows(tmp_path / "out", "failure")
    many = [drawn_ratio((1.0, 0.125, 0.125), 1, "a", n) for n in range(600)]
    assert 330 < many.count(0.125) < 470


def test_warm_up_rounds_are_full_rank_then_each_node_has_its_own(tmp_path):
    run(config(tmp_path, num_rounds=3, fedhm__warmup_rounds=2), tmp_path / "out")
    by_round = ratios_by_round(tmp_path / "out")
    assert [by_round[n, "partition-2"] for n in (1, 2, 3)] == [1.0, 1.0, 0.125]
    assert "accuracy_0.125" in rows(tmp_path / "out", "round")[0]["shared"]


def test_one_payload_for_each_tier_and_smaller_tiers_are_prefixes(tmp_path):
    the_grid = run(config(tmp_path, num_rounds=1, fleet__rank_ratios="1.0,0.25,0.125,0.25"), tmp_path / "out", nodes=4)
    records = {who: c["arrays"] for kind, who, c in the_grid.sent if kind == "train"}
    assert records[1001] is records[1003]
    assert len({id(record) for record in records.values()}) == 3
    sent = {who: p.tensors for who, p in payloads(the_grid)}
    assert torch.equal(sent[1001][f"{CUT}.ut"][:16], sent[1002][f"{CUT}.ut"])
    assert torch.equal(sent[1001][f"{CUT}.vt"][:16], sent[1002][f"{CUT}.vt"])


def test_bytes_of_each_tier_as_serialised(tmp_path):
    """mlp on 8x8 pictures, 3 classes: fc1 (256, 64) and the head full, fc2 (128, 256) or r (128 + 256) numbers."""
    dense = 256 * 64 + 256 + 128 + 3 * 128 + 3
    numbers = {"partition-0": dense + 128 * 256, "partition-1": dense + 32 * 384, "partition-2": dense + 16 * 384}
    for dtype, size in (("float32", 4), ("float16", 2)):
        the_grid = run(config(tmp_path, num_rounds=1, transport__dtype=dtype, eval_every=5), tmp_path / dtype)
        measured = {r["node"]: r["bytes_up"] for r in rows(tmp_path / dtype, "node")}
        for kind, who, content in the_grid.received:
            if kind == "train":
                assert sum(t.numel() for t in decode(content).values()) == numbers[f"partition-{who - 1000}"]
        for name, count in numbers.items():
            evaluation = 900  # the answer to the evaluation, and the headers of a handful of arrays
            assert size * count < measured[name] < size * count + 2500 + evaluation


def test_the_order_of_replies_does_not_change_a_bit(tmp_path):
    options = {"fedhm__aggregation": "delta-decay", "fleet__rank_ratios": "1.0,0.25,0.125,0.05,0.25"}
    run(config(tmp_path, **options), tmp_path / "straight", nodes=5)
    shuffled = grid(config(tmp_path, **options), 5)
    shuffled.shuffle = random.Random(3)
    run(config(tmp_path, **options), tmp_path / "shuffled", shuffled)
    assert same(full(tmp_path / "straight"), full(tmp_path / "shuffled"))


def test_the_pyproject_defaults_are_the_models_defaults():
    _, method = strategies.settings_of({**defaults(), "strategy": "fedhm"})
    assert method == Config()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("fedhm.svd", "fast", "fedhm.svd = 'fast'"),
        ("fedhm.keep", 1.0, "fedhm.keep = 1.0.*less than 1"),
        ("fedhm.rho", -1, "fedhm.rho = -1"),
        ("fedhm.temperature", 0.0, "fedhm.temperature"),
        ("fedhm.rank-rules", "x", "fedhm.rank-rules is not a setting.*did you mean 'rank-rule'"),
    ],
)
def test_a_wrong_setting_is_refused(key, value, words):
    from server_app.settings import SettingsError

    with pytest.raises(SettingsError, match=words):
        strategies.settings_of({**defaults(), "strategy": "fedhm", key: value})
