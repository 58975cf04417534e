"""FedHM's server half: what it keeps for a resumed run, how much memory it takes, what it remembers of ratios."""

import gc
import types

import pytest
import torch

import strategies
from server_app.checkpoint import CheckpointError
from strategies.fleet import FleetError, Node
from strategies.messages import Update
from tests.fedhm.whole import config, full, same
from tests.fleet_fixture import grid, rows, run

SMALL = "0.06,0.03"  # low-rank replies only, and so few that their factors are decomposed stacked


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def results(out):
    kept = ("round", "node", "accuracy", "loss", "train_loss", "rank_ratio")
    return [{k: r.get(k) for k in kept} for r in rows(out, "node")], [r["shared"] for r in rows(out, "round")]


@pytest.mark.parametrize(
    "options",
    [
        {"fleet__rank_ratios": SMALL},
        {"fedhm__aggregation": "delta"},
        {"fedhm__rank_ratio": "dynamic", "fedhm__aggregation": "delta-decay", "fleet__fraction": 0.67},
        {"transport__dtype": "float16", "fedhm__warmup_rounds": 1, "fedhm__missing_largest": "history", "fleet__fraction": 0.67},
    ],
)
def test_a_resumed_run_ends_with_the_bits_of_the_straight_one(tmp_path, options):
    settings = config(tmp_path, num_rounds=4, **options)
    run(settings, tmp_path / "straight")
    cut = grid(settings)

    def kill(kind, node, content):
        if kind == "evaluate" and sum(k == "evaluate" for k, _, _ in cut.received) >= 7:
            raise Killed
        return content

    cut.tamper = kill
    with pytest.raises(Killed):
        run(settings, tmp_path / "cut", cut)
    run({**settings, "resume": str(tmp_path / "cut")}, tmp_path / "cut")
    assert same(full(tmp_path / "straight"), full(tmp_path / "cut"))
    assert results(tmp_path / "straight") == results(tmp_path / "cut")


def test_stacked_factors_are_used_and_survive_a_checkpoint(tmp_path):
    strategy = started(tmp_path, 2, fleet__rank_ratios=SMALL)
    one_round(strategy, 1)
    assert strategy._decomposer.used == {"extractor.fc2.weight": "stacked"}
    again = started(tmp_path, 2, fleet__rank_ratios=SMALL, restored=strategy.state_dict())
    assert same(strategy.state_dict(), again.state_dict())
    one_round(strategy, 2)
    one_round(again, 2)
    assert same(strategy.state_dict(), again.state_dict())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    state = started(tmp_path, 2).state_dict()
    state["full/head.weight"] = torch.zeros(9, 128)
    with pytest.raises(FleetError, match=r"head\.weight; resume with the settings"):
        started(tmp_path, 2, restored=state)
    run(config(tmp_path, num_rounds=1), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"fedhm.rho: 1 then, 0 now"):
        run(config(tmp_path, fedhm__rho=0, resume=str(tmp_path / "out")), tmp_path / "out")


def test_ranks_do_not_shrink_when_the_node_with_the_largest_is_away(tmp_path):
    strategy = started(tmp_path, 3, fleet__rank_ratios="0.25,0.125,0.06")
    rank = strategy._factors["extractor.fc2.weight"].rank
    strategy._here = strategy._here[1:]
    strategy.prepare(strategy._here)
    one_round(strategy, 1)
    assert strategy._factors["extractor.fc2.weight"].rank == rank == 32
    assert strategy.ratios == {0.25, 0.125, 0.06}


@pytest.mark.parametrize("aggregation", ["paper", "delta"])
def test_memory_does_not_grow_with_the_nodes_and_stays_below_three_full_models(tmp_path, aggregation):
    strategy = started(tmp_path, 100, fleet__rank_ratios="0.25,0.125,0.5,1.0", fedhm__aggregation=aggregation)
    model = sum(t.numel() * 4 for t in strategy.theta.values())
    base_bytes = alive()
    taken = {}
    strategy.begin_round(1, strategy._here)
    for count, node in enumerate(strategy._here, start=1):
        strategy.fold(node, Update({n: t.clone() for n, t in strategy.payload_for(node).tensors.items()}, 10))
        if count in (10, 50, 100):
            taken[count] = alive() - base_bytes
    assert taken[10] == taken[50] == taken[100]
    strategy.end_round()
    assert max(taken[100], alive() - base_bytes) < 3 * model


def alive():
    """Return the bytes of all tensors that are alive, each storage once."""
    gc.collect()
    real = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in real}
    return sum(storages.values())


def started(tmp_path, count, restored=None, **changes):
    """Return a server half with `count` nodes that described themselves, ready for round 1."""
    settings, method = strategies.settings_of(config(tmp_path, **changes))
    strategy = strategies.strategy_class("fedhm")(settings, method, types.SimpleNamespace(run="fedhm", checkpoint_round=0), None)
    if restored is not None:
        strategy.load_state_dict(restored)
    facts = {"input_shape": "1,8,8", "num_outputs": 3, "class_names": "", "num_train": 10}
    ratios = settings.fleet.rank_ratios
    bare = [Node(f"n{i:03d}", i, {**facts, "rank_ratio": ratios[i % len(ratios)]}) for i in range(count)]
    strategy.build_for(bare)
    strategy._here = [Node(n.name, n.node_id, {**n.facts, "ranks": strategy.tier(n.facts["rank_ratio"]).table}) for n in bare]
    strategy.prepare(strategy._here)
    return strategy


def one_round(strategy, server_round):
    """Fold what each node got, a little changed."""
    strategy.begin_round(server_round, strategy._here)
    for index, node in enumerate(strategy._here):
        generator = torch.Generator().manual_seed(100 * server_round + index)
        tensors = strategy.payload_for(node).tensors
        changed = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
        strategy.fold(node, Update(changed, 10))
    return strategy.end_round()
