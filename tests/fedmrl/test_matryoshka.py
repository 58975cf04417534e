"""FedMRL's equations against numbers worked out by hand and a naive version, and its node half."""

import json

import pytest
import torch
from torch.nn import functional

import strategies
import tasks
from client_app.export import export_models
from client_app.profile import NodeProfile
from server_app.settings import SettingsError
from strategies.fedmrl.matryoshka import matryoshka_loss, slices, splice, start_projector
from strategies.fedmrl.trainer import Fused, NodeTrainer
from strategies.messages import Payload
from strategies.seeds import generator
from strategies.trainer import NodeContext
from tests.fleet_fixture import config

D = torch.float64


def test_the_shared_representation_comes_first():
    assert splice(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])).tolist() == [[1, 2, 3, 4, 5]]


def test_both_slices_are_of_the_same_vector():
    z = torch.arange(6.0).reshape(1, 6)
    coarse, fine = slices(z, 2)
    assert coarse.tolist() == [[0, 1]]
    assert fine.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert coarse.data_ptr() == fine.data_ptr()


def test_the_loss_by_hand():
    zero, sure = torch.zeros(1, 2, dtype=D), torch.tensor([[torch.log(torch.tensor(3.0)).item(), 0.0]], dtype=D)
    loss = matryoshka_loss(zero, sure, torch.tensor([0]), functional.cross_entropy, shared_weight=2.0, private_weight=3.0)
    expected = 2 * torch.log(torch.tensor(2.0, dtype=D)) + 3 * torch.log(torch.tensor(4 / 3, dtype=D))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("start", ["random", "shared"])
def test_a_random_start_is_left_as_it_is(start):
    weight, bias = torch.randn(3, 5, dtype=D), torch.randn(3, dtype=D)
    got = start_projector(weight, bias, start)
    assert torch.equal(got[0], weight)
    assert torch.equal(got[1], bias)


def test_aligned_is_two_identities_plus_a_tenth_of_the_random_start():
    weight, bias = torch.full((3, 5), 2.0, dtype=D), torch.full((3,), -1.0, dtype=D)
    got, offset = start_projector(weight, bias, "aligned")
    expected = [[1.2, 0.2, 1.2, 0.2, 0.2], [0.2, 1.2, 0.2, 1.2, 0.2], [0.2, 0.2, 0.2, 0.2, 1.2]]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=D))
    torch.testing.assert_close(offset, torch.full((3,), -0.1, dtype=D))


def test_split_reads_the_first_places_from_the_shared_and_the_rest_from_the_private_part():
    weight, bias = start_projector(torch.randn(4, 6, dtype=D), torch.randn(4, dtype=D), "split")
    r_g, r_f = torch.tensor([[1.0, 2.0]], dtype=D), torch.tensor([[10.0, 20.0, 30.0, 40.0]], dtype=D)
    assert (splice(r_g, r_f) @ weight.t() + bias).tolist() == [[1, 2, 30, 40]]


def test_an_unknown_start_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"'zero'.*aligned"):
        start_projector(torch.zeros(2, 3), torch.zeros(2), "zero")


def trainer(tmp_path, monkeypatch, **changes) -> NodeTrainer:
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "home"))
    neutral = {"own_weight": 0.0, "masked_loss": False, "predict": "fine"}  # the paper's
    settings, own = strategies.settings_of(config(tmp_path, **{f"fedmrl__{key}": value for key, value in neutral.items()} | changes))
    profile = NodeProfile.of({"partition-id": 0, "num-partitions": 3}, settings)
    return NodeTrainer(NodeContext(profile, settings, own, tasks.load(profile, settings), torch.device("cpu"), 5))


def naive_step(fused: Fused, batch, targets, d1, m_g, m_f):
    """One loss as algorithm 1 reads, part by part, on deep copies."""
    r_g, r_f = fused.shared.extractor(batch), fused.private.extractor(batch)
    z = torch.cat([r_g, r_f], 1) @ fused.projector.weight.t() + fused.projector.bias
    y_g = z[:, :d1] @ fused.shared.head.weight.t() + fused.shared.head.bias
    y_f = z @ fused.private.head.weight.t() + fused.private.head.bias
    rows = range(len(targets))
    loss_g = -torch.stack([torch.log_softmax(y_g[i], 0)[targets[i]] for i in rows]).mean()
    loss_f = -torch.stack([torch.log_softmax(y_f[i], 0)[targets[i]] for i in rows]).mean()
    return m_g * loss_g + m_f * loss_f


def test_value_and_every_gradient_equal_the_naive_version(tmp_path, monkeypatch):
    fused = trainer(tmp_path, monkeypatch).fused.double()
    batch, targets = torch.randn(5, 1, 8, 8, dtype=D), torch.tensor([0, 1, 2, 1, 0])
    coarse, fine = fused.both(batch)
    ours = matryoshka_loss(coarse, fine, targets, functional.cross_entropy, shared_weight=0.7, private_weight=1.3)
    ours.backward()
    got = {n: p.grad.clone() for n, p in fused.named_parameters()}
    fused.zero_grad()
    naive = naive_step(fused, batch, targets, 8, 0.7, 1.3)
    naive.backward()
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    assert got.keys() == {n for n, _ in fused.named_parameters()}
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-10, atol=1e-12)
        assert float(parameter.grad.abs().max()) > 0, f"no gradient reaches {name}"


def test_heads_get_no_gradient_from_the_other_ones_loss(tmp_path, monkeypatch):
    fused = trainer(tmp_path, monkeypatch).fused
    coarse, fine = fused.both(torch.randn(4, 1, 8, 8))
    matryoshka_loss(coarse, fine, torch.tensor([0, 1, 2, 0]), functional.cross_entropy, shared_weight=0.0).backward()
    assert float(fused.shared.head.weight.grad.abs().max()) == 0
    assert float(fused.shared.extractor.fc1.weight.grad.abs().max()) > 0


def test_one_step_of_sgd_with_three_rates_moves_each_part_by_its_own(tmp_path, monkeypatch):
    options = {"fedmrl__shared_rate": 0.1, "fedmrl__private_rate": 0.2, "fedmrl__projector_rate": 0.4}
    one = trainer(tmp_path, monkeypatch, **options, train__momentum=0.0, train__batch_size=100)
    before = {n: p.detach().clone() for n, p in one.fused.named_parameters()}
    task = one.context.task
    order = torch.randperm(len(task.train), generator=generator("x"))
    coarse, fine = one.fused.both(task.prepare(task.train.inputs[order], True, None))
    matryoshka_loss(coarse, fine, task.train.targets[order], task.loss).backward()
    gradients = {n: p.grad.clone() for n, p in one.fused.named_parameters()}
    update = one.train(Payload(), generator("x"))
    assert update.num_examples == len(task.train)
    for name, parameter in one.fused.named_parameters():
        rate = {"shared": 0.1, "private": 0.2, "projector": 0.4}[name.split(".")[0]]
        torch.testing.assert_close(parameter.detach(), before[name] - rate * gradients[name], rtol=1e-4, atol=1e-6)


def test_clipping_is_of_each_net_on_its_own(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch, train__clip_norm=0.01, train__momentum=0.0, train__batch_size=100, train__learning_rate=1.0)
    before = {n: p.detach().clone() for n, p in one.fused.named_parameters()}
    one.train(Payload(), generator("x"))
    for part in ("shared", "private", "projector"):
        moved = sum(float((p.detach() - before[n]).square().sum()) for n, p in one.fused.named_parameters() if n.startswith(part)) ** 0.5
        assert moved == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(("start", "same"), [("random", False), ("shared", True), ("aligned", True), ("split", True)])
def test_projectors_of_two_nodes_start_in_one_basis_unless_random(tmp_path, monkeypatch, start, same):
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "home"))
    settings, own = strategies.settings_of(config(tmp_path, fedmrl__projector_start=start))
    weights = []
    for partition in (0, 1):
        profile = NodeProfile.of({"partition-id": partition, "num-partitions": 3}, settings)
        context = NodeContext(profile, settings, own, tasks.load(profile, settings), torch.device("cpu"), partition)
        weights.append(NodeTrainer(context).fused.projector.weight.detach())
    assert torch.equal(*weights) is same


def test_a_shared_part_wider_than_the_nodes_own_is_refused_with_the_number_to_set(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"fedmrl.shared-dim = 4000 exceeds .*\(128\); set it to 128 or less"):
        trainer(tmp_path, monkeypatch, fedmrl__shared_dim=4000)


def test_settings_out_of_range_are_refused():
    with pytest.raises(SettingsError, match=r"fedmrl.shared-dim = 0"):
        strategies.config_of("fedmrl", {"shared-dim": 0})


def test_the_exported_models_predict_with_torch_alone(tmp_path, monkeypatch):
    import subprocess
    import sys

    one = trainer(tmp_path, monkeypatch)
    one.train(Payload(), generator("x"))
    paths = export_models(one, tmp_path / "exports", names=tuple(one.exportable()), metrics={"accuracy": 0.5})
    assert [p.stem for p in paths] == ["fused", "mix-small", "single-large", "single-small"]
    raw = one.context.task.test.inputs[:5]
    torch.save(raw, tmp_path / "raw.pt")
    code = """
import sys, torch
raw = torch.load(sys.argv[2], weights_only=True)
torch.save(torch.export.load(sys.argv[1]).module()(raw), sys.argv[3])
"""
    command = [sys.executable, "-I", "-c", code, str(paths[0]), str(tmp_path / "raw.pt"), str(tmp_path / "out.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)
    with torch.no_grad():
        expected = one.predict(one.context.task.prepare(raw, False, None))
    torch.testing.assert_close(torch.load(tmp_path / "out.pt", weights_only=True), expected, rtol=1e-5, atol=1e-6)
    card = json.loads((tmp_path / "exports/fused.json").read_text())
    assert card["metrics"] == {"accuracy": 0.5}
    assert card["input"] == {"shape": ["batch", 1, 8, 8], "dtype": "uint8"}
    assert json.loads((tmp_path / "exports/single-large.json").read_text())["metrics"] == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_training_on_cuda_gives_the_loss_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "home"))
    settings, own = strategies.settings_of(config(tmp_path))
    profile = NodeProfile.of({"partition-id": 0, "num-partitions": 3}, settings)
    losses = []
    for device in ("cpu", "cuda"):
        one = NodeTrainer(NodeContext(profile, settings, own, tasks.load(profile, settings), torch.device(device), 5))
        losses.append(one.train(Payload(), generator("x")).metrics["train_loss"])
        assert {t.device.type for t in one.private_state().values()} == {device}
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_in_warm_up_only_the_small_model_learns_and_predicts(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch)
    before = {n: t.clone() for n, t in one.private_state().items()}
    theta = {n: t.clone() for n, t in one.fused.shared.state_dict().items()}
    one.receive(Payload(theta, {"warmup": True}))
    update = one.train(Payload(theta, {"warmup": True}), generator("x"))
    assert all(torch.equal(before[n], t) for n, t in one.private_state().items())
    assert all(not torch.equal(theta[n], t) for n, t in update.tensors.items())
    batch = one.context.task.prepare(one.context.task.test.inputs, False, None)
    assert torch.equal(one.predict(batch), one.fused.shared(batch))
    one.receive(Payload(theta, {"warmup": False}))
    one.train(Payload(theta, {"warmup": False}), generator("x"))
    assert int(one.private_state()["rounds"]) == 1
    assert torch.equal(one.predict(batch), one.fused(batch))


def test_the_small_models_own_loss_reaches_the_small_model_only(tmp_path, monkeypatch):
    gradients = []
    for weight in (0.0, 2.0):
        one = trainer(tmp_path, monkeypatch, fedmrl__own_weight=weight)
        task = one.context.task
        batch, targets = task.prepare(task.train.inputs[:6], False, None), task.train.targets[:6]
        one._loss(batch, targets).backward()
        gradients.append({n: p.grad.clone() for n, p in one.fused.named_parameters()})
    one.fused.zero_grad()
    functional.cross_entropy(one.fused.shared(batch), targets).backward()
    for name, parameter in one.fused.named_parameters():
        extra = 2.0 * parameter.grad if name.startswith("shared.") else torch.zeros_like(parameter)
        torch.testing.assert_close(gradients[1][name] - gradients[0][name], extra, rtol=1e-3, atol=1e-5)


def test_both_heads_predict_the_mean_of_their_probabilities(tmp_path, monkeypatch):
    one = trainer(tmp_path, monkeypatch, fedmrl__predict="both")
    one.train(Payload(), generator("x"))
    batch = one.context.task.prepare(one.context.task.test.inputs, False, None)
    coarse, fine = one.fused.both(batch)
    torch.testing.assert_close(one.predict(batch).exp(), (coarse.softmax(1) + fine.softmax(1)) / 2)
