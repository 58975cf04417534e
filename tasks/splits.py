"""Seeded choices of samples: stratified draws, and train, validation and test inside a node. Needs numpy only."""

from __future__ import annotations

import hashlib

import numpy as np

from tasks import DataError


def rng_for(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a generator that depends on the run seed and on what it is for, and on nothing else (never on `hash`)."""
    text = "\x1f".join(map(str, (seed, *purpose)))
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))


def stratified(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return `count` positions (sorted) in which each class has its share to within one sample.

    Shares are rounded down; what is left goes to the largest remainders, ties by chance, and to classes of a single sample last.

    Args:
        labels: (N,) of any integers.
        count: 0..N.
        rng: decides which samples, and ties.
    """
    count = min(count, len(labels))
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    _, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    share = count * sizes / len(labels)
    take = np.floor(share).astype(np.int64)
    order = np.lexsort((rng.random(len(sizes)), take - share, sizes == 1))
    room = order[take[order] < sizes[order]]
    take[room[: count - int(take.sum())]] += 1
    chosen = [rng.permutation(np.flatnonzero(codes == index))[:size] for index, size in enumerate(take)]
    return np.sort(np.concatenate(chosen))


def node_splits(
    labels: np.ndarray, *, seed: int, node_name: str, test_fraction: float, val_fraction: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sorted positions of the train, validation and test samples of one node; they are disjoint and cover all.

    Test and validation get their fraction, rounded, and at least one sample each where asked for, as long as one is left to train
    on: of two samples one is test, a single one is train.

    Args:
        labels: (N,) the node's labels.
        seed: the run's.
        node_name: with `seed`, all that the split depends on besides the labels.
        test_fraction, val_fraction: `data.test-fraction`, `data.val-fraction`.

    Raises:
        DataError: the fractions leave nothing to train on.
    """
    if test_fraction + val_fraction >= 1:
        raise DataError(f"data.test-fraction = {test_fraction} and data.val-fraction = {val_fraction} leave nothing to train on")
    rng, total = rng_for(seed, "node-split", node_name), len(labels)
    rest, parts = np.arange(total), []
    for fraction in (test_fraction, val_fraction):
        wanted = max(1, round(fraction * total)) if fraction > 0 else 0
        chosen = rest[stratified(labels[rest], max(0, min(wanted, len(rest) - 1)), rng)]
        rest = np.setdiff1d(rest, chosen, assume_unique=True)
        parts.append(chosen)
    return rest, parts[1], parts[0]
