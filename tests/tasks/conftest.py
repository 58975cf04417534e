"""Tiny sources made in a temporary folder; every test has its own cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from client_app.profile import NodeProfile
from server_app.settings import Settings


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("HETEROFLEET_HOME", str(home))
    return home


@pytest.fixture
def configured():
    """Return settings from data keys in snake_case."""

    def make(seed: int = 1, **data: Any) -> Settings:
        return Settings.model_validate({"seed": seed, "data": {"min_samples": 1, **data}})

    return make


@pytest.fixture
def virtual():
    """Return the profile of a virtual node."""
    return lambda partition, num, settings: NodeProfile.of({"partition-id": partition, "num-partitions": num}, settings)


@pytest.fixture
def deployed():
    """Return the profile of a real node with its own data."""
    return lambda data, settings, name="pi-3": NodeProfile.of({"name": name, "data": str(data)}, settings)


def picture(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def picture_folder(tmp_path):
    """Make class folders of random 6x5 PNGs: counts by class name -> (folder, {file: pixels})."""

    def make(counts: dict[str, int], *, name: str = "pictures", channels: int = 3, size=(6, 5), seed: int = 0) -> Path:
        rng = np.random.default_rng(seed)
        for label, count in counts.items():
            (tmp_path / name / label).mkdir(parents=True, exist_ok=True)
            for index in range(count):
                shape = size if channels == 1 else (*size, channels)
                picture(tmp_path / name / label / f"{index:03d}.png", rng.integers(0, 256, shape, dtype=np.uint8))
        return tmp_path / name

    return make


@pytest.fixture
def labelled(tmp_path, monkeypatch):
    """Make a `module:function` source of 2x2 pictures whose first pixel is the row number; returns its name."""

    def make(labels, *, name: str = "made", **extra: Any) -> str:
        rows = np.zeros((len(labels), 1, 2, 2), dtype=np.uint8)
        rows[:, 0, 0, 0] = np.arange(len(labels)) % 256
        rows[:, 0, 0, 1] = np.arange(len(labels)) // 256
        np.savez(tmp_path / f"{name}.npz", inputs=rows, labels=np.asarray(labels), **extra)
        (tmp_path / f"{name}_module.py").write_text(
            f"import numpy as np\n\ndef rows():\n    return dict(np.load({str(tmp_path / f'{name}.npz')!r}))\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, f"{name}_module", raising=False)
        return f"{name}_module:rows"

    return make
