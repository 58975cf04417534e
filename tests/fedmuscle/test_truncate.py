"""Representations that work cut short: truncated models, nested training in a federation, and what is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import models
from models import SplitModel
from strategies.fedmuscle.truncate import Cut, truncated
from tests.fedmuscle.muscle_fixture import muscle
from tests.fleet_fixture import rows, run


@pytest.mark.parametrize(("name", "computes_less"), [("mlp", True), ("cnn5", True), ("resnet18_gn", False)])
def test_a_truncated_model_reads_the_first_dimensions_of_the_whole_one(name, computes_less):
    torch.manual_seed(0)
    model = models.build(name, input_shape=(1, 16, 16), num_outputs=4, feature_dim=32 if computes_less else None).eval()
    batch = torch.randn(3, 1, 16, 16)
    with torch.no_grad():
        rep = model.features(batch)
        cut = truncated(model, 8).eval()
        expected = rep[:, :8] @ model.head.weight[:, :8].T + model.head.bias
        torch.testing.assert_close(cut(batch), expected)
        torch.testing.assert_close(truncated(model, model.feature_dim).eval()(batch), model(batch))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (cut, model)]
    assert sizes[0] < sizes[1]
    assert isinstance(cut[0], Cut) is not computes_less


@pytest.mark.parametrize("size", [0, 33])
def test_a_size_that_is_not_there_is_refused(size):
    model = models.build("mlp", input_shape=(4,), num_outputs=2, feature_dim=32)
    with pytest.raises(ValueError, match=f"on 32 dimensions cannot be cut to {size}"):
        truncated(model, size)


def test_a_head_that_is_no_linear_is_refused():
    model = SplitModel(nn.Flatten(), nn.Sequential(nn.Linear(4, 2)), input_shape=(4,), feature_dim=4, num_outputs=2)
    with pytest.raises(ValueError, match="a Sequential head"):
        truncated(model, 2)


def test_nested_training_makes_short_representations_useful_and_exports_them(tmp_path):
    settings = muscle(tmp_path, num_rounds=6, train__learning_rate=0.05, fedmuscle__prefixes="2,8", export="all")
    run(settings, tmp_path / "out", nodes=2)
    assert not rows(tmp_path / "out", "failure")
    losses = [r["method"]["contrastive_loss"] for r in rows(tmp_path / "out", "round") if r["method"]]
    assert losses[-1] < losses[0]
    paths = json.loads((tmp_path / "out/exports.json").read_text())
    folder = Path(paths["partition-0"]).parent
    assert {p.name for p in folder.glob("*.pt2")} == {"model.pt2", "dims-2.pt2", "dims-8.pt2"}
    sizes = {p.stem: json.loads(p.read_text())["parameters"] for p in folder.glob("*.json")}
    assert sizes["dims-2"] < sizes["dims-8"] < sizes["model"]
    batch, labels = _easy_pictures()
    right = {}
    for name in sizes:
        outputs = torch.export.load(folder / f"{name}.pt2").module()(batch)
        right[name] = float((outputs.argmax(1) == labels).double().mean())
    assert right["model"] > 0.9
    assert right["dims-8"] > 0.8


def _easy_pictures():
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(30) % 3
    batch = torch.randint(0, 90, (30, 1, 8, 8), generator=generator, dtype=torch.uint8)
    for row, label in enumerate(labels.tolist()):
        batch[row, :, :, label * 2 : label * 2 + 3] += 120
    return batch, labels
