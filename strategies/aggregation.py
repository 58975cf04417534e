"""Weighted mean of named tensors, folded one reply at a time, with bits that do not depend on the order.

Floating-point sums depend on their order, and replies arrive in any order. Each contribution w*v is
therefore rounded once to a multiple of 2^-36 and summed in int64, which is associative: the mean is the
same to the last bit whoever answers first, and no reply has to be kept. The rounding is at most 2^-37
(7e-12) a contribution; float32 itself is coarser from |v| = 2.5e-4 on.
"""

from __future__ import annotations

import math

import torch

from strategies.messages import Tensors, largest_of

_FRACTION = 36
_MAX_VALUE = 2.0**24  # |v|; with total weight <= 2^2 the sum stays below 2^62 units
_MAX_TOTAL_WEIGHT = 4.0
_GROWTH = 1e3  # a round takes the largest weight at most so far beyond 1, or beyond the largest that was sent


class UpdateError(ValueError):
    """A node's update cannot be folded; the message names the key and what is wrong with it."""


def check_update(tensors: Tensors, like: Tensors) -> None:
    """Raise UpdateError unless names, shapes and dtypes equal those of `like` and every value is finite and < 2^24."""
    missing, extra = sorted(like.keys() - tensors.keys()), sorted(tensors.keys() - like.keys())
    if missing or extra:
        raise UpdateError(f"layout differs: missing {missing or 'none'}, unexpected {extra or 'none'}")
    for name, tensor in tensors.items():
        expected = like[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise UpdateError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(expected.shape)} {expected.dtype}")
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        largest = largest_of(tensor)
        if not math.isfinite(largest):
            raise UpdateError(f"{name} holds NaN or infinity: training diverged, lower train.learning-rate")
        if largest >= _MAX_VALUE:
            raise UpdateError(f"{name} holds {largest:.3g} (limit {_MAX_VALUE:.3g}): training diverged, lower train.learning-rate")


def check_growth(tensors: Tensors, sent: Tensors) -> None:
    """Raise UpdateError where a matrix or convolution grew to a thousand times 1 or of what was sent: it diverged, if to finite numbers.

    Vectors may grow: running variances of inputs in large units do.
    """
    for name, tensor in tensors.items():
        if tensor.dim() >= 2 and tensor.is_floating_point() and tensor.numel():
            refuse_growth(name, largest_of(tensor), largest_of(sent[name]))


def refuse_growth(name: str, largest: float, before: float) -> None:
    """Raise UpdateError where `largest` is beyond reason for what was `before` in the round's start."""
    if largest >= _GROWTH * max(1.0, before):
        raise UpdateError(f"{name} grew from {before:.3g} to {largest:.3g}: training diverged, lower train.learning-rate")


class WeightedMean:
    """sum_k w_k v_k / sum_k w_k over named tensors, folded one update at a time, independent of the order.

    Floating tensors are averaged; integer and boolean tensors (counters, masks) are never averaged: the
    element-wise maximum is kept. Memory: 8 bytes for each floating element, whatever the number of updates.

    Args:
        like: names, shapes and dtypes of every update; the result has these dtypes.
        scale: a weight's unit; weights divided by it must sum to at most 4 (pass the expected total).
    """

    def __init__(self, like: Tensors, scale: float = 1.0) -> None:
        if not scale > 0 or not math.isfinite(scale):
            raise ValueError(f"scale must be a positive number, not {scale}")
        self._like, self._scale = like, scale
        self._sums = {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in like.items() if t.is_floating_point()}
        self._largest: Tensors = {}
        self._weights: list[float] = []

    @property
    def count(self) -> int:
        """Number of updates folded."""
        return len(self._weights)

    def add(self, tensors: Tensors, weight: float) -> None:
        """Fold one update.

        Raises:
            UpdateError: the layout, a value or the weight does not fit; nothing has been folded then.
        """
        share = weight / self._scale
        if not share > 0 or not math.isfinite(share) or math.fsum([*self._weights, share]) > _MAX_TOTAL_WEIGHT:
            raise UpdateError(f"weight {weight} is not usable (expected total {self._scale})")
        check_update(tensors, self._like)
        self._weights.append(share)
        for name, tensor in tensors.items():
            if name in self._sums:
                self._sums[name] += tensor.to("cpu", torch.float64).mul(share * 2.0**_FRACTION).round_().to(torch.int64)
            else:
                value = tensor.to("cpu")
                self._largest[name] = torch.maximum(self._largest[name], value) if name in self._largest else value.clone()

    def result(self) -> Tensors:
        """Return new tensors that hold the mean; raises ValueError when nothing was folded."""
        if not self._weights:
            raise ValueError("no update was folded")
        total = math.fsum(sorted(self._weights)) * 2.0**_FRACTION
        mean: Tensors = {}
        for name, like in self._like.items():
            if name in self._sums:
                mean[name] = (self._sums[name].to(torch.float64) / total).to(like.dtype)
            else:
                mean[name] = self._largest[name]
        return mean
