"""Plans, lifting and the merge, against sums written out in float64."""

import itertools

import pytest
import torch
from torch import nn

from strategies.aggregation import UpdateError, WeightedMean
from strategies.fedhm.decompose import full_svd, pack, squared_norm, stacked_svd
from strategies.fedhm.hybrid import choose_ranks, load_state, ranks_of, state_of, with_ranks
from strategies.fedhm.lowrank import product, roll, unroll
from strategies.fedhm.merge import Merger
from strategies.fedhm.plan import Absent, Full, Index, LowRank, extract, layout, lift, lowrank_plan, needed_ranks
from strategies.fedhm.weighting import shares

F64 = torch.float64


def _random(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def _state():
    return {"conv.weight": _random(6, 4, 3, 5), "conv.bias": _random(6, seed=1), "steps": torch.tensor(7)}


def _factors(weight, rank, groups=1):
    matrix = unroll(weight, groups)
    return pack(full_svd(matrix), rank, squared_norm(matrix))


def _truncated(weight, rank):
    u, s, vt = torch.linalg.svd(unroll(weight), full_matrices=False)
    return roll(u[:, :rank] * s[:rank] @ vt[:rank], tuple(weight.shape))


def _plan(rank=None):
    return {"conv.weight": Full() if rank is None else LowRank(rank), "conv.bias": Full(), "steps": Absent()}


def _reply(state, rank, seed):
    """A node's tensors after some training, and its weight in full."""
    plan = _plan(rank)
    sent = extract(state, plan, {"conv.weight": _factors(state["conv.weight"], rank)} if rank else {})
    reply = {name: t + 0.3 * _random(*t.shape, seed=seed + i) for i, (name, t) in enumerate(sorted(sent.items()))}
    if rank is None:
        return plan, reply, reply["conv.weight"]
    u, v = reply["conv.weight.ut"], reply["conv.weight.vt"]
    full = torch.einsum("roh,rcw->ochw", u.reshape(rank, 6, 3), v.reshape(rank, 4, 5))
    return plan, reply, full


def _merge(state, replies, weights, **options):
    merger = Merger(state, **options)
    for node, ((plan, tensors, _), weight) in enumerate(zip(replies, weights, strict=True)):
        merger.fold(tensors, plan, weight, key=str(node))
    return merger.result()


def test_paper_merge_is_the_weighted_mean_of_products():
    state = _state()
    replies = [_reply(state, rank, 10 * i) for i, rank in enumerate((None, 8, 4, 2))]
    weights = shares((1.0, 0.5, 0.25, 0.125))
    merged = _merge(state, replies, weights).state
    expected = sum(w * full for w, (_, _, full) in zip(weights, replies, strict=True))
    torch.testing.assert_close(merged["conv.weight"], expected, rtol=0, atol=1e-9)
    bias = sum(w * reply["conv.bias"] for w, (_, reply, _) in zip(weights, replies, strict=True))
    torch.testing.assert_close(merged["conv.bias"], bias, rtol=0, atol=1e-9)
    assert merged["steps"] is state["steps"]
    assert merged["conv.weight"].is_contiguous()


def test_order_of_arrival_and_the_weights_unit_do_not_change_a_bit():
    state = _state()
    replies = [_reply(state, rank, 10 * i) for i, rank in enumerate((8, 4, 2))]
    results = []
    for order in itertools.permutations(range(3)):
        merger = Merger(state)
        for i in order:
            merger.fold(replies[i][1], replies[i][0], (0.5, 0.25, 0.25)[i], key=str(i))
        results.append(merger.result())
    for other in results[1:]:
        assert torch.equal(other.state["conv.weight"], results[0].state["conv.weight"])
    counted = _merge(state, replies, (50, 25, 25), scale=100).state
    assert torch.equal(counted["conv.weight"], results[0].state["conv.weight"])


def test_dropped_nodes_leave_a_normalised_average():
    state = _state()
    replies = [_reply(state, rank, 10 * i) for i, rank in enumerate((4, 2))]
    weights = shares((1.0, 0.5, 0.25))[1:]
    merged = _merge(state, replies, weights).state["conv.weight"]
    expected = (weights[0] * replies[0][2] + weights[1] * replies[1][2]) / sum(weights)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-9)


def test_untrained_replies_shrink_what_the_small_tier_cannot_hold_and_keep_prevents_it():
    """Ranks 8 and 2, equal weights: direction 3..8 loses half, beyond 8 everything; delta loses nothing."""
    state = _state()
    replies = []
    for rank in (8, 2):
        tensors = extract(state, _plan(rank), {"conv.weight": _factors(state["conv.weight"], 8)})
        replies.append((_plan(rank), tensors, None))
    sent = {"conv.weight": _factors(state["conv.weight"], 8)}
    s = torch.linalg.svdvals(unroll(state["conv.weight"]))
    for keep, middle, tail in ((0.0, 0.5, 0.0), (0.5, 0.75, 0.5), (1.0, 1.0, 1.0)):
        merged = _merge(state, replies, (0.5, 0.5), keep=keep, sent=sent).state["conv.weight"]
        scale = torch.tensor([1.0] * 2 + [middle] * 6 + [tail] * (len(s) - 8), dtype=F64)
        torch.testing.assert_close(torch.linalg.svdvals(unroll(merged)), (s * scale).sort(descending=True).values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_keep_by_its_formula_with_a_full_node_among_them(keep):
    state = _state()
    previous = state["conv.weight"]
    ranks = (None, 8, 4)
    replies = [_reply(state, rank, 10 * i) for i, rank in enumerate(ranks)]
    weights = (0.5, 0.2, 0.3)
    merged = _merge(state, replies, weights, keep=keep, sent={"conv.weight": _factors(previous, 8)}).state["conv.weight"]
    expected = torch.zeros_like(previous)
    for rank, weight, (_, _, full) in zip(ranks, weights, replies, strict=True):
        unseen = torch.zeros_like(previous) if rank is None else previous - _truncated(previous, rank)
        expected += weight * (full + keep * unseen)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-9)
    if keep == 1.0:  # the delta form
        delta = sum(
            w * (full - (previous if rank is None else _truncated(previous, rank)))
            for rank, w, (_, _, full) in zip(ranks, weights, replies, strict=True)
        )
        torch.testing.assert_close(merged, previous + delta, rtol=0, atol=1e-9)


def test_grouped_convolution_merges_block_by_block():
    weight = _random(6, 2, 3, 3)
    state = {"w": weight}
    factors = {"w": _factors(weight, 6, groups=2)}
    plan = {"w": LowRank(6, groups=2)}
    tensors = extract(state, plan, factors)
    merger = Merger(state, keep=1.0, sent=factors)
    merger.fold(tensors, plan, 1.0)
    torch.testing.assert_close(merger.result().state["w"], weight, rtol=0, atol=1e-9)


def test_all_full_is_federated_averaging_to_the_last_bit():
    state = {name: t.float() for name, t in _state().items() if t.is_floating_point()}
    plan = {name: Full() for name in state}
    merger, mean = Merger(state), WeightedMean(state)
    for i, weight in enumerate((0.2, 0.5, 0.3)):
        reply = {name: t + _random(*t.shape, seed=i).float() for name, t in state.items()}
        merger.fold(reply, plan, weight)
        mean.add(reply, weight)
    averaged, merged = mean.result(), merger.result().state
    assert all(torch.equal(merged[name], averaged[name]) for name in state)


def test_single_full_node_gets_its_own_model_back():
    state = _state()
    plan, reply, full = _reply(state, None, 5)
    merged = _merge(state, [(plan, reply, full)], (0.25,)).state
    torch.testing.assert_close(merged["conv.weight"], full, rtol=0, atol=1e-9)


def test_missing_largest_tier_the_current_model_may_join_as_one_more_full_node():
    state = _state()
    plan, reply, full = _reply(state, 2, 5)
    merger = Merger(state)
    merger.fold(reply, plan, 0.75)
    merger.fold({k: v for k, v in state.items() if k != "steps"}, _plan(), 0.25)
    torch.testing.assert_close(merger.result().state["conv.weight"], 0.75 * full + 0.25 * state["conv.weight"], rtol=0, atol=1e-9)


def test_prefix_indices_merge_as_heterofl():
    """Widths 4, 2 and 1 of 4: each element is the mean over the nodes that hold it; the rest keeps its value."""
    state = {"w": torch.full((4, 4), 9.0, dtype=F64), "b": torch.full((4,), 9.0, dtype=F64)}
    merger = Merger(state)
    for width, value, weight in ((3, 1.0, 1.0), (2, 4.0, 2.0), (1, 0.0, 0.5)):
        index = torch.arange(width)
        plan = {"w": Index({0: index, 1: index}), "b": Index({0: index})}
        tensors = extract(state, plan, {})
        assert tensors["w"].shape == layout(state, plan)["w"].shape == (width, width)
        merger.fold({name: torch.full_like(t, value) for name, t in tensors.items()}, plan, weight)
    merged = merger.result().state
    corner, two, one, none = (1 + 8) / 3.5, 3.0, 1.0, 9.0
    expected = [[corner, two, one, none], [two, two, one, none], [one, one, one, none], [none] * 4]
    torch.testing.assert_close(merged["w"], torch.tensor(expected, dtype=F64), rtol=0, atol=1e-9)
    torch.testing.assert_close(merged["b"], torch.tensor([corner, two, one, none], dtype=F64), rtol=0, atol=1e-9)


def test_rolling_window_of_a_convolution_and_a_full_node_together():
    state = {"w": _random(4, 3, 3, 2)}
    window = torch.tensor([3, 0])
    plan = {"w": Index({0: window})}
    part = extract(state, plan, {})["w"]
    assert torch.equal(part, state["w"][[3, 0]])
    merger = Merger(state)
    merger.fold({"w": part + 1}, plan, 1.0)
    merger.fold({"w": state["w"] - 1}, {"w": Full()}, 1.0)
    expected = state["w"] - 1
    expected[[3, 0]] = state["w"][[3, 0]]
    torch.testing.assert_close(merger.result().state["w"], expected, rtol=0, atol=1e-9)


def test_classifier_rows_only_of_classes_the_node_has_are_renormalised():
    state = {"head": torch.zeros(3, 2, dtype=F64)}
    merger = Merger(state)
    for labels in ([0, 1], [1]):
        merger.fold({"head": torch.ones(len(labels), 2, dtype=F64)}, {"head": Index({0: torch.tensor(labels)})}, 0.5)
    torch.testing.assert_close(merger.result().state["head"], torch.tensor([[1.0, 1], [1, 1], [0, 0]], dtype=F64), rtol=0, atol=1e-9)


def test_absent_everywhere_keeps_the_previous_value():
    state = _state()
    merger = Merger(state)
    merger.fold({"conv.bias": state["conv.bias"]}, {"conv.weight": Absent(), "conv.bias": Full(), "steps": Absent()}, 1.0)
    assert torch.equal(merger.result().state["conv.weight"], state["conv.weight"])


def test_stacks_stay_while_few_and_describe_the_merged_weight():
    state = {"w": _random(40, 36)}
    factors = {"w": _factors(state["w"], 6)}
    for ranks, kept in (((6, 4), True), ((6, 6, 6), False)):
        merger = Merger(state)
        for i, rank in enumerate(ranks):
            plan = {"w": LowRank(rank)}
            merger.fold(extract(state, plan, factors), plan, 0.3 + i / 10, key=f"n{i}")
        merged = merger.result()
        assert ("w" in merged.stacks) is kept  # at most 36 / 3 columns
        if kept:
            u, s, v = stacked_svd(*merged.stacks["w"])
            torch.testing.assert_close(u * s @ v.mT, merged.state["w"], rtol=0, atol=1e-9)
    mixed = Merger(state)
    mixed.fold(extract(state, {"w": LowRank(2)}, factors), {"w": LowRank(2)}, 0.5)
    mixed.fold(state, {"w": Full()}, 0.5)
    assert mixed.result().stacks == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("conv.bias"), "missing .'conv.bias'"),
        (lambda t: t.update({"conv.weight.ut": t["conv.weight.ut"][:2]}), r"conv.weight.ut is \(2, 18\)"),
        (lambda t: t["conv.weight.vt"].fill_(float("nan")), "conv.weight.vt holds NaN"),
        (lambda t: t["conv.weight.vt"].fill_(1e6), "conv.weight: the factors' product may reach"),
        (lambda t: t.update({"steps": torch.tensor(8)}), "unexpected .'steps'"),
    ],
)
def test_a_broken_reply_is_refused_by_key_and_folds_nothing(change, message):
    state = _state()
    good, bad = _reply(state, 4, 1), _reply(state, 4, 2)
    bad[1]["conv.weight.ut"] *= 100
    change(bad[1])
    merger = Merger(state)
    merger.fold(good[1], good[0], 0.5)
    with pytest.raises(UpdateError, match=message):
        merger.fold(bad[1], bad[0], 0.5)
    assert torch.equal(merger.result().state["conv.weight"], _merge(state, [good], (0.5,)).state["conv.weight"])


def test_other_refusals():
    state = _state()
    plan, reply, _ = _reply(state, 4, 1)
    with pytest.raises(ValueError, match="no reply was folded"):
        Merger(state).result()
    with pytest.raises(UpdateError, match="weight 0"):
        Merger(state).fold(reply, plan, 0)
    with pytest.raises(ValueError, match=r"keep = 0\.5 needs the factors"):
        Merger(state, keep=0.5).fold(reply, plan, 1.0)
    with pytest.raises(UpdateError, match="never averaged"):
        Merger(state).fold({**reply, "steps": torch.tensor(1)}, {**plan, "steps": Full()}, 1.0)
    with pytest.raises(ValueError, match=r"differ in 'conv\.bias'"):
        extract(state, {"conv.weight": Full(), "steps": Absent()}, {})
    with pytest.raises(ValueError, match="distinct"):
        Index({0: torch.tensor([1, 1])})
    with pytest.raises(ValueError, match="do not fit"):
        extract({"w": torch.zeros(3)}, {"w": Index({0: torch.tensor([3])})}, {})


def test_plans_of_a_model_and_the_ranks_all_of_them_need():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    state, groups = state_of(model), {"0": 2}
    ranks = [ranks_of(choose_ranks(model, ratio)) for ratio in (0.5, 0.25, 1.0)]
    plans = [lowrank_plan(state, r, groups) for r in ranks]
    assert needed_ranks(plans) == {"0.weight": ((2, 1), 2), "2.weight": ((4, 2), 1)}
    assert isinstance(plans[0]["1.num_batches_tracked"], Absent)
    factors = {name: _factors(state[name], r[0], g) for name, (r, g) in needed_ranks(plans).items()}
    for plan, r in zip(plans, ranks, strict=True):
        tensors = extract(state, plan, factors)
        hybrid = with_ranks(model, r, spectral=False)
        load_state(hybrid, tensors)  # what the server cuts is what the node's model takes
        like = layout(state, plan)
        assert {n: (t.shape, t.dtype) for n, t in like.items()} == {n: (t.shape, t.dtype) for n, t in tensors.items()}
        lifted = lift(tensors, "2.weight", plan["2.weight"], state["2.weight"].shape)
        torch.testing.assert_close(hybrid[2].weight, lifted.value, rtol=1e-5, atol=1e-6)
    assert tensors["0.weight"] is state["0.weight"]
    with pytest.raises(ValueError, match="'9' has no weight"):
        lowrank_plan(state, {"9": 1}, {})


def test_half_precision_is_merged_in_float32_and_comes_back_in_its_own_dtype():
    state = {"w": _random(8, 6).half()}
    reply = {"w.ut": _random(2, 8, seed=1).half(), "w.vt": _random(2, 6, seed=2).half()}
    merger = Merger(state)
    merger.fold(reply, {"w": LowRank(2)}, 1.0)
    merged = merger.result().state["w"]
    assert torch.equal(merged, product(reply["w.ut"].float(), reply["w.vt"].float()).half())
