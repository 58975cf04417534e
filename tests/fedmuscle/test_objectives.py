"""Pairwise and Gramian objectives against direct formulas."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.muscle_data import representations
from strategies.fedmuscle.loss import muscle_loss
from strategies.fedmuscle.objectives import OBJECTIVES, gramian_loss, objective_loss, pairwise_loss, volumes
from strategies.fedmuscle.temperatures import LinearSchedule

F64 = torch.float64


def test_pairwise_is_muscle_at_one_peer_and_adds_over_peers():
    anchor, peers = representations("mid", 3, 7, 12, dtype=F64)
    each = [muscle_loss(anchor, [peer], (0.1, 0.05)) for peer in peers]
    assert float(pairwise_loss(anchor, peers, 0.1)) == pytest.approx(float(sum(each)), abs=1e-12)


@pytest.mark.parametrize("num_peers", [1, 2, 4])
@pytest.mark.parametrize("kind", ["random", "aligned", "cone"])
def test_volumes_are_determinants(num_peers, kind):
    anchor, peers = representations(kind, num_peers, 5, 9, dtype=F64)
    for i in range(5):
        for j in range(5):
            rows = torch.stack([anchor[i], *(peer[j] for peer in peers)])
            want = (torch.linalg.det(rows @ rows.T) + 1e-6).sqrt()
            assert float(volumes(anchor, peers)[i, j]) == pytest.approx(float(want), abs=1e-7)


def test_volume_by_hand():
    """A square of side 1, a degenerate one, and the height of a vector at 60 degrees."""
    anchor = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    peer = torch.tensor([[0.5, 3**0.5 / 2, 0.0], [0.0, -1.0, 0.0]])
    want = torch.tensor([[3**0.5 / 2, 1.0], [0.5, 0.0]], dtype=F64)
    torch.testing.assert_close(volumes(anchor, [peer], eps=1e-12), want, atol=5e-5, rtol=0)


def test_gramian_gradient_is_finite_at_perfect_alignment():
    anchor, _ = representations("random", 1, 6, 8)
    peers = [anchor.clone(), anchor.clone(), anchor.clone()]
    anchor.requires_grad_()
    loss = gramian_loss(anchor, peers)
    loss.backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    assert torch.isfinite(anchor.grad).all()
    assert anchor.grad.abs().max() < 100


def test_gramian_value_and_gradient():
    anchor, peers = representations("mid", 2, 5, 8, dtype=F64)
    volume = volumes(anchor, peers)
    target = torch.arange(5)
    want = 0.5 * (
        F.cross_entropy(-volume / 0.07, target, label_smoothing=0.1) + F.cross_entropy(-volume.T / 0.07, target, label_smoothing=0.1)
    )
    assert float(gramian_loss(anchor, peers)) == pytest.approx(float(want))
    assert torch.autograd.gradcheck(lambda x: gramian_loss(x, peers), anchor.requires_grad_())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_moves_the_anchor_only(name):
    anchor, peers = representations("mid", 3, 6, 8)
    anchor.requires_grad_()
    for peer in peers:
        peer.requires_grad_()
    loss = objective_loss(name, anchor, peers, LinearSchedule())
    loss.backward()
    assert loss.shape == ()
    assert all(peer.grad is None for peer in peers)
    assert (anchor.grad.abs().max() > 0) == (name != "none")
    alone = objective_loss(name, anchor, [], LinearSchedule())
    assert alone.item() == 0.0
    assert alone.requires_grad


def test_refusals():
    anchor, peers = representations("mid", 1, 6, 8)
    with pytest.raises(ValueError, match="'cosine' is unknown; choose one of muscle, pairwise, gramian, none"):
        objective_loss("cosine", anchor, peers, LinearSchedule())
    for call in (lambda p: pairwise_loss(anchor, p, 0.1), lambda p: gramian_loss(anchor, p)):
        with pytest.raises(ValueError, match=r"peer 0 is torch.float32 \(5, 8\)"):
            call([peers[0][:5]])
        with pytest.raises(ValueError, match="at least one peer"):
            call([])
