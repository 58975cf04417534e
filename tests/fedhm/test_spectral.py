"""The choice of the way, the remembered bases, and the thread settings."""

import threading

import pytest
import torch
from torch import nn

from strategies.fedhm.lowrank import factorize, product, unroll
from strategies.fedhm.spectral import Decomposer, Layer, in_threads


def _weight(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def _layers(seed=0):
    return {
        "a.weight": Layer(_weight(32, 32, 3, 3, seed=seed), (16, 8, 4)),
        "b.weight": Layer(_weight(64, 8, 3, 3, seed=seed + 1), (4, 1), groups=4),
        "c.weight": Layer(_weight(40, 90, seed=seed + 2), (5,)),
    }


@pytest.mark.parametrize("method", ["auto", "exact", "naive"])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_method_gives_the_same_products_as_one_svd_a_tier(method, workers):
    layers = {n: Layer(la.weight.double(), la.ranks, la.groups) for n, la in _layers().items()}
    factors = Decomposer(method, workers=workers)(layers)
    assert list(factors) == list(layers)
    for name, layer in layers.items():
        for rank in layer.ranks:
            blocks = unroll(layer.weight, layer.groups).reshape(layer.groups, *layer.size)
            u, s, vt = torch.linalg.svd(blocks, full_matrices=False)
            expected = (u[..., :rank] * s[:, None, :rank]) @ vt[:, :rank]
            got = product(*factors[name].prefix(rank), layer.groups).reshape(expected.shape)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_auto_goes_warm_in_the_second_round_and_stays_within_two_percent():
    decomposer = Decomposer()
    decomposer(_layers())
    assert decomposer.used == {"a.weight": "gram", "b.weight": "full", "c.weight": "gram"}
    moved = {n: Layer(la.weight + 0.1 * _weight(*la.weight.shape, seed=9), la.ranks, la.groups) for n, la in _layers().items()}
    factors = decomposer(moved)
    assert decomposer.used == {"a.weight": "warm", "b.weight": "full", "c.weight": "warm"}
    for name in ("a.weight", "c.weight"):
        matrix = unroll(moved[name].weight).double()
        s = torch.linalg.svdvals(matrix)
        for rank in moved[name].ranks:
            error = torch.linalg.norm(matrix - product(*factors[name].prefix(rank)).double())
            assert float(error) <= 1.02 * float(s[rank:].square().sum().sqrt())


def test_stacked_factors_are_used_where_given_and_few():
    us, vs = _weight(60, 12, seed=1), _weight(50, 12, seed=2)
    weight = us @ vs.mT
    decomposer = Decomposer()
    few = decomposer({"w": Layer(weight, (8,), stack=(us, vs))})["w"]
    assert decomposer.used == {"w": "stacked"}
    exact = Decomposer("exact")({"w": Layer(weight, (8,))})["w"]
    torch.testing.assert_close(product(few.ut, few.vt), product(exact.ut, exact.vt), rtol=1e-4, atol=1e-4)
    decomposer({"w": Layer(weight, (16,), stack=(us, vs))})  # the stack holds 12 directions: 16 would have dead ones
    assert decomposer.used == {"w": "gram"}


def test_bases_resume_a_run_bit_for_bit():
    straight = Decomposer()
    straight(_layers())
    saved = {key: basis.clone() for key, basis in straight.state_dict().items()}
    expected = straight(_layers(seed=5))
    resumed = Decomposer()
    resumed.load_state_dict(saved)
    got = resumed(_layers(seed=5))
    assert resumed.used == straight.used
    for name in expected:
        assert torch.equal(got[name].ut, expected[name].ut)
        assert torch.equal(got[name].vt, expected[name].vt)


def test_a_basis_of_another_shape_or_rank_is_dropped():
    decomposer = Decomposer()
    decomposer({"a": Layer(_weight(90, 90), (5,))})
    decomposer({"a": Layer(_weight(90, 90), (6,))})
    assert decomposer.used == {"a": "gram"}
    decomposer({"a": Layer(_weight(90, 91), (6,))})
    assert decomposer.used == {"a": "gram"}
    decomposer({"b": Layer(_weight(90, 91), (6,))})
    assert decomposer.used == {"b": "gram"}
    assert list(decomposer.state_dict()) == ["b:1x90x91:22"]


def test_half_precision_is_decomposed_in_float32():
    weight = _weight(60, 60).half()
    factors = Decomposer()({"w": Layer(weight, (4,))})["w"]
    assert factors.ut.dtype == torch.float32
    expected = factorize(_linear(weight.float()), 4)
    torch.testing.assert_close(product(factors.ut, factors.vt), expected.weight.detach(), rtol=1e-3, atol=1e-3)


def test_refusals_name_the_layer():
    broken = _weight(30, 30)
    broken[3, 3] = float("inf")
    with pytest.raises(ValueError, match=r"'layer3.conv.weight' holds NaN or infinity"):
        Decomposer()({"fine": Layer(_weight(30, 30), (4,)), "layer3.conv.weight": Layer(broken, (4,))})
    with pytest.raises(ValueError, match=r"'x': ranks \(31,\)"):
        Decomposer()({"x": Layer(_weight(30, 30), (31,))})
    with pytest.raises(ValueError, match="'fast' is unknown"):
        Decomposer("fast")


def test_threads_are_one_each_and_restored_for_old_and_new_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = in_threads(lambda item: (item, torch.get_num_threads(), threading.current_thread().name), list(range(6)), workers=2)
        assert [item for item, _, _ in seen] == list(range(6))
        assert {threads for _, threads, _ in seen} == {1}
        assert all(name.startswith("decompose") for _, _, name in seen)
        assert torch.get_num_threads() == 2
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2]
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda item: 1 // item, [1, 0], workers=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_batch_of_one_shape_equals_its_layers_alone():
    """What an accelerator runs, here on the CPU: groups and layers both as leading axes, cold then warm."""
    layers = {f"w{i}": Layer(_weight(48, 24, 3, 3, seed=i, dtype=torch.float64), (6, 2), groups=2) for i in range(3)}
    decomposer = Decomposer(tolerance=1e-9)
    for expected_way in ("gram", "warm"):
        together = decomposer._decompose(layers)
        for name, layer in layers.items():
            factors, way, basis = together[name]
            assert way == expected_way
            alone = Decomposer("exact")({name: layer})[name]
            torch.testing.assert_close(product(factors.ut, factors.vt, 2), product(alone.ut, alone.vt, 2), rtol=0, atol=1e-6)
            assert factors.energy == pytest.approx(float(layer.weight.square().sum()))
            decomposer.load_state_dict(decomposer.state_dict() | {f"{name}:2x72x72:22": basis})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_layers_of_one_shape_are_batched_on_cuda():
    layers = {f"w{i}": Layer(_weight(48, 48, 3, 3, seed=i).cuda(), (12, 4)) for i in range(3)}
    decomposer = Decomposer()
    for _ in range(2):
        factors = decomposer(layers)
        for name, layer in layers.items():
            expected = Decomposer("exact")({name: Layer(layer.weight.cpu().double(), layer.ranks)})[name]
            got = product(factors[name].ut, factors[name].vt).cpu().double()
            torch.testing.assert_close(got, product(expected.ut, expected.vt), rtol=1e-2, atol=1e-2)
    assert set(decomposer.used.values()) == {"warm"}


def _linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight
    return layer
