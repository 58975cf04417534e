"""Our SGD against torch's, bit for bit, and what a process need not import for it."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from client_app.training import sgd
from tests.fleet_fixture import ROOT


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    made = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 3))
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return made


def groups(model: nn.Module) -> list[dict[str, object]]:
    return [
        {"params": list(model[0].parameters()), "lr": 0.3},
        {"params": list(model[1].parameters()), "weight_decay": 0.5},
        {"params": list(model[3:].parameters()), "momentum": 0.0},
    ]


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.01), (0.0, 0.01), (0.5, 0.0)])
@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "groups"])
def test_the_same_bits_as_torchs_after_every_step(momentum, decay, grouped):
    ours, theirs = net(), net()
    pick = groups if grouped else (lambda model: model.parameters())
    mine = sgd(pick(ours), rate=0.1, momentum=momentum, weight_decay=decay)
    reference = torch.optim.SGD(pick(theirs), lr=0.1, momentum=momentum, weight_decay=decay, fused=True)
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        batch = torch.randn((8, 2, 6, 6), generator=generator)
        for model, optimizer in ((ours, mine), (theirs, reference)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_step_by_hand():
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimizer = sgd([weight], rate=0.1, momentum=0.5, weight_decay=0.2)
    for _ in range(2):
        weight.grad = torch.tensor([1.0, -1.0], dtype=torch.float64)
        optimizer.step()
    # d1 = g + 0.2 w = (1.2, -0.6); w1 = w - 0.1 d1 = (0.88, 2.06)
    # d2 = 0.5 d1 + g + 0.2 w1 = (0.6 + 1.176, -0.3 - 0.588) = (1.776, -0.888); w2 = (0.7024, 2.1488)
    torch.testing.assert_close(weight.data, torch.tensor([0.7024, 2.1488], dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_parameter_without_a_gradient_stays_and_may_get_one_later():
    first, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = sgd([first, late], rate=0.1, momentum=0.9, weight_decay=0.0)
    first.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(late.data, torch.ones(2))
    late.grad = torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(late.data, torch.full((2,), 0.9))  # its first step, without momentum
    torch.testing.assert_close(first.data, torch.full((2,), 1 - 0.1 - 0.19))
    optimizer.zero_grad()
    before = copy.deepcopy(first.data)
    optimizer.step()
    assert first.grad is None
    assert torch.equal(first.data, before)


def test_training_loads_no_compiler():
    code = (
        "import sys, torch, client_app.training as t\n"
        "w = torch.nn.Linear(2, 2); o = t.sgd(w.parameters(), rate=.1, momentum=.9, weight_decay=0.)\n"
        "w(torch.ones(3, 2)).sum().backward(); o.step(); o.zero_grad()\n"
        "sys.exit(' '.join({'torch._dynamo', 'sympy', 'triton'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
