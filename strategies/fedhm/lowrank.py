"""One layer as two thinner ones, and back: FedHM's factorization.

Letters: m outputs, n inputs, h x w kernel, g groups, r rank. The block of one group of a kernel (m, n/g, h, w) is
a matrix (M, N): M = m/g * h rows (out, h), N = n/g * w columns (in, w). A Linear is the case h = w = g = 1.
Factors are rank-major, `ut` (r, g*M) and `vt` (r, g*N): W ~ utᵀ vt, and a smaller rank is a contiguous prefix.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from strategies.fedhm.decompose import full_svd, pack, squared_norm

Shape = tuple[int, ...]
Layer = nn.Conv2d | nn.Linear


def matrix_size(shape: Shape, groups: int = 1) -> tuple[int, int]:
    """Return (M, N) of one group's block of a weight (m, n) or (m, n/g, h, w)."""
    m, n, h, w = (*shape, 1, 1)[:4]
    return m // groups * h, n * w


def unroll(weight: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """(m, n/g, h, w) or (m, n) -> (M, N), or (g, M, N) with groups: rows (out, h), columns (in, w).

    A plain reshape without exchanging the middle axes gives another matrix of the same size.
    """
    rows, columns = matrix_size(tuple(weight.shape), groups)
    matrix = weight.transpose(1, 2) if weight.dim() == 4 else weight
    return matrix.reshape(rows, columns) if groups == 1 else matrix.reshape(groups, rows, columns)


def roll(matrix: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the weight of `shape` whose `unroll` is `matrix`; a view where `matrix` is contiguous."""
    if len(shape) == 2:
        return matrix.reshape(shape)
    m, n, h, w = shape
    return matrix.reshape(m, h, n, w).transpose(1, 2)


def blocks(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """(r, g*M) -> (r, M), or (g, r, M) with groups; a view."""
    return rows if groups == 1 else rows.reshape(rows.shape[0], groups, -1).transpose(0, 1)


def product(ut: torch.Tensor, vt: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Return the matrix utᵀ vt: (M, N), or (g, M, N) with groups."""
    return blocks(ut, groups).mT @ blocks(vt, groups)


def first_weight(vt: torch.Tensor, shape: Shape, groups: int = 1) -> torch.Tensor:
    """Return the weight of the layer that runs first: (g*r, n/g, 1, w), or (r, n), from `vt` (r, g*N)."""
    if len(shape) == 2:
        return vt
    return vt.reshape(-1, groups, shape[1], 1, shape[3]).transpose(0, 1).reshape(-1, shape[1], 1, shape[3])


def second_weight(ut: torch.Tensor, shape: Shape, groups: int = 1) -> torch.Tensor:
    """Return the weight of the layer that runs second: (m, r, h, 1), or (m, r), from `ut` (r, g*M)."""
    if len(shape) == 2:
        return ut.mT
    r, m, h = ut.shape[0], shape[0], shape[2]
    return ut.reshape(r, m, h, 1).transpose(0, 1)


def frobenius_penalty(ut: torch.Tensor, vt: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Return |U Vᵀ|² (0-d) as sum((UᵀU) * (VᵀV)): two r x r matrices instead of one M x N, value and gradient alike."""
    u, v = blocks(ut, groups), blocks(vt, groups)
    return ((u @ u.mT) * (v @ v.mT)).sum()


def round_half_up(value: float) -> int:
    """Return the nearest integer; halves go up, where Python's `round` goes to even."""
    return math.floor(value + 0.5)


# The names are what `fedhm.rank-rule` takes. Arguments: rank ratio, outputs of one group, M, N.
RANK_RULES: dict[str, Callable[[float, int, int, int], int]] = {
    "outputs": lambda ratio, m, rows, columns: round_half_up(ratio * m),  # the authors' figures
    "full-rank": lambda ratio, m, rows, columns: round_half_up(ratio * min(rows, columns)),  # the paper's text
    "parameters": lambda ratio, m, rows, columns: math.floor(ratio * rows * columns / (rows + columns)),
}


def rank_of(layer: Layer, rank_ratio: float, rule: str = "outputs") -> int:
    """Return the layer's rank (of each group's block) at `rank_ratio`: at least 1, at most min(M, N).

    Raises:
        ValueError: ratio outside (0, 1], or an unknown rule.
    """
    if not 0 < rank_ratio <= 1:
        raise ValueError(f"rank ratio {rank_ratio} is not within (0, 1]")
    if rule not in RANK_RULES:
        raise ValueError(f"rank rule {rule!r} is unknown; choose one of {', '.join(RANK_RULES)}")
    groups = groups_of(layer)
    rows, columns = matrix_size(tuple(layer.weight.shape), groups)
    return min(max(1, RANK_RULES[rule](rank_ratio, layer.weight.shape[0] // groups, rows, columns)), rows, columns)


def break_even(layer: Layer) -> float:
    """Return the rank from which the two layers hold as many parameters as the one: M*N / (M+N)."""
    rows, columns = matrix_size(tuple(layer.weight.shape), groups_of(layer))
    return rows * columns / (rows + columns)


def groups_of(layer: nn.Module) -> int:
    """Return the layer's groups, 1 for a Linear."""
    return layer.groups if isinstance(layer, nn.Conv2d) else 1


def refusal(layer: nn.Module) -> str:
    """Return why this layer cannot be factorized, or an empty string.

    Subclasses are refused: they may compute something else, or be read by their owner without being called.
    """
    if type(layer) is nn.Conv2d:
        depthwise = layer.groups > 1 and layer.groups == layer.in_channels
        return "depthwise: its blocks are as thin as their factors" if depthwise else ""
    return "" if type(layer) is nn.Linear else f"{type(layer).__name__} is neither a Conv2d nor a Linear"


class Factored(nn.Sequential):
    """`v`, then `u`: two Conv2d, (1, w) then (h, 1), or two Linear; nothing between them, the bias on `u`.

    `weight` and `bias` are what the one layer would hold, for owners that read them instead of calling the layer.
    """

    v: nn.Conv2d | nn.Linear
    u: nn.Conv2d | nn.Linear

    def __init__(self, v: Layer, u: Layer) -> None:
        super().__init__(OrderedDict(v=v, u=u))

    @property
    def rank(self) -> int:
        return self.u.weight.shape[1]

    @property
    def groups(self) -> int:
        return groups_of(self.u)

    @property
    def shape(self) -> Shape:
        """Shape of the one layer's weight."""
        v, u = self.v.weight.shape, self.u.weight.shape
        return (u[0], v[1]) if len(u) == 2 else (u[0], v[1], u[2], v[3])

    @property
    def weight(self) -> torch.Tensor:
        return roll(product(*self.factors(), self.groups), self.shape)

    @property
    def bias(self) -> torch.Tensor | None:
        return self.u.bias

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `ut` (r, g*M) and `vt` (r, g*N), differentiable."""
        u, v, r = self.u.weight, self.v.weight, self.rank
        if u.dim() == 2:
            return u.mT, v
        return u.transpose(0, 1).reshape(r, -1), v.reshape(self.groups, r, -1).transpose(0, 1).reshape(r, -1)

    @torch.no_grad()
    def load_factors(self, ut: torch.Tensor, vt: torch.Tensor) -> None:
        """Take over `ut` (r, g*M) and `vt` (r, g*N); raises ValueError on another shape."""
        for name, given, own in zip(("ut", "vt"), (ut, vt), self.factors(), strict=True):
            if given.shape != own.shape:
                raise ValueError(f"{name} is {tuple(given.shape)}, this layer needs {tuple(own.shape)}")
        self.u.weight.copy_(second_weight(ut, self.shape, self.groups))
        self.v.weight.copy_(first_weight(vt, self.shape, self.groups))

    def frobenius_penalty(self) -> torch.Tensor:
        """Return |U Vᵀ|² (0-d, differentiable)."""
        return frobenius_penalty(*self.factors(), self.groups)


def factorize(layer: Layer, rank: int, *, spectral: bool = True) -> Factored:
    """Return the two layers that replace `layer`, equal to it at full rank, else its best approximation.

    Dtype, device, training mode and what requires gradients are kept; half precision is decomposed in float32.

    Args:
        layer: a Conv2d (any kernel, stride, padding, dilation, groups, bias) or Linear.
        rank: rank of each group's block.
        spectral: start from the SVD; without, factors are zero until `load_factors`.

    Raises:
        ValueError: the layer cannot be factorized, the rank does not fit, or a weight is not finite.
    """
    if reason := refusal(layer):
        raise ValueError(f"cannot factorize this layer: {reason}")
    groups = groups_of(layer)
    largest = min(matrix_size(tuple(layer.weight.shape), groups))
    if not 1 <= rank <= largest:
        raise ValueError(f"rank {rank} is not within 1..{largest} for a weight {tuple(layer.weight.shape)} with {groups} group(s)")
    thin = Factored(*_two_layers(layer, rank))
    weight = layer.weight.detach()
    with torch.no_grad():
        thin.u.weight.zero_()
        thin.v.weight.zero_()
        if layer.bias is not None and thin.u.bias is not None:
            thin.u.bias.copy_(layer.bias)
            thin.u.bias.requires_grad_(layer.bias.requires_grad)
    if spectral:
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("cannot factorize this layer: its weight holds NaN or infinity")
        matrix = unroll(weight.to(torch.promote_types(weight.dtype, torch.float32)), groups)
        factors = pack(full_svd(matrix), rank, squared_norm(matrix))
        thin.load_factors(factors.ut, factors.vt)
    thin.u.weight.requires_grad_(layer.weight.requires_grad)
    thin.v.weight.requires_grad_(layer.weight.requires_grad)
    return thin.train(layer.training)


def recompose(thin: Factored) -> Layer:
    """Return the one Conv2d or Linear that computes what `thin` does; the inverse of `factorize`."""
    u, v, weight = thin.u, thin.v, thin.weight
    place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype, "bias": u.bias is not None}
    layer: Layer
    if isinstance(u, nn.Conv2d) and isinstance(v, nn.Conv2d):
        pairs = {k: (getattr(u, k)[0], getattr(v, k)[1]) for k in ("kernel_size", "stride", "dilation")}
        padding = u.padding if isinstance(u.padding, str) else (u.padding[0], v.padding[1])
        channels = (v.in_channels, u.out_channels)
        place |= {"groups": u.groups, "padding_mode": u.padding_mode, "padding": padding, **pairs}
        layer = nn.utils.skip_init(nn.Conv2d, *channels, **place)
    else:
        layer = nn.utils.skip_init(nn.Linear, *reversed(thin.shape), **place)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None and u.bias is not None:
            layer.bias.copy_(u.bias)
            layer.bias.requires_grad_(u.bias.requires_grad)
    layer.weight.requires_grad_(u.weight.requires_grad)
    return layer.train(thin.training)


def _two_layers(layer: Layer, rank: int) -> tuple[Layer, Layer]:
    """Return `v` and `u` with uninitialised weights: skip_init draws nothing from the global generator."""
    place: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        v = nn.utils.skip_init(nn.Linear, layer.in_features, rank, bias=False, **place)
        return v, nn.utils.skip_init(nn.Linear, rank, layer.out_features, bias=bias, **place)
    (h, w), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    padding = layer.padding
    pad_v, pad_u = (padding, padding) if isinstance(padding, str) else ((0, padding[1]), (padding[0], 0))
    middle = layer.groups * rank
    place |= {"groups": layer.groups, "padding_mode": layer.padding_mode}
    v = nn.utils.skip_init(
        nn.Conv2d, layer.in_channels, middle, (1, w), stride=(1, sw), padding=pad_v, dilation=(1, dw), bias=False, **place
    )
    u = nn.utils.skip_init(
        nn.Conv2d, middle, layer.out_channels, (h, 1), stride=(sh, 1), padding=pad_u, dilation=(dh, 1), bias=bias, **place
    )
    return v, u
