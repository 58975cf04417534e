"""Redistribution: each layer decomposed once a round at the largest rank anybody needs; every tier is a prefix.

Which way, with `svd = "auto"`: stacked factors where every reply was low-rank and few; subspace iteration from the
last round's basis where there is one; else Gram matrix with Rayleigh-Ritz. "exact" uses the last or a full SVD,
"naive" one full SVD for each tier, as the authors' program does, to compare with.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from strategies.fedhm.decompose import OVERSAMPLING, Factors, Triple, full_svd, gram_svd, pack, squared_norm, stacked_svd, warm_svd
from strategies.fedhm.lowrank import matrix_size, unroll

Method = Literal["auto", "exact", "naive"]
T = TypeVar("T")
R = TypeVar("R")

_FULL_SHARE = 0.75  # of min(M, N): from there on a full SVD costs no more than the truncated ways


@dataclass(frozen=True)
class Layer:
    """One weight to decompose.

    Attributes:
        weight: (m, n) or (m, n/g, h, w), floating; half precision is decomposed in float32.
        ranks: distinct ranks needed, largest first.
        groups: of the convolution.
        stack: `us` (.., M, K) and `vs` (.., N, K) with W = us vsᵀ, where `merge.Merger` could keep them.
    """

    weight: torch.Tensor
    ranks: tuple[int, ...]
    groups: int = 1
    stack: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def size(self) -> tuple[int, int]:
        return matrix_size(tuple(self.weight.shape), self.groups)

    @property
    def cost(self) -> int:
        rows, columns = self.size
        return self.groups * rows * columns * min(rows, columns)

    @property
    def directions(self) -> int:
        return min(self.ranks[0] + OVERSAMPLING, *self.size)


class Decomposer:
    """Decomposes layers and remembers each one's basis for the next round.

    The bases are state: without them a resumed run differs from the straight one (within the tolerance).

    Args:
        method: "auto", "exact" or "naive".
        tolerance: of the subspace iteration, in (0, 1): 0.02, or 0.002 to be strict.
        floor: see `decompose.pack`; 0 gives balanced factors.
        workers: layers decomposed at a time, one torch thread each; 0: as many as torch has threads now.

    Attributes:
        used: layer name -> way taken in the last call ("stacked", "warm", "gram", "full").
    """

    def __init__(self, method: Method = "auto", *, tolerance: float = 0.02, floor: float = 0.0, workers: int = 0) -> None:
        if method not in ("auto", "exact", "naive"):
            raise ValueError(f"svd = {method!r} is unknown; choose one of auto, exact, naive")
        if not 0 < tolerance < 1 or not 0 <= floor < 1:
            raise ValueError(f"tolerance {tolerance} must be in (0, 1), floor {floor} in [0, 1)")
        self.method, self.tolerance, self.floor, self.workers = method, tolerance, floor, workers
        self.used: dict[str, str] = {}
        self._bases: dict[str, torch.Tensor] = {}

    def __call__(self, layers: Mapping[str, Layer]) -> dict[str, Factors]:
        """Return name -> factors at the largest of the layer's ranks.

        Raises:
            ValueError: a weight is not finite or a rank does not fit, naming the layer.
        """
        for name, layer in layers.items():
            if not 1 <= layer.ranks[-1] <= layer.ranks[0] <= min(layer.size):
                raise ValueError(f"{name!r}: ranks {layer.ranks} are not within 1..{min(layer.size)}, largest first")
        batches = _batches(layers)
        found: dict[str, Factors] = {}
        for part in in_threads(self._decompose, batches, self.workers):
            for name, (factors, way, basis) in part.items():
                found[name], self.used[name] = factors, way
                if basis is not None:
                    self._bases[_key(name, layers[name])] = basis
        self._forget(layers)
        return {name: found[name] for name in layers}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the bases; the key holds name, size and directions, so that a changed layer does not match."""
        return dict(self._bases)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over bases; one that fits no layer is dropped at the next call."""
        self._bases = {key: basis.clone() for key, basis in state.items()}

    def _forget(self, layers: Mapping[str, Layer]) -> None:
        keys = {_key(name, layer) for name, layer in layers.items()}
        self._bases = {key: basis for key, basis in self._bases.items() if key in keys}
        self.used = {name: self.used[name] for name in layers}

    def _decompose(self, batch: Mapping[str, Layer]) -> dict[str, tuple[Factors, str, torch.Tensor | None]]:
        """Decompose layers of one shape together (one layer, except on an accelerator)."""
        first = next(iter(batch.values()))
        matrices = {name: _matrix(name, layer) for name, layer in batch.items()}
        stacked = torch.stack([m for m, _ in matrices.values()]) if len(batch) > 1 else next(iter(matrices.values()))[0]
        bases = [self._bases.get(_key(name, layer)) for name, layer in batch.items()]
        known = [b.to(stacked) for b in bases if b is not None]
        basis = None
        if len(known) == len(bases):
            basis = torch.stack(known) if len(batch) > 1 else known[0]
        triple, way = self._triple(stacked, first, basis)
        results = {}
        for i, (name, (_, energy)) in enumerate(matrices.items()):
            u, s, v = (t[i] for t in triple) if len(batch) > 1 else triple
            factors = pack((u, s, v), first.ranks[0], energy, self.floor)
            kept = v[..., : first.directions].to("cpu").contiguous() if self.method == "auto" else None
            results[name] = (factors, way, kept if kept is not None and kept.shape[-1] == first.directions else None)
        return results

    def _triple(self, a: torch.Tensor, layer: Layer, basis: torch.Tensor | None) -> tuple[Triple, str]:
        rank, side = layer.ranks[0], min(layer.size)
        if self.method == "naive":
            for _ in layer.ranks[1:]:
                full_svd(a)
            return full_svd(a), "full"
        if self.method == "auto" and layer.stack is not None and rank <= layer.stack[0].shape[-1] <= side // 3:
            us, vs = (x.to(a) for x in layer.stack)
            return stacked_svd(us, vs), "stacked"
        if layer.directions > _FULL_SHARE * side:
            return full_svd(a), "full"
        if self.method == "auto" and basis is not None:
            triple, converged = warm_svd(a, basis, rank, self.tolerance)
            if converged:
                return triple, "warm"
        return gram_svd(a, rank), "gram"


def in_threads(work: Callable[[T], R], items: list[T], workers: int = 0) -> list[R]:
    """Return work(item) for all items, in order, each in one torch thread; torch's thread setting is as before.

    LAPACK's many tiny parallel regions spin at every barrier: with two threads and a busy neighbour a plain SVD took
    up to 70 times longer than with one. LAPACK releases the GIL, so layers side by side use the cores better.

    Args:
        work: called in a worker thread.
        items: started in this order: the costliest first.
        workers: items at a time; 0: as many as torch has threads now.
    """
    with _one_torch_thread() as before:
        count = min(workers or before, len(items), os.cpu_count() or 1)
        if count <= 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(count, thread_name_prefix="decompose", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, items))


@contextmanager
def _one_torch_thread() -> Iterator[int]:
    """Set one torch thread and give the count to go back to: a worker's setting would become that of new threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def _batches(layers: Mapping[str, Layer]) -> list[dict[str, Layer]]:
    """Return the layers one by one, or on an accelerator those of equal shape and ranks together; costliest first."""
    together: dict[object, dict[str, Layer]] = {}
    for name, layer in layers.items():
        alone = layer.weight.device.type == "cpu" or layer.stack is not None
        key = name if alone else (tuple(layer.weight.shape), layer.groups, layer.ranks, layer.weight.dtype)
        together.setdefault(key, {})[name] = layer
    return sorted(together.values(), key=lambda batch: -sum(layer.cost for layer in batch.values()))


def _matrix(name: str, layer: Layer) -> tuple[torch.Tensor, float]:
    weight = layer.weight.detach()
    matrix = unroll(weight.to(torch.promote_types(weight.dtype, torch.float32)), layer.groups)
    energy = squared_norm(matrix)
    if not math.isfinite(energy):
        raise ValueError(f"{name!r} holds NaN or infinity and cannot be decomposed")
    return matrix, energy


def _key(name: str, layer: Layer) -> str:
    rows, columns = layer.size
    return f"{name}:{layer.groups}x{rows}x{columns}:{layer.directions}"
