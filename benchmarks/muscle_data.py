"""Synthetic unit representations of M + 1 models on one public batch, from unrelated to aligned."""

from __future__ import annotations

import torch
import torch.nn.functional as F

KINDS = ("random", "cone", "mid", "aligned", "classes")


def representations(
    kind: str, num_peers: int, batch: int, width: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return an anchor and its peers, each (batch, width) with rows of length 1.

    Args:
        kind: "random" (unrelated), "cone" (untrained: one common direction), "mid" (positives at cosine 0.5),
            "aligned" (at 0.86), "classes" (five classes in the batch, so false negatives).
        num_peers: M.
        batch: B.
        width: D.
        seed: of the generator.
        dtype: of the result; drawn in float64.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int = batch) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    common = torch.zeros(batch, width, dtype=torch.float64)
    noise = 1.0
    if kind == "cone":
        common, noise = draw(1) + 0.3 * draw(), 0.9
    elif kind in ("mid", "aligned"):
        common, noise = draw(), 1.0 if kind == "mid" else 0.4
    elif kind == "classes":
        common, noise = draw(5)[torch.arange(batch) % 5] + 0.6 * draw(), 0.5
    elif kind != "random":
        raise ValueError(f"kind {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    models = [F.normalize(common + noise * draw(), dim=1).to(dtype) for _ in range(num_peers + 1)]
    return models[0], models[1:]
