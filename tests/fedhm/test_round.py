"""All parts together: three rounds of a small convolutional net at three ratios, without Flower."""

import torch
from torch import nn

from strategies.fedhm.hybrid import choose_ranks, frobenius_penalty, load_state, ranks_of, state_of, with_ranks
from strategies.fedhm.merge import Merger
from strategies.fedhm.plan import extract, layout, lowrank_plan, needed_ranks
from strategies.fedhm.rank_metrics import effective_rank, energy_beyond
from strategies.fedhm.spectral import Decomposer, Layer
from strategies.fedhm.weighting import shares

RATIOS = (1.0, 0.25, 0.125)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
    )


def _trained(model, seed):
    """Return what the node sends back after two steps with Frobenius decay."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 3, 8, 8, generator=g), torch.randint(4, (8,), generator=g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + 0.5e-4 * frobenius_penalty(model)).backward()
        optimizer.step()
    return {name: tensor for name, tensor in state_of(model).items() if tensor.is_floating_point()}


def _run(keep, order):
    model = _net()
    state = state_of(model)
    plans = [lowrank_plan(state, ranks_of(choose_ranks(model, ratio, rho=1)), {}) for ratio in RATIOS]
    decomposer, stacks, beyond = Decomposer(), {}, []
    for server_round in range(3):
        layers = {n: Layer(state[n], ranks, g, stacks.get(n)) for n, (ranks, g) in needed_ranks(plans).items()}
        factors = decomposer(layers)
        beyond.append(energy_beyond(factors["3.weight"], (4, 8))[8])
        merger = Merger(state, keep=keep, sent=factors)
        for node in order:
            hybrid = with_ranks(
                model, {n.removesuffix(".weight"): p.rank for n, p in plans[node].items() if hasattr(p, "rank")}, spectral=False
            )
            load_state(hybrid, extract(state, plans[node], factors))
            reply = _trained(hybrid, seed=10 * server_round + node)
            assert reply.keys() == layout(state, plans[node]).keys()
            merger.fold(reply, plans[node], shares(RATIOS)[node], key=str(node))
        state, stacks = (merged := merger.result()).state, merged.stacks
    assert 1.0 <= effective_rank(factors["3.weight"], 96) <= 96
    return state, beyond


def test_three_rounds_do_not_depend_on_the_order_of_arrival_and_the_merged_model_runs():
    state, _ = _run(0.0, (0, 1, 2))
    other, _ = _run(0.0, (2, 0, 1))
    assert all(torch.equal(state[name], other[name]) for name in state)
    model = _net()
    load_state(model, state)
    assert bool(torch.isfinite(model(torch.randn(2, 3, 8, 8))).all())
    assert int(state["1.num_batches_tracked"]) == 0


def test_plain_averaging_loses_rank_and_delta_does_not():
    plain, delta = _run(0.0, (0, 1, 2))[1], _run(1.0, (0, 1, 2))[1]
    assert plain[0] == delta[0] > 0.5
    assert plain[2] < 0.5 * plain[0]
    assert delta[2] > 0.9 * delta[0]
