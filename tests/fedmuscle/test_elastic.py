"""Prefixes and inner layers."""

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.muscle_data import representations
from strategies.fedmuscle.elastic import (
    elastic_loss,
    layer_alignment_loss,
    layer_weight,
    mrl_e_outputs,
    mrl_outputs,
    nested_head_loss,
    nested_muscle_loss,
    sample_cut,
)
from strategies.fedmuscle.loss import muscle_loss
from strategies.fedmuscle.temperatures import LinearSchedule

F64, LINEAR = torch.float64, LinearSchedule()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_full_width_alone_is_the_muscle_loss():
    anchor, peers = representations("mid", 3, 6, 16, dtype=F64)
    assert float(nested_muscle_loss(anchor, peers, LINEAR, [16])) == pytest.approx(float(muscle_loss(anchor, peers, LINEAR)), abs=1e-12)


def test_mean_over_renormalised_prefixes_and_gradient():
    anchor, peers = representations("classes", 2, 5, 8, dtype=F64)
    cut = lambda k: muscle_loss(F.normalize(anchor[:, :k], dim=1), [F.normalize(p[:, :k], dim=1) for p in peers], LINEAR)  # noqa: E731
    assert float(nested_muscle_loss(anchor, peers, LINEAR, [2, 8, 4])) == pytest.approx(float(cut(2) + cut(4) + cut(8)) / 3, abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: nested_muscle_loss(x, peers, LINEAR, [2, 8]), anchor.requires_grad_(), atol=1e-7)


def test_narrow_peers_are_met_on_the_common_prefix():
    anchor, peers = representations("mid", 2, 5, 8, dtype=F64)
    mixed = [peers[0], peers[1][:, :4]]
    got = nested_muscle_loss(anchor, mixed, LINEAR, [2, 4, 8])
    assert float(got) == pytest.approx(float(nested_muscle_loss(anchor, peers, LINEAR, [2, 4])), abs=1e-12)
    with pytest.raises(ValueError, match=r"peer 0 has shape \(5, 8\), the anchor \(5, 4\)"):
        nested_muscle_loss(anchor[:, :4], peers, LINEAR, [2])


@pytest.mark.parametrize("sizes", [[], [0, 4], [4, 4], [4, 9]])
def test_bad_sizes_are_refused(sizes):
    anchor, peers = representations("mid", 1, 5, 8)
    with pytest.raises(ValueError, match="prefix sizes"):
        nested_muscle_loss(anchor, peers, LINEAR, sizes)


def test_heads_by_matrix_products():
    rep, weight, bias = draw(4, 6), draw(3, 6, seed=1), draw(3, seed=2)
    short, full = mrl_e_outputs(rep, weight, bias, [6, 2])
    torch.testing.assert_close(short, rep[:, :2] @ weight[:, :2].T + bias)
    torch.testing.assert_close(full, rep @ weight.T + bias)
    own = mrl_outputs(rep, [draw(3, 2), weight], [bias, bias])
    torch.testing.assert_close(own[0], rep[:, :2] @ draw(3, 2).T + bias)
    torch.testing.assert_close(own[1], full)


def test_nested_head_loss_is_a_weighted_sum():
    targets = torch.tensor([0, 2])
    outputs = [draw(2, 3), draw(2, 3, seed=1)]
    each = [float(F.cross_entropy(output, targets)) for output in outputs]
    assert float(nested_head_loss(outputs, targets, F.cross_entropy)) == pytest.approx(sum(each))
    assert float(nested_head_loss(outputs, targets, F.cross_entropy, [0.5, 2.0])) == pytest.approx(0.5 * each[0] + 2 * each[1])
    with pytest.raises(ValueError):
        nested_head_loss(outputs, targets, F.cross_entropy, [1.0])


def test_alignment_by_hand_and_to_the_inner_layer_only():
    """Teacher (1/2, 1/2), student (3/4, 1/4), T = 2: 2 (log 2/3 + log 2) / 2 = log 4/3."""
    last = torch.zeros(1, 2, requires_grad=True)
    inner = torch.tensor([[2 * math.log(3.0), 0.0]], requires_grad=True)
    loss = layer_alignment_loss(inner, last, temperature=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4 / 3), rel=1e-6)
    assert last.grad is None
    # T d KL / d inner = student - teacher
    torch.testing.assert_close(inner.grad, torch.tensor([[0.25, -0.25]]))
    with pytest.raises(ValueError, match=r"\(1, 3\) and \(1, 2\)"):
        layer_alignment_loss(torch.zeros(1, 3), last)


def test_elastic_loss_adds_its_five_parts():
    inner, last = draw(4, 6), draw(4, 6, seed=1)
    loss = lambda rep: rep.square().mean()  # noqa: E731
    parts = loss(last) + loss(last[:, :3]) + 0.5 * (loss(inner) + loss(inner[:, :3])) + 2.0 * layer_alignment_loss(inner, last)
    got = elastic_loss(inner, last, 3, loss, inner_weight=0.5, alignment_weight=2.0)
    assert float(got) == pytest.approx(float(parts))


def test_layer_weights_by_hand():
    assert [layer_weight(i, 4) for i in range(3)] == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert [layer_weight(i, 3, every_layer=True) for i in range(2)] == pytest.approx([0.5, 0.5 / (1 + math.log(2))])
    for layer in (-1, 3):
        with pytest.raises(ValueError, match="inner layers are 0 to 2"):
            layer_weight(layer, 4)


def test_sampled_cuts_cover_inner_layers_and_sizes():
    generator = torch.Generator().manual_seed(0)
    cuts = {sample_cut(3, [4, 8], generator) for _ in range(60)}
    assert cuts == {(0, 4), (0, 8), (1, 4), (1, 8)}
    with pytest.raises(ValueError, match="at least 2 layers"):
        sample_cut(1, [4], generator)
