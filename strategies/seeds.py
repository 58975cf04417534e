"""Seeds that depend on names and rounds, never on order, process or Flower's random node ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed from the parts, for example (run seed, node name, round)."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """Return a CPU generator seeded from the parts."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Seed torch's global generators inside the block (layers draw their start from them); the CPU's is restored after."""
    with torch.random.fork_rng(devices=[]):
        seed = derive_seed(*parts)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also notes a stack trace for each kind of device not yet in use
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        yield
