"""The objective without peers, two views of a node's own, alone to compare with and beside the objectives that exchange."""

from __future__ import annotations

import math

import pytest
import torch

from strategies.fedmuscle.config import Config
from strategies.fedmuscle.objectives import simclr_loss
from tests.fedmuscle.muscle_fixture import STEPS, muscle, states
from tests.fleet_fixture import rows, run


def test_nt_xent_written_out():
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.nn.functional.normalize(torch.randn(5, 7, generator=generator, dtype=torch.float64)) for _ in range(2))
    every = [*first, *second]
    total = 0.0
    for i, row in enumerate(every):
        others = {j: math.exp(float(row @ other) / 0.3) for j, other in enumerate(every) if j != i}
        total -= math.log(others[(i + 5) % 10] / sum(others.values()))
    assert float(simclr_loss(first, second, 0.3)) == pytest.approx(total / 10, rel=1e-12)
    first.requires_grad_()
    second.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: simclr_loss(a, b, 0.3), (first, second))


def test_alone_it_sends_nothing_takes_as_many_steps_and_moves_the_model(tmp_path):
    settings = muscle(tmp_path, num_rounds=3, fedmuscle__objective="simclr", fedmuscle__public_views="random")
    grid = run(settings, tmp_path / "out")
    assert not rows(tmp_path / "out", "failure")
    assert not any(dict(content["arrays"]) for _, _, content in [*grid.sent, *grid.received] if "arrays" in content)
    numbers = [row["method"] for row in rows(tmp_path / "out", "round", "fedmuscle")]
    assert numbers[0] == {}
    assert all(n["peers"] == 0.0 and 0.0 < n["contrastive_loss"] < math.log(2 * 8) + 1.0 for n in numbers[1:])
    last = states(tmp_path / "out")
    assert {float(state["adam.step"]) for key, state in last.items() if key.endswith("3")} == {2.0 * STEPS}


@pytest.mark.parametrize("way", ["round", "gradient", "step"])
def test_beside_an_exchange_it_changes_the_steps_but_not_what_travels(tmp_path, way):
    found = {}
    for weight in (0.0, 1.0):
        out = tmp_path / f"{weight}"
        settings = muscle(
            tmp_path, num_rounds=2, fedmuscle__simclr_weight=weight, fedmuscle__public_views="random", fedmuscle__exchange=way
        )
        run(settings, out)
        assert not rows(out, "failure")
        found[weight] = states(out), rows(out, "round", "fedmuscle")[-1]
    assert found[0.0][1]["bytes_up"] == found[1.0][1]["bytes_up"]
    assert found[0.0][1]["method"]["peers"] == found[1.0][1]["method"]["peers"] == 2.0
    key = max(found[0.0][0])
    assert not torch.equal(found[0.0][0][key]["projector.weight"], found[1.0][0][key]["projector.weight"])


def test_settings_that_make_no_two_views_or_no_exchange_are_refused():
    with pytest.raises(ValueError, match="public-views = 'random'"):
        Config(objective="simclr")
    with pytest.raises(ValueError, match="public-views = 'random'"):
        Config(simclr_weight=1.0)
    with pytest.raises(ValueError, match="set it to 0"):
        Config(objective="simclr", public_views="random", simclr_weight=1.0)
