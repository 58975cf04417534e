"""Contrastive objectives to compare the Muscle loss with, and the choice among them.

Letters: B samples of the public batch, D dimensions, M peers. As for the Muscle loss, rows are unit length and
only the anchor gets a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from strategies.fedmuscle.loss import muscle_loss
from strategies.fedmuscle.temperatures import Schedule, Temperatures, resolve

OBJECTIVES = ("muscle", "pairwise", "gramian", "none")


def objective_loss(
    name: str,
    anchor_BD: torch.Tensor,
    peers: Sequence[torch.Tensor],
    temperatures: Temperatures | Schedule | tuple[float, float],
    *,
    evaluator: str = "auto",
    generator: torch.Generator | None = None,
    gramian_tau: float = 0.07,
) -> torch.Tensor:
    """Return the named objective, 0-d; 0 with a zero gradient for "none" and for no peers.

    Args:
        name: "muscle", "pairwise" (at tau^(N) of `temperatures`), "gramian" or "none".
        anchor_BD: the node's own rows.
        peers: M tensors of the anchor's shape.
        temperatures: as for `muscle_loss`.
        evaluator: of the Muscle loss.
        generator: of its "sampled" evaluator.
        gramian_tau: temperature of the Gramian objective.

    Raises:
        ValueError: unknown name, or as the objective says.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is unknown; choose one of {', '.join(OBJECTIVES)}")
    if name == "none" or not peers:
        return muscle_loss(anchor_BD, (), temperatures)
    if name == "muscle":
        return muscle_loss(anchor_BD, peers, temperatures, evaluator=evaluator, generator=generator)
    if name == "pairwise":
        return pairwise_loss(anchor_BD, peers, resolve(temperatures, len(peers)).tau)
    return gramian_loss(anchor_BD, peers, gramian_tau)


def pairwise_loss(anchor_BD: torch.Tensor, peers: Sequence[torch.Tensor], tau: float) -> torch.Tensor:
    """Return the sum over peers of InfoNCE from the anchor to that peer; with one peer this is the Muscle loss."""
    targets_B = torch.arange(len(anchor_BD), device=anchor_BD.device)
    losses = [F.cross_entropy(anchor_BD @ peer.detach().T / tau, targets_B) for peer in _checked(anchor_BD, peers)]
    return torch.stack(losses).sum()


def simclr_loss(first_BD: torch.Tensor, second_BD: torch.Tensor, tau: float) -> torch.Tensor:
    """Return NT-Xent (Chen et al., 2020, eq. 1), the mean over 2B unit rows: each has the other view of its item to find among 2B - 1.

    Unlike with the other objectives both arguments get a gradient: both are the node's own.
    """
    rows = torch.cat([first_BD, second_BD])
    B = len(first_BD)
    scores = (rows @ rows.T / tau).masked_fill(torch.eye(2 * B, dtype=torch.bool, device=rows.device), -torch.inf)
    return F.cross_entropy(scores, torch.arange(2 * B, device=rows.device).roll(B))


def gramian_loss(
    anchor_BD: torch.Tensor, peers: Sequence[torch.Tensor], tau: float = 0.07, *, eps: float = 1e-6, smoothing: float = 0.1
) -> torch.Tensor:
    """Return the volume-based contrastive loss of GRAM (Cicchetti et al., 2025).

    V(i, j) is the volume spanned by z_i and all peers' rows j; small volumes are similar. The peers share one
    index, so there are B negatives and not B^M. The volume does not see signs: z and -z align equally.

    Args:
        anchor_BD: the node's own rows.
        peers: M tensors of the anchor's shape, M < D.
        tau: temperature.
        eps: inside the square root, whose slope is infinite at volume 0, where aligned models end.
        smoothing: label smoothing of both cross entropies.
    """
    volumes_BB = volumes(anchor_BD, peers, eps=eps)
    targets_B = torch.arange(len(anchor_BD), device=anchor_BD.device)
    forward = F.cross_entropy(-volumes_BB / tau, targets_B, label_smoothing=smoothing)
    backward = F.cross_entropy(-volumes_BB.T / tau, targets_B, label_smoothing=smoothing)
    return (0.5 * (forward + backward)).to(anchor_BD.dtype)


def volumes(anchor_BD: torch.Tensor, peers: Sequence[torch.Tensor], *, eps: float = 1e-6) -> torch.Tensor:
    """Return V (B, B) in float64: V(i, j)^2 = det G(z_i, z_j^1, ..., z_j^M) + eps, by one inverse per j and none per pair.

    det G = det(G_j) (|z_i|^2 - g^T G_j^-1 g) with G_j the peers' own Gram matrix and g_m = z_i . z_j^m.
    """
    stacked_BMD = torch.stack([peer.detach() for peer in _checked(anchor_BD, peers)], 1).double()
    gram_BMM = stacked_BMD @ stacked_BMD.transpose(1, 2)
    # Where peers coincide G_j is singular and the determinant alone makes V 0; the ridge only keeps the inverse finite.
    ridge = 1e-9 * torch.eye(len(peers), dtype=torch.float64, device=gram_BMM.device)
    inverse_BMM = torch.linalg.inv(gram_BMM + ridge)
    anchor = anchor_BD.double()
    g_BBM = torch.einsum("id,jmd->ijm", anchor, stacked_BMD)
    explained_BB = torch.einsum("ijm,jmn,ijn->ij", g_BBM, inverse_BMM, g_BBM)
    residual_BB = (anchor.square().sum(1, keepdim=True) - explained_BB).clamp_min(0.0)
    return (torch.linalg.det(gram_BMM).clamp_min(0.0) * residual_BB + eps).sqrt()


def _checked(anchor_BD: torch.Tensor, peers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not peers:
        raise ValueError("this objective needs at least one peer")
    for m, peer in enumerate(peers):
        if peer.shape != anchor_BD.shape or peer.dtype != anchor_BD.dtype:
            raise ValueError(
                f"peer {m} is {peer.dtype} {tuple(peer.shape)}, the anchor {anchor_BD.dtype} {tuple(anchor_BD.shape)}; must be equal"
            )
    return peers
