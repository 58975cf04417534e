"""Unit rows, narrower numbers, refusals."""

import math

import pytest
import torch

from benchmarks.muscle_data import representations
from strategies.fedmuscle.loss import evaluate
from strategies.fedmuscle.temperatures import LinearSchedule
from strategies.fedmuscle.transport import TRANSPORTS, check_rows, decode_rows, encode_rows, normalise


def test_normalise_by_hand_and_zero_rows():
    rep = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]], requires_grad=True)
    unit, zeros = normalise(rep)
    torch.testing.assert_close(unit, torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]]))
    assert zeros == 1
    unit.sum().backward()
    # d(x / |x|) / dx . (1, 1) = ((1, 1) - u (u . (1, 1))) / |x|
    torch.testing.assert_close(rep.grad, torch.tensor([[(1 - 0.6 * 1.4) / 5, (1 - 0.8 * 1.4) / 5], [0.0, 0.0], [0.5, 0.0]]))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e30])
def test_normalise_small_and_large_rows(scale):
    unit, zeros = normalise(torch.tensor([[3.0 * scale, -4.0 * scale]]))
    torch.testing.assert_close(unit, torch.tensor([[0.6, -0.8]]))
    assert zeros == 0


def test_normalise_gradient_and_dtypes():
    rep = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: normalise(x)[0], rep)
    assert normalise(rep.detach().half())[0].dtype == torch.float32
    assert normalise(rep)[0].dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert normalise(rep.detach().float())[0].dtype == torch.float32


def test_int8_by_hand():
    rep = torch.tensor([[0.8, -0.6], [0.0, 1.0], [0.0, 0.0]])
    sent = encode_rows(rep, "int8")
    assert sent.dtype == torch.int8
    assert sent.tolist() == [[127, -95], [0, 127], [0, 0]]
    length = math.hypot(127, 95)
    got = decode_rows(sent[:2], shape=(2, 2), sender="a")
    torch.testing.assert_close(got, torch.tensor([[127 / length, -95 / length], [0.0, 1.0]]))
    with pytest.raises(ValueError, match=r"node 'a' sent 1 rows that are not of length 1; row 2 has length 0"):
        decode_rows(sent, shape=(3, 2), sender="a")


@pytest.mark.parametrize(
    ("transport", "row_error", "gradient_error"), [("float32", 1e-6, 1e-6), ("float16", 1e-3, 1e-3), ("int8", 0.015, 0.008)]
)
@pytest.mark.parametrize("kind", ["random", "aligned", "classes"])
def test_round_trip(transport, row_error, gradient_error, kind):
    anchor, peers = representations(kind, 3, 16, 256)
    arrived = [decode_rows(encode_rows(peer, transport), shape=(16, 256), sender="a") for peer in peers]
    for peer, got in zip(peers, arrived, strict=True):
        assert float((peer - got).norm(dim=1).max()) < row_error
        torch.testing.assert_close(got.norm(dim=1), torch.ones(16))
    want, got = evaluate(anchor, peers, LinearSchedule()), evaluate(anchor, arrived, LinearSchedule())
    assert float((want.gradient - got.gradient).norm() / want.gradient.norm()) < gradient_error


def test_bytes_of_a_batch():
    rep = representations("random", 1, 32, 256)[0]
    assert {t: encode_rows(rep, t).nbytes for t in TRANSPORTS} == {"float32": 32768, "float16": 16384, "int8": 8192}


@pytest.mark.parametrize("poison", [0.0, 3.0, 0.5, math.nan, math.inf])
@pytest.mark.parametrize("transport", ["float32", "float16"])
def test_poisoned_rows_are_refused_with_their_sender(poison, transport):
    sent = encode_rows(representations("random", 1, 6, 16)[0], transport)
    sent[4] *= poison
    with pytest.raises(ValueError, match=r"node 'pi-3' sent 1 rows that are not of length 1; row 4 has length"):
        decode_rows(sent, shape=(6, 16), sender="pi-3")


def test_refusals():
    with pytest.raises(ValueError, match=r"node 'a' sent representations as torch.int64; known are float32, float16, int8"):
        decode_rows(torch.zeros(2, 3, dtype=torch.int64), shape=(2, 3), sender="a")
    with pytest.raises(ValueError, match=r"shape \(3, 3\), expected \(2, 3\)"):
        decode_rows(torch.eye(3), shape=(2, 3), sender="a")
    with pytest.raises(ValueError, match="choose one of float32, float16, int8"):
        encode_rows(torch.eye(2), "int4")
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode_rows(torch.tensor([[math.nan, 1.0]]), "int8")
    check_rows(torch.eye(2), sender="a")
