"""The server's average of lifted replies: W = sum_p alpha_p lift(reply_p), and what the full model keeps beyond it.

Replies are folded as they arrive and none is kept; the sums are of `strategies.fedhm.sums`, so that the result has the
same bits whoever replies first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from strategies.aggregation import UpdateError, check_update, refuse_growth
from strategies.fedhm.decompose import Factors, squared_norm
from strategies.fedhm.lowrank import blocks, roll
from strategies.fedhm.plan import Absent, LowRank, Part, Plan, Tensors, layout, lift
from strategies.fedhm.sums import UNIT, FixedSum, fixed
from strategies.messages import largest_of

_MAX_VALUE = 2.0**24
_CHUNK = 2**16  # elements rounded at a time: small enough to stay in the cache, four times faster than all at once
_MAX_TOTAL_WEIGHT = 4.0

Stack = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Merged:
    """A round's result.

    Attributes:
        state: the new full tensors.
        stacks: for parameters whose every contribution was low-rank, and few: all factors side by side,
            us (M, K) and vs (N, K) (leading axis g with groups), W = us vsᵀ; for `decompose.stacked_svd`.
    """

    state: dict[str, torch.Tensor]
    stacks: dict[str, Stack]


@dataclass
class _Sum:
    """Running sums of one parameter.

    Attributes:
        total: contiguous in the order (m, h, n, w), in which a group's block is a plain (M, N) view.
        weights: of contributions that cover everything.
        partial: int64 in the parameter's shape: weights of index products; None while there are none.
        thin: (rank, weight) of the low-rank contributions.
        stack: (key, ut, vt, weight) of them; None once they are no longer the shorter description.
    """

    total: FixedSum
    weights: list[float] = field(default_factory=list)
    partial: torch.Tensor | None = None
    thin: list[tuple[int, float]] = field(default_factory=list)
    groups: int = 1
    stack: list[tuple[str, torch.Tensor, torch.Tensor, float]] | None = field(default_factory=list)


class Merger:
    """Folds replies one at a time; `result` is the new full state.

    With `keep` = 0 this is the paper's average. A node of rank r never saw the directions of W beyond r, and its
    product counts as zero there, so plain averaging shrinks them every round. With 0 < keep <= 1 the node's unseen part
    W - trunc_r(W) counts `keep` times instead: W <- sum_p alpha_p (U_p V_pᵀ + keep (W - trunc_{r_p}(W))). At 1 that is
    delta aggregation, W <- W + sum_p alpha_p (U_p V_pᵀ - trunc_{r_p}(W)); between, delta with decay. Both full-rank
    replies and dense parameters are as in the paper.

    Args:
        state: full tensors of the round's start; what no reply covers keeps its value from here.
        keep: in [0, 1].
        sent: parameter name -> factors as the nodes received them (after rounding to the transport dtype);
            needed where keep > 0.
        scale: the weights' unit; weights divided by it must sum to at most 4 (shares summing to 1 need none).
    """

    def __init__(self, state: Tensors, *, keep: float = 0.0, sent: Mapping[str, Factors] | None = None, scale: float = 1.0) -> None:
        if not 0 <= keep <= 1:
            raise ValueError(f"keep = {keep} is not within [0, 1]")
        if not scale > 0 or not math.isfinite(scale):
            raise ValueError(f"scale must be a positive number, not {scale}")
        self._state, self._keep, self._sent, self._scale = state, keep, sent or {}, scale
        self._sums = {name: _Sum(FixedSum.zeros(_order(t.shape))) for name, t in state.items() if t.is_floating_point()}
        self._weights: list[float] = []

    def fold(self, tensors: Tensors, plan: Plan, weight: float, key: str = "") -> None:
        """Fold one reply.

        Args:
            tensors: laid out as `plan.layout` says.
            plan: the node's plan of this round.
            weight: > 0, in units of `scale`.
            key: the node's name; orders the stacks.

        Raises:
            UpdateError: layout, value or weight does not fit, naming the key; nothing has been folded then.
        """
        share = weight / self._scale
        if not share > 0 or math.fsum([*self._weights, share]) > _MAX_TOTAL_WEIGHT:
            raise UpdateError(f"weight {weight} is not usable (unit {self._scale})")
        check_update(dict(tensors), layout(self._state, plan))
        for name, part in plan.items():
            self._check_part(tensors, name, part)
        self._weights.append(share)
        for name, part in plan.items():
            if isinstance(part, LowRank):
                self._fold_factors(self._sums[name], tensors[f"{name}.ut"], tensors[f"{name}.vt"], part, share, key)
            elif not isinstance(part, Absent):
                self._fold_dense(self._sums[name], tensors, name, part, share)

    def result(self) -> Merged:
        """Return the new state and stacks, and let go of the sums; raises ValueError when nothing was folded."""
        if not self._weights:
            raise ValueError("no reply was folded")
        state, stacks = {}, {}
        for name, previous in self._state.items():
            if name not in self._sums:
                state[name] = previous
                continue
            running = self._sums.pop(name)
            if running.stack and self._keep == 0:
                stacks[name] = _side_by_side(running)
            state[name] = self._mean(name, running, previous)
        self._weights = []
        return Merged(state, stacks)

    def _check_part(self, tensors: Tensors, name: str, part: Part) -> None:
        if not isinstance(part, Absent) and name not in self._sums:
            raise UpdateError(f"{name} is {self._state[name].dtype}: counters and masks are never averaged")
        if isinstance(part, LowRank):
            largest = _largest_product(tensors[f"{name}.ut"], tensors[f"{name}.vt"])
            if largest >= _MAX_VALUE:
                raise UpdateError(f"{name}: the factors' product may reach {largest:.3g}, lower train.learning-rate")
            refuse_growth(f"{name} (the factors' product)", largest, largest_of(self._state[name]))
            if self._keep and (name not in self._sent or self._sent[name].rank < part.rank):
                raise ValueError(f"{name}: keep = {self._keep} needs the factors that were sent, at rank {part.rank} at least")

    def _fold_factors(self, running: _Sum, ut: torch.Tensor, vt: torch.Tensor, part: LowRank, share: float, key: str) -> None:
        columns = vt.shape[1] // part.groups
        running.total.reserve(share * _largest_product(ut, vt))
        sums = running.total.viewed(lambda x: x.view(part.groups, -1, columns))
        rows, step = sums.high.shape[1], max(1, _CHUNK // columns)
        for group, (u, v) in enumerate(zip(_by_group(_wide(ut), part.groups), _by_group(_wide(vt), part.groups), strict=True)):
            for start in range(0, rows, step):
                sums.add((group, slice(start, start + step)), fixed(u[:, start : start + step].mT @ v, share))
        running.weights.append(share)
        running.thin.append((part.rank, share))
        running.groups = part.groups
        if running.stack is not None:
            running.stack.append((key, ut, vt, share))
            if self._keep or sum(rank for rank, _ in running.thin) > min(rows, columns) // 3:
                running.stack = None

    def _fold_dense(self, running: _Sum, tensors: Tensors, name: str, part: Part, share: float) -> None:
        shape = self._state[name].shape
        lifted = lift(tensors, name, part, shape)
        if lifted is None:
            return
        running.stack = None
        if lifted.value.numel():
            running.total.reserve(share * largest_of(lifted.value))
        if lifted.cover is None:
            _accumulate(running.total, lifted.value, share)
            running.weights.append(share)
            return
        target = running.total.viewed(lambda x: roll(x, tuple(shape))) if len(shape) == 4 else running.total
        mesh = lifted.cover.mesh(shape)
        target.add(mesh, fixed(lifted.value, share))
        if running.partial is None:
            running.partial = torch.zeros(shape, dtype=torch.int64)
        running.partial[mesh] += round(share * UNIT)

    def _mean(self, name: str, running: _Sum, previous: torch.Tensor) -> torch.Tensor:
        """Return the new value, made a few outputs at a time: whole layers in float64 were most of the server's peak."""
        weight = math.fsum(sorted(running.weights))
        if running.partial is None and not weight:
            return previous
        value = torch.empty(previous.shape, dtype=previous.dtype)
        total = running.total.viewed(lambda x: _outputs_first(x, ordered=True))
        target, old = _outputs_first(value), _outputs_first(previous)
        partial = None if running.partial is None else _outputs_first(running.partial)
        unseen = self._unseen(name, running) if self._keep and running.thin else None
        for part in _parts(total.high, running.groups):
            mean = total.read(part).div_(UNIT)
            if unseen is not None:
                unseen.add_to(mean, part, old[part])
            if partial is None:
                target[part] = mean.div_(weight)
            else:
                weights = partial[part].to(torch.float64).div_(UNIT).add_(weight)
                target[part] = torch.where(weights > 0, mean / weights, old[part].to(torch.float64))
        return value

    def _unseen(self, name: str, running: _Sum) -> _Unseen:
        ut, vt = (_wide(x).to(torch.float64) for x in self._sent[name].prefix(max(rank for rank, _ in running.thin)))
        seen = [math.fsum(sorted(w for rank, w in running.thin if rank > i)) for i in range(len(ut))]
        ut = ut * torch.tensor(seen, dtype=torch.float64).mul_(-self._keep).unsqueeze(1)
        whole = math.fsum(sorted(w for _, w in running.thin))
        outputs = len(running.total.high) // running.groups
        return _Unseen(_by_group(ut, running.groups), _by_group(vt, running.groups), whole * self._keep, outputs)


@dataclass(frozen=True)
class _Unseen:
    """keep * sum_p w_p (W - trunc_{r_p}(W)) of one layer, by one product: direction i was seen by the ranks beyond i.

    Attributes:
        ut: one (r, M) float64 a group, row i times -keep and the weight of those who saw direction i; `vt` (r, N) likewise, as sent.
        whole: keep times all weights.
        outputs: of one group.
    """

    ut: list[torch.Tensor]
    vt: list[torch.Tensor]
    whole: float
    outputs: int

    def add_to(self, mean: torch.Tensor, part: slice, old: torch.Tensor) -> None:
        """Add the outputs `part`, which lie in one group, to `mean`; `old` are those of W."""
        group, first = divmod(part.start, self.outputs)
        height = self.ut[group].shape[1] // self.outputs
        rows = self.ut[group][:, first * height : (first + len(mean)) * height]
        mean += (rows.mT @ self.vt[group]).reshape(mean.shape)
        mean.add_(old, alpha=self.whole)


def squared_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b|², summed in float64 without copies of their size."""
    pairs = zip(a.flatten().split(_CHUNK), b.flatten().split(_CHUNK), strict=True)
    return math.fsum(squared_norm(p - q) for p, q in pairs)


def _outputs_first(x: torch.Tensor, *, ordered: bool = False) -> torch.Tensor:
    """Return a view in the order of `_order`, with an axis also where there is none."""
    return x.reshape(1) if x.dim() == 0 else x.transpose(1, 2) if x.dim() == 4 and not ordered else x


def _parts(total: torch.Tensor, groups: int) -> Iterator[slice]:
    """Yield the outputs a few at a time, never of two groups."""
    outputs, step = len(total) // groups, max(1, _CHUNK // max(1, total[:1].numel()))
    for end in range(outputs, len(total) + 1, max(1, outputs)):
        for start in range(end - outputs, end, step):
            yield slice(start, min(start + step, end))


def _by_group(rows: torch.Tensor, groups: int) -> list[torch.Tensor]:
    """(r, g*M) -> g times (r, M); views."""
    return list(rows.reshape(rows.shape[0], groups, -1).unbind(1))


def _order(shape: torch.Size) -> torch.Size:
    """Return (m, h, n, w) for (m, n, h, w); other shapes as they are."""
    return torch.Size((shape[0], shape[2], shape[1], shape[3])) if len(shape) == 4 else shape


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu", torch.promote_types(x.dtype, torch.float32))


def _accumulate(total: FixedSum, value: torch.Tensor, share: float) -> None:
    target, added = total.viewed(lambda x: _outputs_first(x, ordered=True)), _outputs_first(value)
    rows = max(1, _CHUNK // max(1, added[:1].numel()))
    for start in range(0, len(added), rows):
        part = slice(start, start + rows)
        target.add(part, fixed(added[part].contiguous(), share))


def _largest_product(ut: torch.Tensor, vt: torch.Tensor) -> float:
    """Return what no entry of the product exceeds: the product of the longest columns (Cauchy-Schwarz)."""
    longest = (torch.linalg.vector_norm(x, dim=0, dtype=torch.float64).max() for x in (ut, vt))
    return math.prod(map(float, longest))


def _side_by_side(running: _Sum) -> Stack:
    whole = math.fsum(sorted(running.weights))
    ordered = sorted(running.stack or [], key=lambda entry: entry[0])
    us = torch.cat([_wide(ut) * math.sqrt(share / whole) for _, ut, _, share in ordered])
    vs = torch.cat([_wide(vt) * math.sqrt(share / whole) for _, _, vt, share in ordered])
    return blocks(us, running.groups).mT, blocks(vs, running.groups).mT
