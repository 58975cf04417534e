"""Which public items form a batch, and which peers a node meets: the same answer on every machine, without messages.

Positive tuples pair row i of every node, so one node in another order would turn the loss into silent noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch


def public_indices(seed: int, server_round: int, step: int, *, num_items: int, batch_size: int) -> torch.Tensor:
    """Return the items (batch_size,) int64 of one public batch; no item twice in a round before all were used.

    Each pass over the set is one permutation, keyed by (seed, round, pass); the incomplete last batch of a pass is
    dropped, because the number of negatives depends on the batch size.

    Args:
        seed: of the run, >= 0.
        server_round: 1-based.
        step: 0-based, within the round.
        num_items: size of the public set.
        batch_size: B.

    Raises:
        ValueError: the set is smaller than a batch, or a number is out of range.
    """
    if not 1 <= batch_size <= num_items:
        raise ValueError(
            f"a public batch of {batch_size} from a public set of {num_items} items; choose a batch size from 1 to {num_items}"
        )
    if min(seed, server_round, step) < 0:
        raise ValueError(f"seed = {seed}, round = {server_round}, step = {step}: need numbers from 0 on")
    pass_number, slot = divmod(step, num_items // batch_size)
    words = np.random.Philox(np.random.SeedSequence([seed, server_round, pass_number])).random_raw(num_items)
    # Sorting raw words: numpy keeps its bit streams across versions, but not what `Generator.permutation` makes of them.
    order = np.argsort(words, kind="stable")
    return torch.from_numpy(order[slot * batch_size : (slot + 1) * batch_size].astype(np.int64))


def batch_digest(manifest: str, indices: torch.Tensor) -> str:
    """Return the first half of the SHA-256 of a public set's manifest (see `tasks.public`) and a batch's indices, in order, as hex.

    Half of it tells mistakes apart as well, and every message of an exchange carries it.
    """
    digest = hashlib.sha256(f"{len(manifest)}:{manifest}".encode())
    digest.update(indices.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:32]


def choose_peers(node: str, present: Iterable[str], *, count: int, seed: int, server_round: int, step: int) -> tuple[str, ...]:
    """Return at most `count` other nodes, drawn at random for this node and step from those that are there.

    The draw does not depend on the order of `present`, and a node that drops out only makes room for the next one.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"{count} peers: need a number from 0 on")

    def rank(peer: str) -> bytes:
        return hashlib.sha256(f"{seed}\n{server_round}\n{step}\n{node}\n{peer}".encode()).digest()

    return tuple(sorted(set(present) - {node}, key=rank)[:count])
