"""What FedMRL does beyond the paper, each by a setting: masked losses, three heads, normalisation; and the way back."""

import math

import pytest
import torch
from torch.nn import functional

import models
import strategies
from strategies.fedmrl.config import PAPER, Config
from strategies.fedmrl.matryoshka import log_mean
from strategies.fedmrl.normalize import normalized
from strategies.messages import Payload
from strategies.seeds import generator
from tests.fedmrl.test_matryoshka import trainer
from tests.fleet_fixture import config

TWO_CLASSES = {"data__partitioner": "pathological", "data__classes_per_node": 2}


def test_the_papers_preset_is_the_papers_method():
    found = strategies.config_of("fedmrl", {"preset": "paper"})
    assert {key: getattr(found, key) for key in PAPER} == PAPER
    assert found.model_dump(exclude={*PAPER, "preset"}) == Config().model_dump(exclude={*PAPER, "preset"})


def test_a_setting_typed_beside_the_papers_preset_stays():
    found = strategies.config_of("fedmrl", {"preset": "paper", "projector-start": "shared", "own-weight": 0.5})
    assert (found.projector_start, found.own_weight, found.masked_loss) == ("shared", 0.5, False)


def test_the_papers_preset_counts_where_every_default_is_handed_over(tmp_path):
    _, own = strategies.settings_of(config(tmp_path, fedmrl__preset="paper"))
    assert {key: getattr(own, key) for key in PAPER} == PAPER


def test_the_log_mean_of_heads_by_hand():
    one, other = torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([[0.0, 0.0]])
    torch.testing.assert_close(log_mean(one, other).exp(), torch.tensor([[(0.75 + 0.5) / 2, (0.25 + 0.5) / 2]]))


def known(one) -> list[int]:
    return one.context.task.train.targets.unique().tolist()


def test_the_shared_heads_loss_is_that_over_the_nodes_classes_alone(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch, **TWO_CLASSES, fedmrl__masked_loss=True, fedmrl__own_weight=0.5)
    here, task = known(one), one.context.task
    assert len(here) < task.num_outputs
    batch, targets = task.prepare(task.train.inputs[:7], False, None), task.train.targets[:7]
    rep = one.fused.shared.features(batch)
    z = one.fused.fuse(batch)
    among = torch.tensor([here.index(t) for t in targets.tolist()])

    def restricted(outputs):
        return functional.cross_entropy(outputs[:, here], among)

    expected = restricted(one.fused.shared.classify(z[:, :8])) + functional.cross_entropy(one.fused.private.classify(z), targets)
    expected = expected + 0.5 * restricted(one.fused.shared.classify(rep))
    torch.testing.assert_close(one._loss(batch, targets), expected)


def test_rows_of_absent_classes_are_left_as_they_came(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch, **TWO_CLASSES, fedmrl__masked_loss=True, fedmrl__own_weight=1.0)
    absent = [c for c in range(one.context.task.num_outputs) if c not in known(one)]
    before = {n: t.clone() for n, t in one.fused.shared.head.state_dict().items()}
    update = one.train(Payload(), generator("x"))
    for name in ("weight", "bias"):
        assert torch.equal(update.tensors[f"head.{name}"][absent], before[name][absent])
        assert not torch.equal(update.tensors[f"head.{name}"][known(one)], before[name][known(one)])


def test_the_shared_head_never_answers_with_a_class_the_node_lacks(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch, **TWO_CLASSES, fedmrl__masked_loss=True, fedmrl__predict="all", fedmrl__own_weight=1.0)
    one.train(Payload(), generator("x"))
    batch = torch.randn(40, 1, 8, 8)
    with torch.no_grad():
        coarse, _ = one.fused.both(batch)
        fine_only = functional.softmax(one.fused(batch), 1)
        mixed = one.predict(batch).exp()
    assert set(coarse.argmax(1).tolist()) <= set(known(one))
    absent = [c for c in range(one.context.task.num_outputs) if c not in known(one)]
    torch.testing.assert_close(mixed[:, absent], fine_only[:, absent] / 3)
    torch.testing.assert_close(mixed.sum(1), torch.ones(40))


def test_a_mask_changes_nothing_where_every_class_is_here(tmp_path, monkeypatch):
    trained = []
    for masked in (True, False):
        one = trainer(tmp_path, monkeypatch, data__alpha=1000.0, fedmrl__masked_loss=masked)
        assert len(known(one)) == one.context.task.num_outputs
        trained.append(one.train(Payload(), generator("x")).tensors)
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_three_heads_predict_the_mean_of_their_probabilities(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch, fedmrl__predict="all")
    one.train(Payload(), generator("x"))
    batch = one.context.task.prepare(one.context.task.test.inputs, False, None)
    with torch.no_grad():
        heads = [*one.fused.both(batch), one.fused.shared(batch)]
        torch.testing.assert_close(one.predict(batch).exp(), sum(h.softmax(1) for h in heads) / 3)


def test_normalised_representations_have_one_length_and_the_tensors_of_the_model():
    plain = models.build("mlp", input_shape=(1, 4, 4), num_outputs=3, feature_dim=5)
    scaled, batch = normalized(plain), 100.0 * torch.randn(6, 1, 4, 4)
    rep, raw = scaled.features(batch), plain.features(batch)
    expected = raw / raw.square().mean(1, keepdim=True).add(torch.finfo(torch.float32).eps).sqrt()
    torch.testing.assert_close(rep, expected)
    assert {p.data_ptr() for p in scaled.parameters()} == {p.data_ptr() for p in plain.parameters()}


@pytest.mark.parametrize("normalize", [False, True])
def test_what_the_server_averages_is_what_a_node_trains(tmp_path, monkeypatch, normalize):
    from strategies.fedmrl.strategy import Strategy

    one = trainer(tmp_path, monkeypatch, fedmrl__normalize=normalize)
    server = Strategy.build(_Half(one.config), one.context.task.input_shape, one.context.task.num_outputs)
    assert {n: t.shape for n, t in server.state_dict().items()} == {n: t.shape for n, t in one.fused.shared.state_dict().items()}
    server.load_state_dict(one.fused.shared.state_dict())
    batch = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(server.eval()(batch), one.fused.shared.eval()(batch))


class _Half:
    """Just what `Strategy.build` reads."""

    def __init__(self, own: Config) -> None:
        self.config = own


def test_the_record_of_a_run_shows_what_the_preset_stands_for_and_keeps_what_was_typed():
    from server_app.overrides import merged

    made = merged(["fedmrl.preset=paper", "fedmrl.own-weight=1.0"], {"strategy": "fedmrl"})
    shown = {key: made.flat[f"fedmrl.{key}"] for key in ("preset", "projector-start", "own-weight", "masked-loss", "predict")}
    assert shown == {"preset": "ours", "projector-start": "random", "own-weight": 1.0, "masked-loss": False, "predict": "fine"}
    assert made.method.own_weight == 1.0
    assert merged([], {}).flat["fedmrl.predict"] == Config().predict
