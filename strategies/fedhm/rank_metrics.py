"""How much of its rank a layer still uses: plain averaging shrinks what the smallest tier cannot hold, every round."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from strategies.fedhm.decompose import Factors


def effective_rank(factors: Factors, full_rank: int) -> float:
    """Return exp(entropy of p), p_i = sigma_i^2 / |W|^2: 1 for one direction, n for n equal ones; a zero layer has 0.

    The directions of all groups count, as those of one block-diagonal matrix. What lies beyond the computed ones is
    spread evenly over the rest, which makes this an upper bound; it is exact where that rest is empty or has no energy.

    Args:
        factors: the layer's, at any rank.
        full_rank: min(M, N) of one group's block.
    """
    if factors.energy <= 0:
        return 0.0
    p = factors.sigma.square().flatten() / factors.energy
    left, rest = (full_rank - factors.rank) * factors.sigma.shape[1], 1.0 - float(p.sum())
    tail = rest * math.log(left / rest) if left > 0 and rest > 0 else 0.0
    return math.exp(float(torch.special.entr(p).sum()) + tail)


def stable_rank(factors: Factors) -> float:
    """Return |W|^2 / sigma_1^2, at least 1, with the largest sigma of all groups; a zero layer has 0."""
    top = float(factors.sigma.max())
    return factors.energy / top**2 if top > 0 else 0.0


def energy_beyond(factors: Factors, ranks: Iterable[int]) -> dict[int, float]:
    """Return, for each rank, the share of |W|^2 that its truncation drops, in [0, 1]; raises ValueError beyond the factors' rank."""
    shares: dict[int, float] = {}
    for rank in ranks:
        factors.prefix(rank)
        held = float(factors.sigma[:rank].square().sum())
        shares[rank] = max(0.0, 1.0 - held / factors.energy) if factors.energy > 0 else 0.0
    return shares
