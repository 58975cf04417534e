"""Evaluators of the Muscle loss: the paper's own (naive), mean field and sampled. `exact.py` holds the fourth.

Each returns value and gradient together: dL/dz_i = (1 / tau B) sum_m (sum_b p_m(b|i) z_b^m - z_i^m), where p_m
is the posterior of peer m's index, so the B x B marginals p_m are all that is needed.

Letters: B samples of the public batch, D dimensions, M peers, J = B^M tuples, R samples drawn per anchor.
All inputs share one dtype, float32 or float64; nothing here touches autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from strategies.fedmuscle.temperatures import Temperatures

NAIVE_LIMIT = 2**32  # bytes of the tuple sums S
SWEEPS, DAMPING = 6, 0.5
MIN_ESS = 0.05


@dataclass(frozen=True)
class Evaluation:
    """Value and gradient of the mean loss over the batch.

    Attributes:
        loss: 0-d.
        gradient: (B, D), of `loss` by the anchor.
        evaluator: which one ran.
        bound: True where `loss` is a mean-field bound, at most the true loss.
        ess: sampled only: mean effective sample size over samples drawn, in (0, 1].
        fallbacks: sampled only: anchors whose gradient is mean field because their effective sample size was too small.
        widened: True where float32 input needed float64 inside.
    """

    loss: torch.Tensor
    gradient: torch.Tensor
    evaluator: str
    bound: bool = False
    ess: float | None = None
    fallbacks: int = 0
    widened: bool = False


def log_kernels(anchor_BD: torch.Tensor, peers_MBD: torch.Tensor, tau: float) -> torch.Tensor:
    """Return log K (M, B, B): log K[m, i, b] = z_i . z_b^m / tau."""
    return (anchor_BD @ peers_MBD.transpose(1, 2)) / tau


def positive_log_weight(log_kernels_MBB: torch.Tensor, peers_MBD: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return (B,), the log-weight of tuple (i, ..., i): sum_m log K[m, i, i] - gamma sum_{m<m'} z_i^m . z_i^m'."""
    total_BD = peers_MBD.sum(0)
    pairs_B = 0.5 * (total_BD.square().sum(1) - peers_MBD.square().sum((0, 2)))
    return log_kernels_MBB.diagonal(dim1=1, dim2=2).sum(0) - gamma * pairs_B


def gradient_of(marginals_MBB: torch.Tensor, peers_MBD: torch.Tensor, tau: float) -> torch.Tensor:
    """Return dL/dz (B, D) from posterior marginals p[m, i, b], which are overwritten."""
    M, B, D = peers_MBD.shape
    # Taking 1 off the diagonal before the product keeps the digits that a difference of two sums would cancel.
    marginals_MBB.diagonal(dim1=1, dim2=2).sub_(1.0)
    return (marginals_MBB.transpose(0, 1).reshape(B, M * B) @ peers_MBD.reshape(M * B, D)).div_(tau * B)


def tuple_sums(peers_MBD: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the paper's server sends: S (B^M, D), S[j] = sum_m z_{j_m}^m, and log alpha (B^M,), last peer fastest.

    Raises:
        ValueError: S would take more than 4 GiB.
    """
    M, B, D = peers_MBD.shape
    check_naive(M, B, D, itemsize=peers_MBD.element_size())
    tuples_JM = torch.cartesian_prod(*[torch.arange(B, device=peers_MBD.device)] * M).reshape(-1, M)
    sums_JD = peers_MBD.new_zeros(len(tuples_JM), D)
    log_alpha_J = peers_MBD.new_zeros(len(tuples_JM))
    for m in range(M):
        sums_JD += peers_MBD[m][tuples_JM[:, m]]
        for earlier in range(m):
            log_alpha_J -= gamma * (peers_MBD[earlier] @ peers_MBD[m].T)[tuples_JM[:, earlier], tuples_JM[:, m]]
    return sums_JD, log_alpha_J


def check_naive(num_peers: int, batch: int, width: int, *, itemsize: int) -> None:
    """Raise ValueError where S would take more than 4 GiB."""
    needed = batch**num_peers * width * itemsize
    if needed > NAIVE_LIMIT:
        raise ValueError(
            f"the naive evaluator would build {needed / 1e9:.3g} GB for {num_peers} peers and a batch of {batch}; use exact or mean-field"
        )


def naive(anchor_BD: torch.Tensor, peers_MBD: torch.Tensor, temperatures: Temperatures) -> Evaluation:
    """Evaluate the loss as the paper writes it, over explicit S and alpha; memory B^M (2 D + B).

    The oracle of the other evaluators, so it shares nothing with them: the gradient comes from autograd.

    Raises:
        ValueError: as `tuple_sums`.
    """
    M, B, _ = peers_MBD.shape
    sums_JD, log_alpha_J = tuple_sums(peers_MBD, temperatures.gamma)
    rows_B = torch.arange(B, device=anchor_BD.device)
    with torch.enable_grad():
        anchor = anchor_BD.detach().requires_grad_()
        logits_BJ = anchor @ sums_JD.T / temperatures.tau + log_alpha_J
        positives_B = logits_BJ[rows_B, rows_B * sum(B**m for m in range(M))]
        loss = (logits_BJ.logsumexp(1) - positives_B).mean()
        (gradient_BD,) = torch.autograd.grad(loss, anchor)
    return Evaluation(loss.detach(), gradient_BD, "naive")


def mean_field_posterior(log_kernels_MBB: torch.Tensor, peers_MBD: torch.Tensor, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q (M, B, B), the product posterior per anchor, and (B,) its lower bound of log Z; linear in M.

    A peer feels the others only through s = sum of their mean representations. Sites are updated one after
    the other and damped: updated together they oscillate, because gamma > 0 makes peers repel each other.
    """
    q_MBB = log_kernels_MBB.softmax(2)
    means_MBD = q_MBB @ peers_MBD
    total_BD = means_MBD.sum(0)
    for sweep in range(SWEEPS):
        keep = DAMPING if sweep < SWEEPS - 1 else 0.0
        for m, peer_BD in enumerate(peers_MBD):
            others_BD = total_BD - means_MBD[m]
            q_BB = torch.addmm(log_kernels_MBB[m], others_BD, peer_BD.T, alpha=-gamma).softmax(1)
            q_MBB[m].mul_(keep).add_(q_BB, alpha=1.0 - keep)
            torch.mm(q_MBB[m], peer_BD, out=means_MBD[m])
            total_BD = others_BD + means_MBD[m]
    pairs_B = 0.5 * (total_BD.square().sum(1) - means_MBD.square().sum((0, 2)))
    entropies_MBB = torch.special.entr(q_MBB)
    return q_MBB, (q_MBB * log_kernels_MBB + entropies_MBB).sum((0, 2)) - gamma * pairs_B


def mean_field(anchor_BD: torch.Tensor, peers_MBD: torch.Tensor, temperatures: Temperatures) -> Evaluation:
    """Evaluate the mean-field bound of the loss and its gradient (envelope theorem: q in place of the posterior)."""
    log_kernels_MBB = log_kernels(anchor_BD, peers_MBD, temperatures.tau)
    q_MBB, log_Z_B = mean_field_posterior(log_kernels_MBB, peers_MBD, temperatures.gamma)
    loss = (log_Z_B - positive_log_weight(log_kernels_MBB, peers_MBD, temperatures.gamma)).mean()
    return Evaluation(loss, gradient_of(q_MBB, peers_MBD, temperatures.tau), "mean-field", bound=True)


def sampled(
    anchor_BD: torch.Tensor, peers_MBD: torch.Tensor, temperatures: Temperatures, *, samples: int, generator: torch.Generator
) -> Evaluation:
    """Evaluate by importance sampling from the mean-field posterior, with the proposal itself as control variate.

    p_m(b) = q_m(b) + sum_r (w_r - 1/R) 1[j_r = b]: the correction has mean zero where q is exact, so it only
    carries what mean field misses. Anchors with an effective sample size below 5 % keep the mean-field gradient.

    Args:
        samples: R, tuples drawn per anchor.
        generator: on the inputs' device; the only source of randomness.
    """
    M, B, _ = peers_MBD.shape
    log_kernels_MBB = log_kernels(anchor_BD, peers_MBD, temperatures.tau)
    q_MBB, _ = mean_field_posterior(log_kernels_MBB, peers_MBD, temperatures.gamma)
    tuples_MBR = torch.multinomial(q_MBB.reshape(M * B, B), samples, replacement=True, generator=generator).view(M, B, samples)
    log_q_MBB = q_MBB.clamp_min(torch.finfo(q_MBB.dtype).tiny).log()
    log_weights_BR = (log_kernels_MBB - log_q_MBB).gather(2, tuples_MBR).sum(0)
    log_weights_BR += _coupling_log_weights(peers_MBD, temperatures.gamma, tuples_MBR)
    log_Z_B = log_weights_BR.logsumexp(1) - math.log(samples)
    weights_BR = log_weights_BR.softmax(1)
    ess_B = 1.0 / (weights_BR.square().sum(1) * samples)
    trusted_B = ess_B >= MIN_ESS
    correction_BR = (weights_BR - 1.0 / samples) * trusted_B[:, None]
    marginals_MBB = q_MBB.scatter_add(2, tuples_MBR, correction_BR.expand(M, B, samples))
    loss = (log_Z_B - positive_log_weight(log_kernels_MBB, peers_MBD, temperatures.gamma)).mean()
    gradient_BD = gradient_of(marginals_MBB, peers_MBD, temperatures.tau)
    return Evaluation(loss, gradient_BD, "sampled", ess=float(ess_B.mean()), fallbacks=int((~trusted_B).sum()))


def _coupling_log_weights(peers_MBD: torch.Tensor, gamma: float, tuples_MBR: torch.Tensor) -> torch.Tensor:
    """Return (B, R): -gamma sum_{m<m'} z_{j_m}^m . z_{j_m'}^m' of each drawn tuple."""
    log_alpha_BR = peers_MBD.new_zeros(tuples_MBR.shape[1:])
    for m in range(1, len(peers_MBD)):
        gram_MBB = peers_MBD[:m] @ peers_MBD[m].T
        earlier = torch.arange(m, device=peers_MBD.device)[:, None, None]
        log_alpha_BR -= gamma * gram_MBB[earlier, tuples_MBR[:m], tuples_MBR[m]].sum(0)
    return log_alpha_BR
