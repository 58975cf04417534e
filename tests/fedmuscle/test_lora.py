"""LoRA in the extractor; skipped where peft is not installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import models
from models import SplitModel
from server_app.settings import SettingsError
from strategies import config_of
from strategies.fedmuscle.lora import adapted_modules, add_lora, folded
from strategies.messages import Payload
from strategies.seeds import generator
from tests.fedmuscle.muscle_fixture import muscle, states, trainer
from tests.fleet_fixture import rows, run

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed: pip install peft")


def net(input_shape=(1, 8, 8), num_outputs=3, feature_dim=None):
    """A pointwise convolution, a 3x3 one, a Linear; BatchNorm between."""
    extractor = nn.Sequential(
        OrderedDict(
            point=nn.Conv2d(input_shape[0], 4, 1), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6), relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(2), flatten=nn.Flatten(), fc=nn.Linear(24, 12), act=nn.ReLU(),
        )
    )  # fmt: skip
    return SplitModel(extractor, nn.Linear(12, num_outputs), input_shape=input_shape, feature_dim=12, num_outputs=num_outputs)


def test_names_mean_whole_paths_or_their_last_parts():
    extractor = models.build("vit_tiny", input_shape=(3, 16, 16), num_outputs=2).extractor
    assert adapted_modules(extractor, ("linear1",)) == [f"blocks.{i}.linear1" for i in range(6)]
    assert adapted_modules(extractor, ("blocks.2.linear2", "near1")) == ["blocks.2.linear2"]
    assert adapted_modules(extractor, ("fc",)) == []


def test_a_wide_convolution_is_refused_with_what_could_be_named():
    with pytest.raises(ValueError, match=r"names conv, a Conv2d of kernel \(3, 3\); .* here: point, fc"):
        adapted_modules(net().extractor, ("conv",))


@pytest.mark.parametrize(("rank", "names"), [(4, ""), (0, "fc")])
def test_rank_and_modules_go_together(rank, names):
    with pytest.raises(SettingsError, match="set both or neither"):
        config_of("fedmuscle", {"lora-rank": rank, "lora-modules": names})


def test_without_peft_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"lora-rank needs the package peft on this node .* pip install peft, or set it to 0"):
        add_lora(net(), 4, ("fc",))


def test_a_model_without_such_modules_is_left_whole():
    model = net()
    before = dict(model.named_parameters())
    assert add_lora(model, 4, ("attention",)) == 0
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(p.requires_grad for p in model.parameters())


@needs_peft
def test_factors_start_as_nothing_train_alone_and_fold_into_the_weights_by_hand():
    torch.manual_seed(0)
    model, batch = net().eval(), torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        plain = model(batch)
    assert add_lora(model, 2, ("point", "fc")) == 2
    torch.testing.assert_close(model(batch), plain)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trained if n.startswith("extractor")} == {
        f"extractor.{path}.lora_{part}.default.weight" for path in ("point", "fc") for part in "AB"
    }
    assert {"head.weight", "head.bias"} <= trained
    fc = model.extractor.fc
    with torch.no_grad():
        fc.lora_B["default"].weight.normal_()
        weight = fc.base_layer.weight + 2.0 * fc.lora_B["default"].weight @ fc.lora_A["default"].weight  # alpha / r = 2
        changed = model(batch)
    whole = folded(model)
    torch.testing.assert_close(whole.extractor.fc.weight, weight)
    torch.testing.assert_close(whole(batch), changed)
    assert type(whole.extractor.fc) is nn.Linear
    assert type(whole.extractor.point) is nn.Conv2d
    assert not [name for name in whole.state_dict() if "lora" in name]
    assert torch.equal(model(batch), changed)  # the model itself goes on with its factors


@needs_peft
@pytest.mark.parametrize("way", ["round", "step"])
def test_in_a_federation_frozen_weights_stay_and_factors_move_and_survive(tmp_path, way):
    settings = muscle(
        tmp_path, num_rounds=3, train__learning_rate=0.1, fedmuscle__exchange=way, fleet__models="tests.fedmuscle.test_lora:net,mlp"
    )
    settings |= {"fedmuscle.lora-rank": 4, "fedmuscle.lora-modules": "fc,point", "export": "own"}
    the_grid = run(settings, tmp_path / "out", nodes=2)
    assert not rows(tmp_path / "out", "failure")
    found = states(tmp_path / "out")
    first, last = (found[f"partition-0/round-00000{r}"] for r in (2, 3))
    moved = {name for name in first if name.startswith("model.extractor") and not torch.equal(first[name], last[name])}
    assert {n for n in moved if "norm" not in n} == {n for n in first if n.startswith("model.") and "lora_" in n}
    assert {n for n in last if n.startswith("adam.exp_avg.extractor")} == {
        f"adam.exp_avg.{n.removeprefix('model.')}" for n in first if n.startswith("model.") and "lora_" in n
    }
    assert not [n for n in found["partition-1/round-000003"] if "lora" in n]
    facts = {dict(c["report"])["node_name"]: dict(c["report"])["lora_modules"] for k, _, c in the_grid.received if k == "query.describe"}
    assert facts == {"partition-0": 2, "partition-1": 0}  # mlp has fc1 and fc2, and no fc


@needs_peft
def test_the_exported_model_needs_torch_alone(tmp_path, monkeypatch):
    from client_app.export import export_models

    one = trainer(
        tmp_path, monkeypatch, fleet__models="tests.fedmuscle.test_lora:net", fedmuscle__lora_rank=4, fedmuscle__lora_modules="fc"
    )
    one.train(Payload(settings={"now": 1}), generator("x"))
    raw = one.context.task.test.inputs[:5]
    with torch.no_grad():
        expected = one.predict(one.context.task.prepare(raw, False, None))
    (path,) = export_models(one, tmp_path / "exports", names=("model",), metrics={})
    assert json.loads(Path(path).with_suffix(".json").read_text())["parameters"] == sum(p.numel() for p in net().parameters())
    torch.save(raw, tmp_path / "raw.pt")
    code = """
import sys, torch
raw = torch.load(sys.argv[2], weights_only=True)
torch.save(torch.export.load(sys.argv[1]).module()(raw), sys.argv[3])
assert "peft" not in sys.modules
"""
    command = [sys.executable, "-I", "-c", code, str(path), str(tmp_path / "raw.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "out.pt", weights_only=True), expected, rtol=1e-5, atol=1e-5)
