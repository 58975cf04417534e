"""FedMRL's equations as pure functions (Yi et al., NeurIPS 2024, arXiv 2406.00488, equations 2 to 9).

B batch, G = d1 width of the small model's representation, F = d2 width of the private one (d1 <= d2), C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

STARTS = ("random", "shared", "aligned", "split")


def splice(rep_BG: torch.Tensor, rep_BF: torch.Tensor) -> torch.Tensor:
    """Return r = r_G o r_F, (B, G + F): the shared representation first (eq. 4)."""
    return torch.cat((rep_BG, rep_BF), dim=1)


def slices(fused_BF: torch.Tensor, shared_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the coarse (B, G) and the fine (B, F) Matryoshka slice of the SAME fused representation z (eq. 6)."""
    return fused_BF[:, :shared_dim], fused_BF


def matryoshka_loss(
    coarse_BC: torch.Tensor,
    fine_BC: torch.Tensor,
    targets_B: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    shared_weight: float = 1.0,
    private_weight: float = 1.0,
) -> torch.Tensor:
    """Return m_G l(y_G, y) + m_F l(y_F, y), 0-d (eq. 8); `loss` is the task's mean loss."""
    return shared_weight * loss(coarse_BC, targets_B) + private_weight * loss(fine_BC, targets_B)


def log_mean(*outputs_BC: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the mean of the heads' probabilities, (B, C)."""
    return torch.stack([outputs.log_softmax(1) for outputs in outputs_BC]).logsumexp(0) - math.log(len(outputs_BC))


def start_projector(weight: torch.Tensor, bias: torch.Tensor, start: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the projector's first weight (F, G + F) and bias (F,), made from a random start of a Linear.

    `random` and `shared` keep the random start (they differ in its seed: the node's own, or the run's).
    `aligned`: 0.1 x random, plus the identity from r_F to z and the identity from r_G to z[:G].
    `split`: z[:G] = r_G, z[G:] = r_F[G:], nothing else.

    With different random projectors the coarse slice has another basis on each node, so the average of the
    small models mixes unaligned features; `aligned` and `split` start all nodes in one basis.
    """
    d2, d1 = weight.shape[0], weight.shape[1] - weight.shape[0]
    if start in ("random", "shared"):
        return weight.clone(), bias.clone()
    direct = torch.cat((torch.eye(d2, d1), torch.eye(d2)), dim=1).to(weight)
    if start == "aligned":
        return 0.1 * weight + direct, 0.1 * bias
    if start == "split":
        direct[:d1, d1:] = 0
        return direct, torch.zeros_like(bias)
    raise ValueError(f"unknown projector start {start!r}; choose one of {', '.join(STARTS)}")
