"""Pictures brought to the size and the channels that all nodes of a fleet need."""

import numpy as np
import pytest
from PIL import Image

from server_app.settings import DataSettings
from tasks import DataError
from tasks.sources import open_source


@pytest.mark.parametrize(
    ("wanted", "shape"), [({}, (1, 8, 8)), ({"image_size": 4}, (1, 4, 4)), ({"image_size": 16, "image_channels": 3}, (3, 16, 16))]
)
def test_size_and_channels_as_asked_each_in_its_own_cache(tmp_path, monkeypatch, wanted, shape):
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "home"))
    for label in ("a", "b"):
        (tmp_path / "src" / label).mkdir(parents=True)
        Image.fromarray(np.full((8, 8), 40 if label == "a" else 200, dtype=np.uint8)).save(tmp_path / "src" / label / "0.png")
    plain = open_source(str(tmp_path / "src"), DataSettings())
    source = open_source(str(tmp_path / "src"), DataSettings(**wanted))
    assert source.inputs.shape == (2, *shape)
    assert sorted({int(source.inputs[0].min()), int(source.inputs[0].max()), int(source.inputs[1].max())}) == [40, 200]
    assert (plain.key == source.key) == (not wanted)


def test_arrays_cannot_be_resized_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "home"))
    with pytest.raises(DataError, match=r"embedded gives arrays of shape \(1, 28, 28\).*data.image-size"):
        open_source("embedded", DataSettings(image_size=14))
