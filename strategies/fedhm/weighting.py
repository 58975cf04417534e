"""How much each node's model counts in the merge: alpha of FedHM's aggregation, section 3 of the paper, and variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_LEAST = 2.0**-20  # of the largest weight: fixed-point sums would lose smaller ones

# Rank ratio, temperature -> logarithm of the weight. The names are what `fedhm.weighting` takes.
SCHEMES: dict[str, Callable[[float, float], float]] = {
    "paper": lambda ratio, temperature: ratio / temperature,
    "code": lambda ratio, temperature: -1.0 / ratio / temperature,
    "uniform": lambda ratio, temperature: 0.0,
}


def shares(
    rank_ratios: Sequence[float], *, scheme: str = "paper", temperature: float = 1.0, num_examples: Sequence[int] | None = None
) -> list[float]:
    """Return each node's alpha, summing to 1 over the nodes given: pass those that replied, or renormalise later.

    - "paper": softmax(ratio / temperature);
    - "code": softmax(-divisor / temperature), divisor = 1 / ratio, as the authors' program does (1; 5 in places);
    - "uniform": equal, as it does where tiers are fixed.

    No weight is less than 2^-20 of the largest.

    Args:
        rank_ratios: of the nodes, each in (0, 1].
        scheme: a name in `SCHEMES`.
        temperature: > 0; larger is closer to uniform.
        num_examples: training samples of the nodes, > 0: multiplies the weights; None: they do not count.

    Raises:
        ValueError: an empty list, an unknown scheme, or a value out of range.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"weighting {scheme!r} is unknown; choose one of {', '.join(SCHEMES)}")
    if not rank_ratios:
        raise ValueError("no node replied, so there is nothing to weigh")
    if not temperature > 0 or not math.isfinite(temperature):
        raise ValueError(f"temperature {temperature} is not a positive number")
    counts = [1] * len(rank_ratios) if num_examples is None else list(num_examples)
    logs = []
    for ratio, count in zip(rank_ratios, counts, strict=True):
        if not 0 < ratio <= 1:
            raise ValueError(f"rank ratio {ratio} is not within (0, 1]")
        if count <= 0:
            raise ValueError(f"{count} samples cannot be a weight")
        logs.append(SCHEMES[scheme](ratio, temperature) + math.log(count))
    weights = [max(math.exp(log - max(logs)), _LEAST) for log in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
