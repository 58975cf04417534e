"""The Muscle loss, exactly, without its B^M tuples.

With K_m[i, b] = exp(z_i . z_b^m / tau) and C_mm'[b, b'] = exp(-gamma z_b^m . z_b'^m') the denominator is
Z_i = sum_j prod_m K_m[i, j_m] prod_{m<m'} C_mm'[j_m, j_m']: a fully coupled model of M sites with B states, which
matrix products contract in B^(M+1) multiply-adds, none of them times D.

Letters: B samples, D dimensions, M peers, E enumerated assignments of the peers after the fourth; in names of
features P = B * B, a pair of states.
"""

from __future__ import annotations

import math

import torch

from strategies.fedmuscle.evaluators import Evaluation, gradient_of, log_kernels, mean_field_posterior, positive_log_weight
from strategies.fedmuscle.temperatures import Temperatures

MAX_ROWS = 4096  # rows (anchor, assignment) of one product: 16 MB per buffer at B = 32, float32
MAX_ENTRIES = 2**28  # of the largest buffer
MAX_COST = 1e12  # multiply-adds


def exact(anchor_BD: torch.Tensor, peers_MBD: torch.Tensor, temperatures: Temperatures) -> Evaluation:
    """Evaluate the loss and its gradient exactly; float32 input is widened where float32 would underflow.

    Raises:
        ValueError: too many peers or samples for this evaluator.
        FloatingPointError: temperatures so small that even float64 underflows.
    """
    M, B, _ = peers_MBD.shape
    check_cost(M, B)
    tau, gamma = temperatures.tau, temperatures.gamma
    log_K_MBB = log_kernels(anchor_BD, peers_MBD, tau)
    positive_B = positive_log_weight(log_K_MBB, peers_MBD, gamma)
    peaks_MB1 = log_K_MBB.amax(2, keepdim=True)
    shift_B = peaks_MB1.sum((0, 2))
    couplings: dict[tuple[int, int], torch.Tensor] = {}
    for a in range(M):
        for b in range(a + 1, M):
            log_C_BB = (peers_MBD[a] @ peers_MBD[b].T).mul_(-gamma)
            peak = log_C_BB.max()
            couplings[a, b] = (log_C_BB - peak).exp_()
            shift_B = shift_B + peak
    if _underflows(shift_B, positive_B, log_K_MBB, peers_MBD, gamma):
        if anchor_BD.dtype == torch.float64:
            raise FloatingPointError(f"temperatures tau = {tau}, gamma = {gamma:.4g} with {M} peers leave the range of float64; raise tau")
        wide = exact(anchor_BD.double(), peers_MBD.double(), temperatures)
        return Evaluation(wide.loss.to(anchor_BD.dtype), wide.gradient.to(anchor_BD.dtype), "exact", widened=True)
    Z_B, mass_MBB = contract((log_K_MBB - peaks_MB1).exp_(), couplings)
    loss = (Z_B.log() + shift_B - positive_B).mean()
    return Evaluation(loss, gradient_of(mass_MBB.div_(Z_B[:, None]), peers_MBD, tau), "exact")


def feasible(num_peers: int, batch: int) -> bool:
    """Return whether `auto` takes this evaluator: B^(M+1) <= 2e9, and a B^2 x B^2 block (from 4 peers on) of <= 2^26."""
    return batch ** (num_peers + 1) <= 2e9 and (num_peers < 4 or batch**4 <= 2**26)


def check_cost(num_peers: int, batch: int) -> None:
    """Raise ValueError where this evaluator would take more than `MAX_COST` or `MAX_ENTRIES`."""
    cost, entries = float(batch) ** (num_peers + 1), batch ** min(max(num_peers, 2), 4)
    if cost > MAX_COST or entries > MAX_ENTRIES:
        raise ValueError(
            f"the exact evaluator would need {cost:.2g} multiply-adds and buffers of {entries:.2g} numbers for {num_peers} peers and "
            f"a batch of {batch}; use auto or mean-field, or a smaller batch"
        )


def _underflows(shift_B: torch.Tensor, positive_B: torch.Tensor, log_K_MBB: torch.Tensor, peers_MBD: torch.Tensor, gamma: float) -> bool:
    """Return whether an anchor's tuples may fall below the smallest normal number after shifting.

    All factors are <= 1 after the shift, so products only underflow together with their tuple. The heaviest
    tuple weighs at least Z / B^M; log Z is bounded from below by the positive tuple or, dearer, by mean field.
    """
    M, B, _ = peers_MBD.shape
    limit = -math.log(torch.finfo(shift_B.dtype).tiny) - 2.0 - M * math.log(B)
    if not float((shift_B - positive_B).max()) > limit:
        return False
    _, bound_B = mean_field_posterior(log_K_MBB, peers_MBD, gamma)
    return float((shift_B - torch.maximum(positive_B, bound_B)).max()) > limit


def contract(K_MBB: torch.Tensor, C: dict[tuple[int, int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Z (B,) and the unnormalised marginals (M, B, B): mass[m, i, b] = sum of the tuples with j_m = b.

    Args:
        K_MBB: K[m, i, b].
        C: (m, m') with m < m' -> (B, B).
    """
    if len(K_MBB) == 1:
        return K_MBB[0].sum(1), K_MBB
    if len(K_MBB) == 2:
        mass_MBB = torch.stack([(K_MBB[1] @ C[0, 1].T) * K_MBB[0], (K_MBB[0] @ C[0, 1]) * K_MBB[1]])
        return mass_MBB[0].sum(1), mass_MBB
    return _contract_three(K_MBB, C) if len(K_MBB) == 3 else _contract_many(K_MBB, C)


def _contract_three(K_MBB: torch.Tensor, C: dict[tuple[int, int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    B = K_MBB.shape[1]
    block_BP = (C[0, 1][:, :, None] * C[0, 2][:, None, :]).reshape(B, B * B)
    pairs_BP = _pairs(K_MBB[1], K_MBB[2], C[1, 2])
    joint_BBB = (K_MBB[0] @ block_BP).mul_(pairs_BP).view(B, B, B)
    first_BB = (pairs_BP @ block_BP.T) * K_MBB[0]
    return first_BB.sum(1), torch.stack([first_BB, joint_BBB.sum(2), joint_BBB.sum(1)])


def _contract_many(K_MBB: torch.Tensor, C: dict[tuple[int, int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Peers (0, 1) against (2, 3) through one (B^2, B^2) block shared by all anchors; later peers are enumerated."""
    M, B, _ = K_MBB.shape
    block_PP = (_pairs(C[0, 2], C[0, 3]).view(B, 1, B, B) * _pairs(C[1, 2], C[1, 3]).view(1, B, B, B)).reshape(B * B, B * B)
    Z_B, mass_MBB = K_MBB.new_zeros(B), torch.zeros_like(K_MBB)
    states = torch.arange(B, device=K_MBB.device)
    grid = torch.cartesian_prod(*[states] * (M - 4)).reshape(-1, M - 4) if M > 4 else states.new_zeros(1, 0)
    for chunk_E in grid.split(max(1, MAX_ROWS // B)):
        E = len(chunk_E)
        weights_BE, (first, second, third, fourth) = _condition(K_MBB, C, chunk_E)
        left_RP, right_RP = _pairs(first, second, C[0, 1]), _pairs(third, fourth, C[2, 3])
        joint_RP = (left_RP @ block_PP).mul_(right_RP)
        each_BE = joint_RP.sum(1).view(B, E).mul_(weights_BE)
        right_BBB = _weighted(joint_RP, weights_BE)
        left_BBB = _weighted((right_RP @ block_PP.T).mul_(left_RP), weights_BE)
        Z_B += each_BE.sum(1)
        for m, part_BB in enumerate((left_BBB.sum(2), left_BBB.sum(1), right_BBB.sum(2), right_BBB.sum(1))):
            mass_MBB[m] += part_BB
        for column, m in enumerate(range(4, M)):
            mass_MBB[m].index_add_(1, chunk_E[:, column], each_BE)
    return Z_B, mass_MBB


def _condition(
    K_MBB: torch.Tensor, C: dict[tuple[int, int], torch.Tensor], chunk_E: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the weight (B, E) of each assignment of the enumerated peers, and K_0..K_3 given it, each (B * E, B)."""
    M, B, _ = K_MBB.shape
    E = len(chunk_E)
    weights_BE = K_MBB.new_ones(B, E)
    fields = [K_MBB.new_ones(E, B) for _ in range(4)]
    for m in range(4, M):
        state_E = chunk_E[:, m - 4]
        weights_BE *= K_MBB[m][:, state_E]
        for other in range(m + 1, M):
            weights_BE *= C[m, other][state_E, chunk_E[:, other - 4]]
        for q in range(4):
            fields[q] *= C[q, m].T[state_E]
    return weights_BE, [(K_MBB[q][:, None] * fields[q]).reshape(B * E, B) for q in range(4)]


def _pairs(left_RB: torch.Tensor, right_RB: torch.Tensor, coupling_BB: torch.Tensor | None = None) -> torch.Tensor:
    """Return (R, B * B): left[r, a] right[r, b] coupling[a, b]."""
    product = left_RB[:, :, None] * right_RB[:, None, :]
    if coupling_BB is not None:
        product.mul_(coupling_BB)
    return product.reshape(len(left_RB), -1)


def _weighted(joint_RP: torch.Tensor, weights_BE: torch.Tensor) -> torch.Tensor:
    """Return (B, B, B): the rows (anchor, assignment) summed over assignments with their weights."""
    B, E = weights_BE.shape
    return torch.bmm(weights_BE[:, None], joint_RP.view(B, E, -1)).view(B, B, B)
