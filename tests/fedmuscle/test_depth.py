"""Models cut to their first layers: what a layer is, what an exit is, and what is exported with its measured accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import models
from models import SplitModel
from strategies.fedmuscle.depth import Exits, shallow
from strategies.messages import Payload
from strategies.seeds import generator
from tests.fedmuscle.muscle_fixture import muscle, trainer
from tests.fleet_fixture import rows, run


@pytest.mark.parametrize(
    ("name", "layers"), [("mlp", 2), ("cnn5", 4), ("resnet18_gn", 5), ("vit_tiny", 6), ("tests.user_models:batch_norm_net", 2)]
)
def test_layers_and_the_one_pass_that_gives_both_representations(name, layers):
    torch.manual_seed(0)
    model = models.build(name, input_shape=(1, 16, 16), num_outputs=4).eval()
    exits, batch = Exits(model).eval(), torch.randn(3, 1, 16, 16)
    assert exits.num_layers == layers
    with torch.no_grad():
        for layer in range(1, layers):
            inner, last = exits(model, layer, batch)
            assert inner.shape == last.shape == (3, model.feature_dim)
            torch.testing.assert_close(last, model.features(batch))
            cut = exits.cut(model, layer).eval()
            torch.testing.assert_close(cut.features(batch), inner)
            torch.testing.assert_close(cut(batch), model.head(inner))


def test_two_blocks_of_a_transformer_by_hand():
    torch.manual_seed(0)
    model = models.build("vit_tiny", input_shape=(3, 16, 16), num_outputs=4).eval()
    vit, batch = model.extractor, torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        tokens = vit.patches(batch).flatten(2).transpose(1, 2) + vit.positions
        expected = vit.norm(vit.blocks[1](vit.blocks[0](tokens))).mean(1)
        torch.testing.assert_close(Exits(model)(model, 2, batch)[0], expected)
    assert len(vit.blocks) == 6
    assert shallow(vit, 2).blocks[0] is vit.blocks[0]


def test_a_cut_model_holds_no_later_layer():
    model = models.build("cnn5", input_shape=(1, 16, 16), num_outputs=4)
    counts = [sum(p.numel() for p in Exits(model).cut(model, layer).parameters()) for layer in (1, 2)]
    conv1, conv2, head = 16 * 25 + 16, 32 * 16 * 25 + 32, 500 * 4 + 4
    # exits: 2 x 2 of 16 channels -> 500; the second layer ends flat, with 32 values
    assert counts == [conv1 + 64 * 500 + 500 + head, conv1 + conv2 + 32 * 500 + 500 + head]


@pytest.mark.parametrize(("extractor", "words"), [(nn.Flatten(), "Flatten"), (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "Sequential")])
def test_a_model_without_inner_layers_is_refused(extractor, words):
    width = 3 if words == "Sequential" else 4
    model = SplitModel(extractor, nn.Linear(width, 2), input_shape=(4,), feature_dim=width, num_outputs=2)
    with pytest.raises(ValueError, match=rf"\({words}\) has no inner layers; set fedmuscle.inner-layers to false"):
        Exits(model)


def test_a_step_is_the_2dmse_loss_of_a_drawn_layer_and_size(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch, fedmuscle__inner_layers=True, fedmuscle__prefixes="8")
    batch, targets = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 1, 0])
    one.model.eval()
    one._cuts = generator("cuts")
    found = one.loss(batch, targets)
    inner, last = one.model.exits(one.model, 1, batch)  # mlp has two layers, so one inner one
    weight, bias, entropy = one.model.head.weight, one.model.head.bias, nn.functional.cross_entropy
    parts = [entropy(rep[:, :k] @ weight[:, :k].T + bias, targets) for rep in (last, inner) for k in (128, 8)]
    teacher, student = (torch.softmax(rep / 0.3, 1) for rep in (last, inner))
    alignment = 0.3 * (teacher * (teacher.log() - student.log())).sum(1).mean()
    torch.testing.assert_close(found, (sum(parts) + alignment) / 4, rtol=1e-5, atol=1e-5)  # four losses of weight 1
    found.backward()
    assert all(p.grad is not None for p in one.model.parameters())


def test_exits_are_trained_kept_and_stay_out_of_the_whole_model(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch, fedmuscle__inner_layers=True)
    before = {name: tensor.clone() for name, tensor in one.private_state().items()}
    one.train(Payload(settings={"now": 1}), generator("x"))
    state = one.private_state()
    exits = [name for name in state if name.startswith("model.exits.")]
    assert exits
    assert all(not torch.equal(state[name], before[name]) for name in exits)
    again = trainer(tmp_path, monkeypatch, fedmuscle__inner_layers=True)
    again.load_private_state(state)
    found = again.exportable()
    assert list(found) == ["model", "layers-1"]
    assert not [name for name in found["model"].state_dict() if "exits" in name]
    batch = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(found["model"](batch), one.predict(batch))


def test_an_export_lists_every_size_with_its_measured_accuracy(tmp_path):
    settings = muscle(
        tmp_path, num_rounds=5, train__learning_rate=0.05, fedmuscle__prefixes="8", fedmuscle__inner_layers=True, export="all"
    )
    run(settings, tmp_path / "out", nodes=2)
    assert not rows(tmp_path / "out", "failure")
    folder = Path(json.loads((tmp_path / "out/exports.json").read_text())["partition-0"]).parent
    cards = {p.stem: json.loads(p.read_text()) for p in folder.glob("*.json")}
    assert cards.keys() == {"model", "dims-8", "layers-1", "layers-1-dims-8"} == {p.stem for p in folder.glob("*.pt2")}
    # 64 -> 256, the exit's 256 -> 8, 8 -> 3; mlp's own second layer is as large as the exit
    assert cards["layers-1-dims-8"]["parameters"] == (64 + 1) * 256 + (256 + 1) * 8 + (8 + 1) * 3 < cards["layers-1"]["parameters"]
    whole = next(r["accuracy"] for r in reversed(rows(tmp_path / "out", "node")) if r["node"] == "partition-0")
    assert cards["model"]["metrics"]["accuracy"] == pytest.approx(whole)
    assert all(0.6 < card["metrics"]["accuracy"] <= 1.0 for card in cards.values()), {n: c["metrics"] for n, c in cards.items()}
