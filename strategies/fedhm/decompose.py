"""Ways to get the leading singular directions of one matrix, from the surest to the fastest.

Letters: a matrix `a` is (..., M, N), q directions are computed, r of them are kept. All functions accept leading
batch axes (the groups of a convolution, or layers of one shape on an accelerator). They return triples
`u` (..., M, q), `s` (..., q) descending, `v` (..., N, q) with orthonormal columns and a ~ u diag(s) vᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

OVERSAMPLING = 16
"""Directions computed beyond the kept ones, so that the last kept one is accurate."""

_MAX_HALF_STEPS = 8


@dataclass(frozen=True)
class Factors:
    """One layer's leading directions, rank-major: the first r rows are the factors at rank r, without copying.

    Attributes:
        ut: (R, g*M) contiguous; row i is direction i of every group's U, scaled by the root of its singular value.
        vt: (R, g*N) contiguous, likewise for V.
        sigma: (R, g) float64, singular values, descending.
        energy: squared Frobenius norm of the whole layer, not only of what the factors hold.
    """

    ut: torch.Tensor
    vt: torch.Tensor
    sigma: torch.Tensor
    energy: float

    @property
    def rank(self) -> int:
        """Largest rank these factors serve."""
        return self.ut.shape[0]

    def prefix(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `ut` (rank, g*M) and `vt` (rank, g*N), views; raises ValueError when fewer were computed."""
        if not 1 <= rank <= self.rank:
            raise ValueError(f"rank {rank} is not within 1..{self.rank}, the rank of these factors")
        return self.ut[:rank], self.vt[:rank]


def full_svd(a: torch.Tensor) -> Triple:
    """Return all min(M, N) directions."""
    u, s, vt = torch.linalg.svd(a, full_matrices=False)
    return u, s, vt.mT


def gram_svd(a: torch.Tensor, rank: int) -> Triple:
    """Return min(rank + 16, M, N) directions from the eigenvectors of the smaller Gram matrix.

    The eigenvectors give the basis only; singular values and both factors come from a QR and a small SVD in that
    basis (Rayleigh-Ritz), since squaring alone loses every singular value below 1e-3 of the largest in float32.
    """
    if a.shape[-1] > a.shape[-2]:
        u, s, v = gram_svd(a.mT, rank)
        return v, s, u
    largest = a.abs().amax(dim=(-2, -1), keepdim=True)
    unit = a / torch.where(largest > 0, largest, torch.ones_like(largest))  # squares neither overflow nor vanish
    q = min(rank + OVERSAMPLING, a.shape[-1])
    basis = torch.linalg.eigh(unit.mT @ unit).eigenvectors[..., -q:]
    p, core = torch.linalg.qr(a @ basis)
    u, s, vt = torch.linalg.svd(core)
    return p @ u, s, basis @ vt.mT


def warm_svd(a: torch.Tensor, basis: torch.Tensor, tolerance: float) -> tuple[Triple, bool]:
    """Return q directions by subspace iteration from `basis`, and whether it converged.

    It stops when the last half step gained at most `tolerance` of the energy still missed. The captured energies
    |A Q|² <= |Pᵀ A|² come for free; they are summed in float64, where float32 sums would stop on noise.

    Args:
        a: (..., M, N).
        basis: (..., N, q) orthonormal columns, q <= min(M, N): the right directions of a nearby matrix.
        tolerance: in (0, 1), of a half step's gain; 0.02 kept the error within 2 % of the optimal one on every spectrum
            and drift tried, 0.002 within 0.8 % (the worst is a flat spectrum).
    """
    total = _energy(a)
    converged = False
    for _ in range(_MAX_HALF_STEPS):
        y = a @ basis
        p = torch.linalg.qr(y).Q
        z = a.mT @ p
        captured = _energy(z)
        allowed = torch.maximum(tolerance * (total - captured), 1e-7 * total)
        q, core = torch.linalg.qr(z)
        if bool((captured - _energy(y) <= allowed).all()):
            converged = True
            break
        basis = q
    u, s, vt = torch.linalg.svd(core.mT)
    return (p @ u, s, q @ vt.mT), converged


def stacked_svd(us: torch.Tensor, vs: torch.Tensor) -> Triple:
    """Return the K directions of us vsᵀ without forming it: two QRs and the SVD of a K x K core.

    Args:
        us: (..., M, K), all contributions' U side by side, K <= min(M, N).
        vs: (..., N, K), likewise V.
    """
    pu, core_u = torch.linalg.qr(us)
    pv, core_v = torch.linalg.qr(vs)
    u, s, vt = torch.linalg.svd(core_u @ core_v.mT)
    return pu @ u, s, pv @ vt.mT


def pack(triple: Triple, rank: int, energy: float, floor: float = 0.0) -> Factors:
    """Return rank-major factors U' = U sqrt(S), V' = V sqrt(S) at `rank`, with fixed signs.

    Signs: the entry of u with the largest magnitude is positive, so that runs repeat. A direction whose singular
    value is exactly zero would have a zero column on both sides, and a zero gradient on both, for ever; with `floor`
    V' keeps the length sqrt(max(s, floor * s_0)) and U' takes the rest, which leaves the product as it is.

    Args:
        triple: `u` (g, M, q) or (M, q), `s`, `v`; r <= q.
        rank: directions kept.
        energy: squared Frobenius norm of the layer.
        floor: in [0, 1); 0 gives balanced factors.
    """
    u, s, v = (t.unsqueeze(0) if t.dim() == n else t for t, n in zip(triple, (2, 1, 2), strict=True))
    u, s, v = u[..., :rank], s[..., :rank], v[..., :rank]
    peak = torch.gather(u, -2, u.abs().argmax(dim=-2, keepdim=True))
    sign = torch.where(peak < 0, -torch.ones_like(peak), torch.ones_like(peak))
    length = torch.maximum(s, floor * s[..., :1]).sqrt()
    share = torch.where(length > 0, s / torch.where(length > 0, length, torch.ones_like(length)), torch.zeros_like(s))
    ut, vt = (u * sign * share.unsqueeze(-2)), (v * sign * length.unsqueeze(-2))
    return Factors(_rank_major(ut), _rank_major(vt), s.transpose(0, 1).to("cpu", torch.float64).contiguous(), energy)


def squared_norm(a: torch.Tensor) -> float:
    """Return the squared Frobenius norm, summed in float64."""
    return float(torch.linalg.vector_norm(a, dtype=torch.float64)) ** 2


def _rank_major(x: torch.Tensor) -> torch.Tensor:
    """(g, M, r) -> (r, g*M) contiguous."""
    return x.permute(2, 0, 1).reshape(x.shape[2], -1).contiguous()


def _energy(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(a, dim=(-2, -1), dtype=torch.float64) ** 2
