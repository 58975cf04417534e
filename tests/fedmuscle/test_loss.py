"""The Muscle loss against its definition, its special cases, and itself under other evaluators."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.muscle_data import KINDS, representations
from strategies.fedmuscle.evaluators import mean_field, naive
from strategies.fedmuscle.exact import exact, feasible
from strategies.fedmuscle.loss import attach, evaluate, muscle_loss, shared_information
from strategies.fedmuscle.temperatures import FixedSchedule, LinearSchedule, Temperatures

FIXED, LINEAR = FixedSchedule(), LinearSchedule()
F64 = torch.float64


def by_definition(anchor, peers, tau, gamma):
    """The mean loss as the paper prints it, in Python numbers: one exp at a time over every tuple."""
    batch, count = len(anchor), len(peers)
    dot = lambda x, y: sum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))  # noqa: E731
    losses = []
    for i in range(batch):
        weights = {}
        for j in itertools.product(range(batch), repeat=count):
            alpha = math.exp(-0.5 * sum(gamma * dot(peers[m][j[m]], peers[k][j[k]]) for m in range(count) for k in range(count) if k != m))
            weights[j] = alpha * math.exp(sum(dot(anchor[i], peers[m][j[m]]) / tau for m in range(count)))
        losses.append(-math.log(weights[(i,) * count] / sum(weights.values())))
    return sum(losses) / batch


@pytest.mark.parametrize("num_peers", [1, 2, 3, 4])
def test_naive_is_the_definition(num_peers):
    anchor, peers = representations("mid", num_peers, 3, 4, seed=num_peers, dtype=F64)
    got = evaluate(anchor, peers, (0.2, 0.15), evaluator="naive")
    assert float(got.loss) == pytest.approx(by_definition(anchor, peers, 0.2, 1 / 0.15 - 1 / 0.2), abs=1e-12)


@pytest.mark.parametrize("schedule", [FIXED, LINEAR], ids=["fixed", "linear"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_peers", "batch"), [(1, 7), (2, 6), (3, 6), (4, 5), (5, 4), (6, 3)])
def test_exact_equals_naive(num_peers, batch, kind, schedule):
    anchor, peers = representations(kind, num_peers, batch, 16, dtype=F64)
    want = evaluate(anchor, peers, schedule, evaluator="naive")
    got = evaluate(anchor, peers, schedule, evaluator="exact")
    assert abs(float(want.loss - got.loss)) < 1e-10
    torch.testing.assert_close(got.gradient, want.gradient, rtol=0, atol=1e-10)
    assert want.gradient.abs().max() > 1e-4


def test_exact_in_chunks_equals_naive(monkeypatch):
    monkeypatch.setattr("strategies.fedmuscle.exact.MAX_ROWS", 8)
    anchor, peers = representations("classes", 6, 3, 8, dtype=F64)
    want, got = evaluate(anchor, peers, LINEAR, evaluator="naive"), evaluate(anchor, peers, LINEAR, evaluator="exact")
    torch.testing.assert_close(got.gradient, want.gradient, rtol=0, atol=1e-10)
    assert float(got.loss) == pytest.approx(float(want.loss), abs=1e-10)


@pytest.mark.parametrize("num_peers", [1, 3, 5])
def test_float32_is_close_to_float64(num_peers):
    anchor, peers = representations("aligned", num_peers, 8, 32, dtype=F64)
    want = evaluate(anchor, peers, FIXED, evaluator="exact")
    got = evaluate(anchor.float(), [peer.float() for peer in peers], FIXED, evaluator="exact")
    assert not got.widened
    assert got.gradient.dtype == torch.float32
    assert float((got.gradient - want.gradient).norm() / want.gradient.norm()) < 2e-5
    assert float(got.loss) == pytest.approx(float(want.loss), abs=5e-6)


@pytest.mark.parametrize("evaluator", ["naive", "exact", "mean-field"])
def test_one_peer_is_cross_entropy(evaluator):
    """The positive is in the denominator, and mean field is exact for one site."""
    anchor, (peer,) = representations("mid", 1, 9, 12, dtype=F64)
    anchor = anchor.requires_grad_()
    want = F.cross_entropy(anchor @ peer.T / 0.2, torch.arange(9))
    (gradient,) = torch.autograd.grad(want, anchor)
    got = muscle_loss(anchor, [peer], (0.2, 0.15), evaluator=evaluator)
    assert got.item() == pytest.approx(want.item(), abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(got, anchor)[0], gradient, rtol=0, atol=1e-12)


def test_only_the_anchor_gets_a_gradient_and_it_is_scaled():
    anchor, peers = representations("mid", 3, 5, 8, dtype=F64)
    anchor.requires_grad_()
    for peer in peers:
        peer.requires_grad_()
    muscle_loss(anchor, peers, LINEAR).backward()
    assert all(peer.grad is None for peer in peers)
    first = anchor.grad.clone()
    anchor.grad = None
    (3.0 * muscle_loss(anchor, peers, LINEAR)).backward()
    torch.testing.assert_close(anchor.grad, 3.0 * first)


def test_gradient_by_differences():
    anchor, peers = representations("classes", 4, 4, 5, dtype=F64)
    assert torch.autograd.gradcheck(lambda x: muscle_loss(x, peers, LINEAR), anchor.requires_grad_(), atol=1e-8)


@pytest.mark.parametrize("evaluator", ["naive", "exact"])
@pytest.mark.parametrize("num_peers", [2, 3, 4, 5])
def test_order_of_peers_is_irrelevant(num_peers, evaluator):
    anchor, peers = representations("classes", num_peers, 4, 8, dtype=F64)
    one, two = (evaluate(anchor, order, LINEAR, evaluator=evaluator) for order in (peers, peers[1:] + peers[:1]))
    assert float(one.loss) == pytest.approx(float(two.loss), abs=1e-12)
    torch.testing.assert_close(one.gradient, two.gradient, rtol=0, atol=1e-12)


def test_permuting_the_public_batch_permutes_the_gradient():
    anchor, peers = representations("mid", 3, 6, 8, dtype=F64)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    one = evaluate(anchor, peers, LINEAR)
    two = evaluate(anchor[order], [peer[order] for peer in peers], LINEAR)
    torch.testing.assert_close(one.gradient[order], two.gradient, rtol=0, atol=1e-12)
    out_of_step = evaluate(anchor, [peers[0][order], *peers[1:]], LINEAR)
    assert float(out_of_step.loss) > float(one.loss) + 0.5


def test_no_peers_is_zero():
    anchor = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = muscle_loss(anchor, [], LINEAR)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(anchor.grad, torch.zeros(4, 3))


def relative(got, want):
    return float((got.gradient - want.gradient).norm() / want.gradient.norm())


@pytest.mark.parametrize(("schedule", "num_peers", "limit"), [(FIXED, 3, 0.035), (FIXED, 4, 0.035), (LINEAR, 2, 0.10), (LINEAR, 5, 0.01)])
@pytest.mark.parametrize("kind", KINDS)
def test_mean_field_error(schedule, num_peers, limit, kind):
    anchor, peers = representations(kind, num_peers, 32, 256, dtype=F64)
    want, got = (evaluate(anchor, peers, schedule, evaluator=e) for e in ("exact", "mean-field"))
    assert relative(got, want) < limit
    assert got.bound
    assert -0.7 < float(got.loss - want.loss) <= 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_error_and_effective_sample_size(kind):
    anchor, peers = representations(kind, 3, 24, 64, dtype=F64)
    want = evaluate(anchor, peers, FIXED, evaluator="exact")
    draw = lambda samples: evaluate(  # noqa: E731
        anchor, peers, FIXED, evaluator="sampled", samples=samples, generator=torch.Generator().manual_seed(1)
    )
    few, many = draw(256), draw(16384)
    assert relative(few, want) < 0.06
    assert abs(float(few.loss - want.loss)) < 0.03
    assert relative(many, want) < 0.01
    assert 0.5 < few.ess <= 1.0
    assert few.fallbacks == 0
    assert torch.equal(few.gradient, draw(256).gradient)


def test_sampled_falls_back_to_mean_field_where_weights_degenerate():
    anchor, peers = representations("mid", 31, 16, 64, dtype=F64)
    pair = Temperatures(0.2, 0.12)
    got = evaluate(anchor, peers, pair, evaluator="sampled", samples=1024, generator=torch.Generator().manual_seed(0))
    assert got.ess < 0.05
    assert got.fallbacks == 16
    assert torch.equal(got.gradient, evaluate(anchor, peers, pair, evaluator="mean-field").gradient)


def test_guard_widens_where_float32_underflows():
    """tau = 0.05, gamma = 13.3: six aligned peers; float32 was 1.7 % off or NaN."""
    anchor, peers = representations("classes", 6, 4, 16, dtype=F64)
    pair = Temperatures(0.05, 0.03)
    want = exact(anchor, torch.stack(peers), pair)
    got = evaluate(anchor.float(), [peer.float() for peer in peers], pair, evaluator="exact")
    assert got.widened
    assert got.gradient.dtype == torch.float32
    assert relative(got, want) < 1e-4
    torch.testing.assert_close(want.gradient, naive(anchor, torch.stack(peers), pair).gradient, rtol=0, atol=1e-9)


def test_float64_out_of_range_is_refused():
    anchor, peers = representations("classes", 5, 4, 16, dtype=F64)
    with pytest.raises(FloatingPointError, match=r"tau = 0.002.*raise tau"):
        evaluate(anchor, peers, Temperatures(0.002, 0.001), evaluator="exact")


def test_autocast_and_half_precision_compute_in_float32():
    anchor, peers = representations("mid", 3, 8, 16)
    want = evaluate(anchor, peers, LINEAR)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = evaluate(anchor, peers, LINEAR)
    assert torch.equal(got.gradient, want.gradient)
    half = anchor.bfloat16().requires_grad_()
    loss = muscle_loss(half, [peer.bfloat16() for peer in peers], LINEAR)
    loss.backward()
    assert loss.dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(float(want.loss), rel=0.02)


def test_auto_takes_exact_while_it_is_cheap():
    assert [feasible(m, 32) for m in (1, 2, 3, 4, 5, 6)] == [True, True, True, True, True, False]
    assert feasible(2, 256)
    assert not feasible(4, 128)
    anchor, peers = representations("mid", 31, 4, 8)
    assert evaluate(anchor, peers, LINEAR).evaluator == "mean-field"
    assert evaluate(anchor, peers[:3], LINEAR).evaluator == "exact"


def test_mean_field_hardly_depends_on_the_order_of_many_peers():
    anchor, peers = representations("classes", 31, 8, 32, dtype=F64)
    pair = LINEAR.at(31)
    one, two = (mean_field(anchor, torch.stack(order), pair) for order in (peers, peers[::-1]))
    assert relative(one, two) < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peers": [torch.zeros(4, 8)]}, r"peer 0 has shape \(4, 8\), the anchor \(5, 8\)"),
        ({"peers": [torch.zeros(5, 8), torch.zeros(5, 1)]}, r"peer 1 has shape \(5, 1\)"),
        ({"peers": [torch.zeros(5, 8, dtype=F64)]}, r"peer 0 is torch.float64.*peer.to\(anchor\)"),
        ({"anchor_BD": torch.zeros(5)}, r"anchor of shape \(5,\)"),
        ({"anchor_BD": torch.zeros(0, 8)}, r"neither empty"),
        ({"evaluator": "fast"}, "'fast' is unknown; choose one of auto, naive, exact, mean-field, sampled"),
        ({"evaluator": "sampled"}, "torch.Generator"),
        ({"temperatures": (0.15, 0.2)}, "0 < tau-prev < tau"),
        ({"temperatures": (0.2, 0.2)}, "0 < tau-prev < tau"),
        ({"peers": [torch.zeros(5, 8)] * 7, "temperatures": (0.2, 0.15)}, "with 7 peers penalise models that agree"),
        ({"peers": [torch.zeros(5, 8)] * 8, "evaluator": "exact"}, None),
        ({"peers": [torch.zeros(64, 8)] * 5, "anchor_BD": torch.zeros(64, 8), "evaluator": "naive"}, r"would build 34.4 GB for 5 peers"),
        ({"peers": [torch.zeros(64, 8)] * 7, "anchor_BD": torch.zeros(64, 8), "evaluator": "exact"}, "use auto or mean-field"),
    ],
)
def test_refusals(change, message):
    arguments = {"anchor_BD": torch.zeros(5, 8), "peers": [torch.zeros(5, 8)], "temperatures": LINEAR} | change
    if message is None:
        assert float(muscle_loss(**arguments)) == pytest.approx(8 * math.log(5), rel=1e-5)
    else:
        with pytest.raises(ValueError, match=message):
            muscle_loss(**arguments)


@pytest.mark.parametrize("evaluator", ["naive", "exact", "mean-field"])
def test_nan_is_named(evaluator):
    anchor, peers = representations("mid", 3, 4, 8)
    peers[1][2, 3] = float("nan")
    with pytest.raises(FloatingPointError, match="representations of peer 1 hold NaN"):
        evaluate(anchor, peers, LINEAR, evaluator=evaluator)
    with pytest.raises(FloatingPointError, match="anchor's representations"):
        evaluate(anchor * float("inf"), peers[2:], LINEAR, evaluator=evaluator)


def test_attach_checks_what_came_from_elsewhere():
    anchor = torch.ones(2, 3, requires_grad=True)
    attach(anchor, torch.tensor(1.5), torch.full((2, 3), 0.25)).backward()
    assert torch.equal(anchor.grad, torch.full((2, 3), 0.25))
    with pytest.raises(ValueError, match=r"gradient of shape \(2, 2\)"):
        attach(anchor, torch.tensor(0.0), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="NaN or infinity"):
        attach(anchor, torch.tensor(0.0), torch.full((2, 3), float("nan")))


def test_shared_information_is_not_printed_where_it_says_nothing():
    assert shared_information(1.0, 2, 10) == pytest.approx(2 * math.log(10) - 1)
    assert shared_information(5.0, 2, 10) is None
