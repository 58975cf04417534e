"""Every way of decomposing against a full SVD in float64, on flat, decaying and rank-deficient spectra."""

import pytest
import torch

from strategies.fedhm.decompose import _leading_gains, full_svd, gram_svd, pack, squared_norm, stacked_svd, warm_svd
from strategies.fedhm.rank_metrics import effective_rank, energy_beyond, stable_rank


def _orthonormal(rows, columns, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=g)).Q


def _matrix(rows, columns, power, seed=0):
    """Known singular values i^-power."""
    q = min(rows, columns)
    s = torch.arange(1, q + 1, dtype=torch.float64) ** -power
    return _orthonormal(rows, q, seed) * s @ _orthonormal(columns, q, seed + 1).mT, s


def _excess(a, factors, s, rank):
    """Return the truncation error over the optimal one, minus 1."""
    ut, vt = factors.prefix(rank)
    error = float(torch.linalg.norm(a - ut.double().mT @ vt.double()))
    return error / float(s[rank:].square().sum().sqrt()) - 1


@pytest.mark.parametrize("size", [(60, 60), (90, 40), (40, 90)])
@pytest.mark.parametrize("power", [0.1, 1.0, 3.0])
def test_full_and_gram_are_optimal_at_every_prefix(size, power):
    a, s = _matrix(*size, power)
    for triple in (full_svd(a), gram_svd(a, 12)):
        factors = pack(triple, 12, squared_norm(a))
        torch.testing.assert_close(factors.sigma[:, 0], s[:12], rtol=0, atol=1e-9)
        for rank in (1, 5, 12):
            assert abs(_excess(a, factors, s, rank)) < 1e-9
        torch.testing.assert_close(factors.ut @ factors.ut.mT, torch.diag(s[:12]), rtol=0, atol=1e-9)


def test_gram_keeps_small_directions_in_float32():
    """Singular values of 1e-5 of the largest: a Gram matrix alone loses them below 3e-4."""
    a, s = _matrix(50, 50, 3.0)
    factors = pack(gram_svd(a.float(), 40), 40, 1.0)
    assert float(s[39] / s[0]) < 2e-5
    torch.testing.assert_close(factors.sigma[:, 0], s[:40], rtol=0.02, atol=1e-7)


def test_gram_is_optimal_where_a_layer_has_collapsed():
    """A sum of thin products whose singular values fall to 1e-5: the eigenvectors alone gave 3e-4 more error than the best."""
    a = torch.zeros(144, 144)
    for rank in (24, 12, 6, 4):
        a += _orthonormal(144, rank, rank).float() * torch.logspace(0, -5, rank) @ _orthonormal(144, rank, 50 + rank).float().mT
    s = torch.linalg.svdvals(a.double())
    assert float(s[24:].norm() / s.norm()) < 2e-3
    assert _excess(a.double(), pack(gram_svd(a, 24), 24, 1.0), s, 24) < 1e-5


def test_gram_of_tiny_and_huge_weights():
    a, s = _matrix(30, 20, 1.0)
    for scale in (1e-28, 1e28):
        factors = pack(gram_svd((a * scale).float(), 2), 2, 1.0)
        torch.testing.assert_close(factors.sigma[:, 0] / scale, s[:2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("drift", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_warm_start_is_within_its_tolerance(drift, power):
    a, _ = _matrix(96, 80, power)
    g = torch.Generator().manual_seed(5)
    noise = torch.randn(96, 80, dtype=torch.float64, generator=g)
    moved = a + drift * torch.linalg.norm(a) / torch.linalg.norm(noise) * noise
    s = torch.linalg.svdvals(moved)
    basis = gram_svd(a.float(), 24)[2]
    for tolerance, bound in ((0.02, 0.025), (0.002, 0.01)):  # the gain of a half step, not a bound on the error
        triple, _ = warm_svd(moved.float(), basis, 24, tolerance)
        factors = pack(triple, 24, 1.0)
        for rank in (4, 12, 24):
            assert _excess(moved, factors, s, rank) < bound


def test_what_later_half_steps_gain_is_told_from_the_last_one():
    """Directions 1 and 2 of diag(4, 2, 1, 1) tilted towards the fourth, in float64: to first order the rest is known."""
    a, tilt = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)), 1e-4
    basis = torch.eye(4, 3, dtype=torch.float64)
    basis[3, :2] = tilt
    basis = torch.linalg.qr(basis)[0]
    new, core = torch.linalg.qr(a @ basis)
    z = a.mT @ new
    gained, later = _leading_gains(z - basis @ core.mT, core, 2)
    # A tilt costs (sigma_i^2 - 1) times its square, and the square falls to 1/16 and 1/4 in a half step.
    after = tilt**2 * (15 / 16 + 3 / 4)
    assert float(later) == pytest.approx(after, rel=1e-3)
    assert float(gained) == pytest.approx(tilt**2 * (15 + 3) - after, rel=1e-3)
    assert 16 + 4 + 1 - float(z.square().sum()) == pytest.approx(after, rel=1e-3)


@pytest.mark.parametrize("tiers", [(48, 24, 12), (32, 16, 8)])
def test_after_an_ordinary_round_two_half_steps_are_enough(tiers, monkeypatch):
    """An average of truncations and a little learning: what the spectra of real rounds look like."""
    g = torch.Generator().manual_seed(11)
    weight = torch.randn(144, 144, generator=g)
    for _ in range(3):
        before = weight
        factors = pack(full_svd(before), tiers[0], 1.0)
        moved = [[x + 0.2 * x.norm() / x.numel() ** 0.5 * torch.randn(x.shape, generator=g) for x in factors.prefix(r)] for r in tiers]
        weight = sum(ut.mT @ vt for ut, vt in moved) / len(tiers)
    basis = full_svd(before)[2][:, : tiers[0] + 16]
    sizes, qr = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda x: (sizes.append(x.shape), qr(x))[1])
    triple, converged = warm_svd(weight, basis, tiers[0], 0.02)
    assert converged
    assert len(sizes) == 1 + 2
    s = torch.linalg.svdvals(weight.double())
    for rank in tiers:
        assert _excess(weight.double(), pack(triple, tiers[0], 1.0), s, rank) < 0.02


def test_warm_start_reports_when_it_did_not_converge():
    a, _ = _matrix(200, 200, 0.01)
    basis = _orthonormal(200, 17, 7)
    assert warm_svd(a, basis, 17, 1e-6)[1] is False
    assert warm_svd(a, full_svd(a)[2][:, :17], 17, 1e-6)[1] is True


def test_stacked_factors_equal_the_svd_of_their_product():
    g = torch.Generator().manual_seed(3)
    us, vs = (torch.randn(n, 9, dtype=torch.float64, generator=g) for n in (40, 30))
    u, s, v = stacked_svd(us, vs)
    torch.testing.assert_close(s, torch.linalg.svdvals(us @ vs.mT)[:9], rtol=0, atol=1e-9)
    torch.testing.assert_close(u * s @ v.mT, us @ vs.mT, rtol=0, atol=1e-9)


def test_batched_groups_equal_single_blocks():
    a = torch.stack([_matrix(20, 15, 0.5, seed)[0] for seed in (0, 2, 4)])
    warm = warm_svd(a, full_svd(a)[2][..., :8], 4, 0.02)[0]
    for triple in (full_svd(a), gram_svd(a, 4), warm):
        factors = pack(triple, 4, squared_norm(a))
        assert (factors.ut.shape, factors.vt.shape, factors.sigma.shape) == ((4, 60), (4, 45), (4, 3))
        for g, block in enumerate(a):
            own = pack(full_svd(block), 4, 1.0)
            product = factors.ut[:, 20 * g : 20 * (g + 1)].mT @ factors.vt[:, 15 * g : 15 * (g + 1)]
            torch.testing.assert_close(product, own.ut.mT @ own.vt, rtol=0, atol=1e-9)


def test_signs_are_fixed_and_prefixes_share_memory():
    a, _ = _matrix(12, 10, 1.0)
    u, s, v = full_svd(a)
    flipped = pack((-u, s, -v), 4, 1.0)
    factors = pack((u, s, v), 4, 1.0)
    assert torch.equal(flipped.ut, factors.ut)
    assert torch.equal(flipped.vt, factors.vt)
    assert all(float(row[row.abs().argmax()]) > 0 for row in factors.ut)
    ut, vt = factors.prefix(2)
    assert (ut.data_ptr(), vt.data_ptr()) == (factors.ut.data_ptr(), factors.vt.data_ptr())
    assert ut.is_contiguous()
    with pytest.raises(ValueError, match=r"rank 5 is not within 1\.\.4"):
        factors.prefix(5)


def test_zero_singular_values_divide_by_nothing_and_a_floor_keeps_them_alive():
    deficient = torch.zeros(8, 6, dtype=torch.float64)
    deficient[0, 0] = 4.0
    dead = pack(full_svd(deficient), 3, 16.0)
    assert bool(torch.isfinite(dead.ut).all())
    assert float(dead.ut[1:].abs().max()) == float(dead.vt[1:].abs().max()) == 0.0
    alive = pack(full_svd(deficient), 3, 16.0, floor=0.01)
    torch.testing.assert_close(alive.ut.mT @ alive.vt, deficient, rtol=0, atol=1e-12)
    for factors, moves in ((dead, False), (alive, True)):
        ut, vt = factors.ut.clone().requires_grad_(), factors.vt.clone().requires_grad_()
        (ut.mT @ vt - 1.0).square().sum().backward()
        assert (float(ut.grad[1:].abs().max()) > 0) is moves
    assert torch.equal(pack(full_svd(torch.zeros(4, 4)), 2, 0.0, floor=0.01).vt, torch.zeros(2, 4))


def test_truncating_a_random_start_keeps_47_27_15_and_10_percent_of_its_energy():
    """A 128-wide square 3x3 kernel at ratios 1/2, 1/4, 1/8, 1/12: why the first rounds are near chance."""
    a = torch.randn(384, 384, generator=torch.Generator().manual_seed(0))
    beyond = energy_beyond(pack(full_svd(a), 64, squared_norm(a)), (64, 32, 16, 11))
    assert [1 - share for share in beyond.values()] == pytest.approx([0.47, 0.27, 0.15, 0.10], abs=0.01)


def test_rank_metrics_by_hand():
    three = torch.diag(torch.tensor([2.0, 2.0, 2.0, 0.0], dtype=torch.float64))
    factors = pack(full_svd(three), 4, 12.0)
    assert effective_rank(factors, 4) == pytest.approx(3.0, rel=1e-12)
    assert stable_rank(factors) == pytest.approx(3.0, rel=1e-12)
    beyond = energy_beyond(factors, (1, 2, 3))
    assert beyond == pytest.approx({1: 2 / 3, 2: 1 / 3, 3: 0.0}, abs=1e-12)
    cut = pack(full_svd(torch.eye(4, dtype=torch.float64)), 2, 4.0)
    assert effective_rank(cut, 4) == pytest.approx(4.0, rel=1e-12)  # the rest spread evenly is what it is here
    grouped = pack(full_svd(torch.eye(2, dtype=torch.float64).expand(3, 2, 2)), 1, 6.0)
    assert effective_rank(grouped, 2) == pytest.approx(6.0, rel=1e-12)
    zero = pack(full_svd(torch.zeros(3, 3)), 2, 0.0)
    assert (effective_rank(zero, 3), stable_rank(zero), energy_beyond(zero, [1])) == (0.0, 0.0, {1: 0.0})
    with pytest.raises(ValueError, match="rank 3"):
        energy_beyond(cut, [3])
