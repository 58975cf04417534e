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

_MAX_HALF_STEPS = 16
_CLOSE = 30.0  # times the allowed gain: from there on the small SVD that looks closer is worth its time
_NEARLY = 5.0  # times the allowed gain: from there on what later half steps will gain can be told from the last one
_SURE = 1.25  # what is told so came out up to 2.7 times too small; half of it counts


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

    The eigenvectors give the basis only, one half step of subspace iteration mends it, and singular values and both
    factors come from a QR and a small SVD (Rayleigh-Ritz): squaring loses every singular value below 1e-3 of the largest
    in float32, and after rounds of low-rank replies the last ones kept are as small as that.
    """
    if a.shape[-1] > a.shape[-2]:
        u, s, v = gram_svd(a.mT, rank)
        return v, s, u
    largest = a.abs().amax(dim=(-2, -1), keepdim=True)
    unit = a / torch.where(largest > 0, largest, torch.ones_like(largest))  # squares neither overflow nor vanish
    q = min(rank + OVERSAMPLING, a.shape[-1])
    basis = torch.linalg.eigh(unit.mT @ unit).eigenvectors[..., -q:]
    p, _ = torch.linalg.qr(a @ basis)
    right, core = torch.linalg.qr(a.mT @ p)
    u, s, vt = torch.linalg.svd(core)
    return p @ vt.mT, s, right @ u


def warm_svd(a: torch.Tensor, basis: torch.Tensor, rank: int, tolerance: float) -> tuple[Triple, bool]:
    """Return q directions by subspace iteration from `basis`, and whether the first `rank` converged.

    Half steps alternate between A and A^T until little is left to gain. The energy one gains, |A^T P|^2 - |A Q|^2 with
    A Q = P R, is taken as |A^T P - Q R^T|^2: the same number without cancellation, which in float32 drowned it where a
    layer has nearly collapsed. Among directions beyond `rank` it may go on gaining for long, to no use, so near the
    end it is taken of the leading `rank` only. There direction i loses its distance from the true one by
    (sigma_q / sigma_i)^2 a half step, which tells what later half steps would gain: without it every layer after ordinary
    rounds took one half step more, a quarter of the time.

    Args:
        a: (..., M, N).
        basis: (..., N, q) orthonormal columns, q <= min(M, N): the right directions of a nearby matrix.
        rank: directions that count, at most q.
        tolerance: in (0, 1): the share of the energy still missed that the last half step may gain. Later ones would
            gain up to twice as much, and the error is a norm, half of that: about its excess over the optimal one
            (0.02 gave up to 0.035 on an orthogonal matrix with noise, the flattest spectrum; below on all others,
            except where less than 1e-7 of the energy is missed).
    """
    total = _energy(a)
    old, (new, core) = basis, torch.linalg.qr(a @ basis)
    right, converged = False, False
    for half_step in range(_MAX_HALF_STEPS):
        z = (a if right else a.mT) @ new
        change = z - old @ core.mT
        missed = torch.maximum(total - _energy(z), 1e-7 * total)  # less than that float32 cannot tell
        allowed = tolerance * missed
        gain = _energy(change)
        done = gain <= allowed
        if not bool(done.all()) and bool((gain <= _CLOSE * allowed).all()):
            gain, later = _leading_gains(change, core, rank)
            done = gain <= allowed
            if half_step:  # the first one mends the drift, at no steady pace
                done |= (gain <= _NEARLY * allowed) & (_SURE * later <= allowed)
        old, (new, core) = new, torch.linalg.qr(z)
        right = not right
        if bool(done.all()):
            converged = True
            break
    u, s, vt = torch.linalg.svd(core)
    ours, others = new @ u, old @ vt.mT
    return ((others, s, ours) if right else (ours, s, others)), converged


def _leading_gains(change: torch.Tensor, core: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the energy that a half step gained in the leading `rank` directions, and about what all later ones will gain there."""
    u, s, _ = torch.linalg.svd(core)
    gained = torch.linalg.vector_norm(change @ u[..., :rank], dim=-2, dtype=torch.float64) ** 2
    left = (s[..., -1:] / s[..., :rank].clamp_min(torch.finfo(s.dtype).tiny)).double() ** 2
    return gained.sum(-1), (gained * left / (1 - left).clamp_min(1e-3)).sum(-1)


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


def _energy(a: torch.Tensor) -> torch.Tensor:
    """(..., M, N) -> (...) float64: squared Frobenius norms, of rows summed in `a`'s own dtype.

    The errors of many rows cancel; a copy of `a` in float64 took a tenth of the time.
    """
    return torch.linalg.vector_norm(a, dim=-1).double().square().sum(-1)


def squared_norm(a: torch.Tensor) -> float:
    """Return the squared Frobenius norm of all of `a`, summed in float64."""
    return float(torch.linalg.vector_norm(a, dtype=torch.float64) ** 2)


def _rank_major(x: torch.Tensor) -> torch.Tensor:
    """(g, M, r) -> (r, g*M) contiguous."""
    return x.permute(2, 0, 1).reshape(x.shape[2], -1).contiguous()
