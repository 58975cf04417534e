"""The public set: the same items everywhere, in every node's shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from server_app.settings import DataSettings
from tasks import DataError
from tasks.public import fitted, load_public
from tests.fleet_fixture import pictures


def test_grey_is_the_weighted_sum_of_colours_and_colours_repeat_grey():
    colour = torch.tensor([100, 200, 50], dtype=torch.uint8).reshape(1, 3, 1, 1).expand(2, 3, 4, 4)
    grey = fitted(colour, (1, 4, 4))
    torch.testing.assert_close(grey, torch.full((2, 1, 4, 4), 0.299 * 100 + 0.587 * 200 + 0.114 * 50))
    back = fitted(grey, (3, 4, 4))
    assert back.shape == (2, 3, 4, 4)
    assert torch.equal(back[:, 0], back[:, 2])


def test_halving_a_picture_averages_and_keeps_its_mean():
    batch = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8)
    half = fitted(batch, (1, 4, 4))
    assert half.shape == (1, 1, 4, 4)
    assert float(half.mean()) == pytest.approx(31.5, abs=1e-4)
    # antialiased: weights 1/8, 3/8, 3/8, 1/8 over four columns; inside a ramp that is the middle of the two pixels
    assert float(half[0, 0, 1, 1]) == pytest.approx((2.5 * 8) + 2.5, abs=1e-4)


def test_pictures_that_fit_are_not_touched():
    batch = torch.randint(0, 256, (2, 3, 5, 6), dtype=torch.uint8)
    assert fitted(batch, (3, 5, 6)) is batch


def test_two_nodes_of_other_shapes_hold_the_same_items(tmp_path):
    source = str(pictures(tmp_path / "public", count=30))
    one, two = (load_public(source, DataSettings(), items=12, seed=3, input_shape=s) for s in ((1, 8, 8), (3, 16, 12)))
    assert (one.manifest, len(one)) == (two.manifest, 12)
    index = torch.tensor([4, 0, 4])
    assert torch.equal(one.batch(index)[0], one.batch(index)[2])
    assert two.batch(index).shape == (3, 3, 16, 12)
    other_seed = load_public(source, DataSettings(), items=12, seed=4, input_shape=(1, 8, 8))
    everything = load_public(source, DataSettings(), items=0, seed=3, input_shape=(1, 8, 8))
    assert len({one.manifest, other_seed.manifest, everything.manifest}) == 3
    assert len(everything) == 30


def test_one_changed_pixel_is_another_set(tmp_path):
    one = load_public(str(pictures(tmp_path / "a", count=9)), DataSettings(), items=0, seed=1, input_shape=(1, 8, 8))
    same = load_public(str(pictures(tmp_path / "b", count=9)), DataSettings(), items=0, seed=1, input_shape=(1, 8, 8))
    assert one.manifest == same.manifest
    path = next((tmp_path / "b").rglob("*.png"))
    values = np.asarray(Image.open(path)).copy()
    values[0, 0] ^= 1
    (tmp_path / "c").mkdir()
    changed = pictures(tmp_path / "c", count=9)
    Image.fromarray(values).save(changed / path.relative_to(tmp_path / "b"))
    assert load_public(str(changed), DataSettings(), items=0, seed=1, input_shape=(1, 8, 8)).manifest != one.manifest


@pytest.mark.parametrize("shape", [(6,), (2, 8, 8)])
def test_samples_of_another_kind_are_refused_with_both_shapes(tmp_path, shape):
    source = str(pictures(tmp_path / "public", count=9))
    with pytest.raises(DataError, match=r"public set .* has samples of shape \(1, 8, 8\) .*this node's have \(" + str(shape[0])):
        load_public(source, DataSettings(), items=0, seed=1, input_shape=shape)
