"""Random views of public items."""

from __future__ import annotations

import pytest
import torch

from server_app.overrides import merged
from server_app.preflight import check_fleet
from server_app.settings import SettingsError
from strategies.fedmuscle.views import random_view
from strategies.seeds import generator
from tests.fedmuscle.muscle_fixture import muscle, states, trainer
from tests.fleet_fixture import rows, run


def test_a_view_keeps_shape_and_range_and_follows_its_generator_alone():
    batch = torch.randint(0, 256, (16, 3, 12, 10), dtype=torch.uint8, generator=generator("pictures"))
    one, again, other = (random_view(batch, generator(seed)) for seed in (1, 1, 2))
    assert one.shape == batch.shape
    assert one.dtype == torch.float32
    assert 0.0 <= float(one.min()) <= float(one.max()) <= 255.0
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_an_even_picture_stays_even_and_its_brightness_within_the_jitter():
    views = random_view(torch.full((200, 1, 8, 8), 100, dtype=torch.uint8), generator(0))
    torch.testing.assert_close(views.amax((1, 2, 3)), views.amin((1, 2, 3)), rtol=0, atol=1e-3)
    levels = views.mean((1, 2, 3))
    assert 60.0 <= float(levels.min()) < 70.0
    assert 130.0 < float(levels.max()) <= 140.0


def test_a_fifth_of_the_views_is_grey_and_half_is_mirrored():
    batch = torch.zeros(1000, 3, 8, 8)
    batch[:, 0] = torch.linspace(0.0, 200.0, 8)  # red rises from left to right
    views = random_view(batch, generator(0))
    grey = (views.amax(1) - views.amin(1)).amax((1, 2)) < 1e-3
    assert 0.15 < float(grey.double().mean()) < 0.25
    falls = views[:, 0, :, 0].mean(1) > views[:, 0, :, -1].mean(1)
    assert 0.45 < float(falls.double().mean()) < 0.55


def test_what_is_no_picture_is_refused():
    with pytest.raises(ValueError, match=r"shape \(7,\) are no pictures.*fedmuscle.public-views"):
        random_view(torch.zeros(4, 7), generator(0))


def test_a_public_set_without_pictures_is_refused_before_anything_starts(tmp_path):
    lines = [f"{index / 7},{index % 5},{index % 2}" for index in range(80)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,label", *lines]) + "\n", encoding="utf-8")
    table = str(tmp_path / "table.csv")
    flat = {**muscle(tmp_path, fedmuscle__public_source=table, fedmuscle__public_views="random"), "data.source": table}
    with pytest.raises(SettingsError, match=r"public-views = 'random' is for pictures, the public set .* shape \(2,\); set it to 'plain'"):
        check_fleet(merged([], {**flat, "fleet.models": "mlp"}), 2)
    check_fleet(merged([], {**flat, "fleet.models": "mlp", "fedmuscle.public-views": "plain"}), 2)


def test_the_anchor_is_the_view_that_was_uploaded(tmp_path, monkeypatch):
    """Else the gradient that the server returns would be that of other representations."""
    one = trainer(tmp_path, monkeypatch, fedmuscle__public_views="random", fedmuscle__exchange="gradient")
    (index,) = one._at(1, 0).indices
    with torch.no_grad():
        first, same, next_step = one._represent(index, 1, 0), one._represent(index, 1, 0), one._represent(index, 1, 1)
    assert torch.equal(first, same)
    assert not torch.allclose(first, next_step)
    assert torch.equal(one._upload(1, 0)["rows"][0], first)


@pytest.mark.parametrize("way", ["round", "gradient"])
def test_a_federation_on_views_learns_and_repeats_itself(tmp_path, way):
    settings = muscle(tmp_path, num_rounds=3, train__learning_rate=0.1, fedmuscle__public_views="random", fedmuscle__exchange=way)
    for out in ("a", "b"):
        run(settings, tmp_path / out)
        assert not rows(tmp_path / out, "failure")
    one, two = states(tmp_path / "a"), states(tmp_path / "b")
    assert all(torch.equal(one[key][name], two[key][name]) for key in one for name in one[key])
    assert rows(tmp_path / "a", "round")[-1]["personalized"]["accuracy_mean"] > 0.8
