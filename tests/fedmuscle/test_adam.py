"""The optimiser of the contrastive phase against torch's own, uninterrupted."""

import torch
from torch import nn

from strategies.fedmuscle.adam import Adam


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(5, 4, generator=generator)).square().mean()


def test_state_carried_to_a_new_optimiser_goes_on_as_if_never_stopped():
    torch.manual_seed(0)
    straight = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    carried = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    carried.load_state_dict(straight.state_dict())
    reference = torch.optim.AdamW(straight.parameters(), lr=0.01, weight_decay=0.1)
    state = None
    for step in range(6):
        reference.zero_grad()
        loss_of(straight, step).backward()
        reference.step()
        optimizer = Adam(carried.named_parameters(), rate=0.01, weight_decay=0.1)
        if state is not None:
            optimizer.load(state)
        optimizer.step(loss_of(carried, step))
        state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    for one, two in zip(straight.parameters(), carried.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert float(state["step"]) == 6
    assert state.keys() == {"step", *(f"{m}.{n}" for m in ("exp_avg", "exp_avg_sq") for n, _ in carried.named_parameters())}


def test_a_parameter_without_gradient_decays_and_counts_along():
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Adam([("used", used), ("idle", idle)], rate=0.1, weight_decay=0.5)
    optimizer.step((used * 3).sum())
    torch.testing.assert_close(idle.detach(), torch.full((2,), 1 - 0.1 * 0.5))
    torch.testing.assert_close(used.detach(), torch.full((2,), 0.95 - 0.1))
    again = Adam([("used", used), ("idle", idle)], rate=0.1, weight_decay=0.5)
    again.load(optimizer.state())
    assert float(again.state()["step"]) == 1


def test_a_part_may_have_a_rate_of_its_own():
    """Adam's first step is as long as the rate, whatever the gradient."""
    body, head = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Adam([("body.weight", body), ("head.weight", head)], rate=0.1, weight_decay=0.0, rates={"head": 0.5})
    optimizer.step((body * 3).sum() - (head * 7).sum())
    torch.testing.assert_close(body.detach(), torch.full((2,), 0.9))
    torch.testing.assert_close(head.detach(), torch.full((2,), 1.5))
