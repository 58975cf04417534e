"""Factorized layers against plain convolutions, in float64; product and penalty against forming the matrix."""

import itertools

import pytest
import torch
from torch import nn

from strategies.fedhm import lowrank
from strategies.fedhm.lowrank import Factored, factorize, frobenius_penalty, rank_of, recompose, roll, unroll


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _conv(*args, seed=0, **kwargs):
    conv = nn.Conv2d(*args, dtype=torch.float64, **kwargs)
    for p in conv.parameters():
        p.data = torch.randn(p.shape, dtype=torch.float64, generator=_generator(seed))
    return conv


def _image(channels, height=11, width=13):
    return torch.randn(2, channels, height, width, dtype=torch.float64, generator=_generator(9))


def _full(layer):
    return min(lowrank.matrix_size(tuple(layer.weight.shape), lowrank.groups_of(layer)))


def test_unroll_places_each_entry_by_definition():
    weight = torch.arange(2 * 3 * 4 * 5, dtype=torch.float64).reshape(2, 3, 4, 5)
    matrix = unroll(weight)
    assert matrix.shape == (8, 15)
    for o, c, h, w in itertools.product(range(2), range(3), range(4), range(5)):
        assert matrix[o * 4 + h, c * 5 + w] == weight[o, c, h, w]
    assert not torch.equal(matrix, weight.reshape(8, 15))  # the tempting plain reshape
    assert torch.equal(roll(matrix, (2, 3, 4, 5)), weight)


def test_unroll_of_groups_is_each_groups_block():
    weight = torch.randn(6, 4, 3, 2, dtype=torch.float64, generator=_generator())
    matrix = unroll(weight, 2)
    assert matrix.shape == (2, 9, 8)
    assert torch.equal(matrix[1], unroll(weight[3:]))
    assert torch.equal(roll(matrix, (6, 4, 3, 2)), weight)


@pytest.mark.parametrize("kernel", [1, 3, 5, 7, (3, 5)])
@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_full_rank_convolution_equals_the_original(kernel, stride, dilation):
    for padding, bias in itertools.product((0, 1, 3, (1, 2)), (True, False)):
        conv = _conv(3, 4, kernel, stride=stride, padding=padding, dilation=dilation, bias=bias)
        thin, x = factorize(conv, _full(conv)), _image(3, 15, 17)
        torch.testing.assert_close(thin(x), conv(x), rtol=0, atol=1e-9)
        back = recompose(thin)
        torch.testing.assert_close(back.weight, conv.weight, rtol=0, atol=1e-9)
        assert repr(back) == repr(conv)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_split_per_axis(mode):
    conv = _conv(3, 5, (3, 5), padding=(1, 2), padding_mode=mode, stride=(2, 1))
    thin, x = factorize(conv, _full(conv)), _image(3)
    torch.testing.assert_close(thin(x), conv(x), rtol=0, atol=1e-9)
    assert recompose(thin).padding_mode == mode


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_string_padding(padding):
    conv = _conv(3, 5, (4, 3), padding=padding, dilation=(1, 2))
    thin, x = factorize(conv, _full(conv)), _image(3)
    torch.testing.assert_close(thin(x), conv(x), rtol=0, atol=1e-9)
    assert recompose(thin).padding == padding


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_are_factorized_block_by_block(groups):
    conv = _conv(8, 12, 3, groups=groups, stride=2, padding=1)
    thin, x = factorize(conv, _full(conv)), _image(8)
    assert thin.v.weight.shape[0] == groups * thin.rank
    torch.testing.assert_close(thin(x), conv(x), rtol=0, atol=1e-9)
    torch.testing.assert_close(recompose(thin).weight, conv.weight, rtol=0, atol=1e-9)
    cut = factorize(conv, 2)
    for g in range(groups):  # each block is cut optimally: the error is its own discarded singular values
        own = slice(g * 12 // groups, (g + 1) * 12 // groups)
        s = torch.linalg.svdvals(unroll(conv.weight[own]))
        error = torch.linalg.norm(cut.weight[own] - conv.weight[own])
        torch.testing.assert_close(error, s[2:].square().sum().sqrt(), rtol=0, atol=1e-9)


def test_first_runs_the_horizontal_convolution_and_only_the_second_has_the_bias():
    conv = _conv(3, 4, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1))
    v, u = factorize(conv, 2)
    assert (v.weight.shape, u.weight.shape) == ((2, 3, 1, 5), (4, 2, 3, 1))
    assert (v.stride, v.padding, v.dilation) == ((1, 1), (0, 2), (1, 1))
    assert (u.stride, u.padding, u.dilation) == ((2, 1), (1, 0), (2, 1))
    assert v.bias is None
    torch.testing.assert_close(u.bias, conv.bias, rtol=0, atol=0)
    composed = torch.einsum("orh,rnw->onhw", u.weight.squeeze(3), v.weight.squeeze(2))
    torch.testing.assert_close(recompose(factorize(conv, 2)).weight, composed, rtol=0, atol=1e-12)


def test_truncation_error_is_the_discarded_singular_values_and_factors_are_balanced():
    conv = _conv(5, 4, 3)
    thin = factorize(conv, 3)
    s = torch.linalg.svdvals(unroll(conv.weight))
    torch.testing.assert_close(torch.linalg.norm(thin.weight - conv.weight), s[3:].square().sum().sqrt(), rtol=0, atol=1e-9)
    ut, vt = thin.factors()
    torch.testing.assert_close(ut @ ut.mT, torch.diag(s[:3]), rtol=0, atol=1e-9)
    torch.testing.assert_close(vt @ vt.mT, torch.diag(s[:3]), rtol=0, atol=1e-9)


def test_linear_round_trip_and_reading_its_weight():
    layer = nn.Linear(7, 5, dtype=torch.float64)
    x = torch.randn(3, 7, dtype=torch.float64, generator=_generator())
    thin = factorize(layer, 5)
    torch.testing.assert_close(thin(x), layer(x), rtol=0, atol=1e-9)
    torch.testing.assert_close(nn.functional.linear(x, thin.weight, thin.bias), layer(x), rtol=0, atol=1e-9)
    back = recompose(factorize(layer.eval().requires_grad_(False), 5))
    assert (back.in_features, back.out_features, back.training, back.weight.requires_grad) == (7, 5, False, False)


def test_load_factors_is_the_inverse_of_factors_and_a_prefix_is_the_smaller_tier():
    conv = _conv(4, 6, 3, groups=2)
    large, small = factorize(conv, 4), factorize(conv, 2, spectral=False)
    ut, vt = large.factors()
    small.load_factors(ut[:2], vt[:2])
    torch.testing.assert_close(small.weight, factorize(conv, 2).weight, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match=r"ut is \(3, 18\)"):
        small.load_factors(ut[:3], vt[:3])


@pytest.mark.parametrize("groups", [1, 3])
def test_frobenius_penalty_value_and_gradient(groups):
    g = _generator()
    ut, vt = (torch.randn(2, groups * n, dtype=torch.float64, generator=g, requires_grad=True) for n in (5, 4))
    matrix = lowrank.product(ut, vt, groups)
    expected = torch.autograd.grad(matrix.square().sum(), (ut, vt))
    value = frobenius_penalty(ut, vt, groups)
    torch.testing.assert_close(value, matrix.square().sum(), rtol=0, atol=1e-9)
    for own, want in zip(torch.autograd.grad(value, (ut, vt)), expected, strict=True):
        torch.testing.assert_close(own, want, rtol=0, atol=1e-9)
    if groups == 1:  # half of it has the gradients U(VᵀV) and V(UᵀU)
        torch.testing.assert_close(expected[0] / 2, (vt @ vt.mT) @ ut, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("ratio", "rule", "expected"),
    [(0.5, "outputs", 32), (1 / 12, "outputs", 5), (0.001, "outputs", 1), (0.5, "full-rank", 48), (0.5, "parameters", 32)],
)
def test_rank_rules_by_hand(ratio, rule, expected):
    assert rank_of(nn.Conv2d(32, 64, 3), ratio, rule) == expected  # M = 192, N = 96; 64/12 = 5.33; 192*96/288 = 64


def test_halves_round_up_and_ranks_are_capped():
    assert rank_of(nn.Linear(40, 5), 0.5) == 3  # Python's round(2.5) is 2
    assert rank_of(nn.Linear(2, 40), 0.9) == 2
    assert rank_of(nn.Conv2d(8, 8, 3, groups=4), 0.5) == 1  # of each group's two outputs


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.5, float("nan")])
def test_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(ValueError, match="not within"):
        rank_of(nn.Linear(4, 4), ratio)


@pytest.mark.parametrize(
    ("layer", "rank", "message"),
    [
        (nn.Conv2d(4, 4, 3, groups=4), 1, "depthwise"),
        (nn.Conv1d(4, 4, 3), 1, "Conv1d is neither"),
        (nn.ConvTranspose2d(4, 4, 3), 1, "ConvTranspose2d is neither"),
        (nn.MultiheadAttention(4, 2).out_proj, 1, "NonDynamicallyQuantizableLinear is neither"),
        (nn.Linear(4, 3), 4, "not within 1..3"),
        (nn.Linear(4, 3), 0, "not within 1..3"),
    ],
)
def test_what_cannot_be_factorized_is_refused(layer, rank, message):
    with pytest.raises(ValueError, match=message):
        factorize(layer, rank)


def test_non_finite_weight_is_refused():
    layer = nn.Linear(4, 3)
    layer.weight.data[1, 1] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        factorize(layer, 2)


def test_half_precision_is_decomposed_in_float32_and_the_global_generator_is_not_touched():
    layer = nn.Linear(64, 48).half()
    before = torch.get_rng_state()
    thin = factorize(layer, 8)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(thin, Factored)
    assert thin.weight.dtype == torch.float16
    s = torch.linalg.svdvals(layer.weight.detach().double())
    error = float(torch.linalg.norm((thin.weight - layer.weight).detach().double()))
    assert error == pytest.approx(float(s[8:].square().sum().sqrt()), rel=1e-3)


def test_averaging_factors_is_not_averaging_weights():
    """Two nodes with the same weights but other signs of their directions: averaged factors vanish, products do not."""
    ut, vt = (factor.detach() for factor in factorize(_conv(4, 4, 3), 2).factors())
    kept = (lowrank.product(ut, vt) + lowrank.product(-ut, -vt)) / 2
    torch.testing.assert_close(kept, lowrank.product(ut, vt), rtol=0, atol=1e-12)
    assert float(lowrank.product((ut - ut) / 2, (vt - vt) / 2).abs().max()) == 0.0
