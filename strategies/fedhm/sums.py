"""Sums of a tensor whose bits do not depend on the order, in six bytes an element.

As in `strategies.aggregation`, every contribution is rounded once to a multiple of 2^-36 and summed as an integer.
Weights are small: the sum is kept as 2^16 high + low, high in int32 and low in int16, as long as it is sure to stay
below 2^10, and in int64 from then on. Both hold the same integers, so that the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

UNIT = 2.0**36
_HALF, _FULL, _CHUNK = 2**15, 2**16, 2**16
_NARROW = 2.0**10  # bound of the sum's size: half of what 48 bits hold at 2^36 units for 1

Where = slice | tuple[torch.Tensor | slice | int, ...]


def fixed(value: torch.Tensor, share: float) -> torch.Tensor:
    """Return share * value in units of 2^-36, rounded, as a new float64 tensor."""
    return value.to("cpu", torch.float64).mul(share * UNIT).round_()


@dataclass
class FixedSum:
    """A running sum, or a view of one.

    Attributes:
        high: int32, or int64 and then the sum itself.
        low: int16, in [-2^15, 2^15); None where `high` is the sum itself.
        bound: of the size of any element.
    """

    high: torch.Tensor
    low: torch.Tensor | None
    bound: float = 0.0

    @classmethod
    def zeros(cls, shape: torch.Size) -> FixedSum:
        """Return a sum of nothing."""
        return cls(torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int16))

    def reserve(self, size: float) -> None:
        """Make room for one more contribution of which no element exceeds `size`; call it before views are taken."""
        self.bound += size
        if self.low is not None and self.bound >= _NARROW:
            whole, flat = torch.empty(self.high.shape, dtype=torch.int64), self.viewed(lambda x: x.view(-1))
            for start in range(0, whole.numel(), _CHUNK):
                part = slice(start, start + _CHUNK)
                whole.view(-1)[part] = flat.read(part).to(torch.int64)
            self.high, self.low = whole, None

    def viewed(self, view: Callable[[torch.Tensor], torch.Tensor]) -> FixedSum:
        """Return the sum seen through `view`, which must return a view."""
        return FixedSum(view(self.high), None if self.low is None else view(self.low), self.bound)

    def add(self, where: Where, units: torch.Tensor) -> None:
        """Add `units` (as `fixed` makes them; overwritten) to the elements at `where`."""
        if self.low is None:
            self.high[where] += units.to(torch.int64)
            return
        # In float64, which holds these integers exactly and for which the CPU has the wider instructions.
        units += self.read(where)
        high = units.add(_HALF).mul_(1 / _FULL).floor_()
        self.high[where] = high.to(torch.int32)
        self.low[where] = units.sub_(high, alpha=_FULL).to(torch.int16)

    def read(self, where: Where) -> torch.Tensor:
        """Return the sum at `where` in units of 2^-36 as float64: exact below 2^53, which is 2^17 in value."""
        high = self.high[where].to(torch.float64)
        return high if self.low is None else high.mul_(_FULL).add_(self.low[where])
