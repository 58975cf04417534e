"""FedHM's node half, without messages: what is trained, how it is normalised, what is refused and exported."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from client_app.export import export_models
from strategies.fedhm.budget import largest_affordable
from strategies.fedhm.hybrid import factored_layers, state_of
from strategies.fedhm.norms import calibrated, with_norm
from strategies.fedhm.plan import extract
from strategies.fedhm.spectral import Decomposer, Layer
from strategies.fedhm.tiers import Tier
from strategies.messages import Payload
from tests.fedhm.whole import GROUPED, config, node
from tests.fleet_fixture import grid, rows, run


def payload(trainer, ratio):
    """Return what the server would send in round 1 at `ratio`."""
    tier, state = Tier.of(trainer.full, ratio, trainer.config), state_of(trainer.full)
    plan = tier.plan(trainer.full, state)
    layers = {f"{n}.weight": Layer(state[f"{n}.weight"], (rank,), plan[f"{n}.weight"].groups) for n, rank in tier.ranks.items()}
    return Payload(extract(state, plan, Decomposer("exact")(layers)), {"rank_ratio": ratio, "ranks": tier.table})


def trained(trainer, sent, seed=1):
    trainer.receive(sent)
    return trainer.train(sent, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model", ["mlp", GROUPED])
def test_a_second_training_starts_with_a_fresh_optimiser_and_nothing_private(tmp_path, model):
    settings = config(tmp_path, fedhm__model=model, train__momentum=0.9)
    used, fresh = node(settings, 1), node(settings, 1)
    sent = payload(used, 0.25)
    first, again = trained(used, sent), trained(used, sent)
    alone = trained(fresh, sent)
    assert used.private_state() == {}
    for other in (again, alone):
        assert all(torch.equal(first.tensors[name], other.tensors[name]) for name in first.tensors)


@pytest.mark.parametrize("frobenius", [0.0, 0.05])
def test_exactly_one_decay_acts_on_the_factors(tmp_path, frobenius):
    """One step on a loss without gradient, by hand: U <- U - rate lambda U (V^T V), or (1 - rate decay) U."""
    rate, decay = 0.1, 0.3
    settings = config(
        tmp_path, fedhm__frobenius_decay=frobenius, train__weight_decay=decay, train__learning_rate=rate, train__batch_size=999
    )
    trainer = node(settings, 1)
    trainer.context = dataclasses.replace(
        trainer.context, task=dataclasses.replace(trainer.context.task, loss=lambda outputs, targets: outputs.sum() * 0.0)
    )
    sent = payload(trainer, 0.25)
    update = trained(trainer, sent).tensors
    ut, vt = (sent.tensors[f"extractor.fc2.weight.{f}"].double() for f in ("ut", "vt"))
    if frobenius:
        wanted = {"ut": ut - rate * frobenius * (vt @ vt.T) @ ut, "vt": vt - rate * frobenius * (ut @ ut.T) @ vt}
    else:
        wanted = {"ut": (1 - rate * decay) * ut, "vt": (1 - rate * decay) * vt}
    for factor, value in wanted.items():
        torch.testing.assert_close(update[f"extractor.fc2.weight.{factor}"].double(), value, rtol=1e-5, atol=1e-6)
    for name in ("extractor.fc1.weight", "extractor.fc2.bias", "head.weight"):
        torch.testing.assert_close(update[name], (1 - rate * decay) * sent.tensors[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("option", ["recalibrate", "batch", "group"])
def test_what_travels_and_what_evaluation_depends_on(tmp_path, option):
    trainer = node(config(tmp_path, fedhm__model=GROUPED, fedhm__batch_norm=option), 1)
    update = trained(trainer, payload(trainer, 0.25))
    assert not any("num_batches_tracked" in name for name in update.tensors)
    assert any("running_mean" in name for name in update.tensors) == (option == "recalibrate")
    batch = trainer.context.task.prepare(trainer.context.task.train.inputs[:12], False, None)
    with torch.inference_mode():
        whole, again = trainer.predict(batch), trainer.predict(batch)
        parts = torch.cat([trainer.predict(part) for part in batch.split(4)])
    assert torch.equal(whole, again)
    assert torch.allclose(whole, parts, atol=1e-5) == (option != "batch")
    for exported in trainer.exportable().values():
        alone = torch.cat([exported(part) for part in batch.split(1)])
        torch.testing.assert_close(alone, exported(batch), rtol=1e-4, atol=1e-5)


def test_recalibration_leaves_the_update_alone_and_measures_the_cut_model_on_its_own_samples(tmp_path):
    trainer = node(config(tmp_path, fedhm__model=GROUPED), 1)
    update = trained(trainer, payload(trainer, 0.25)).tensors
    before = {name: tensor.clone() for name, tensor in update.items()}
    batch = trainer.context.task.prepare(trainer.context.task.train.inputs, False, None)
    trainer.predict(batch[:2])
    assert all(torch.equal(before[name], update[name]) for name in before)
    measured = trainer.exportable()["model"].extractor
    first = trainer.model.extractor[0](batch)
    torch.testing.assert_close(measured[1].running_mean, first.mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(measured[1].running_var, first.transpose(0, 1).flatten(1).var(dim=1), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(measured[12].running_mean, update["extractor.12.running_mean"])


def test_one_sample_has_no_statistics_so_the_ones_that_travelled_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.randn(6, 3))
    kept = calibrated(model, torch.randn(1, 3), lambda raw: raw)
    assert torch.equal(kept[1].running_mean, model[1].running_mean)
    assert isinstance(with_norm(model, "group")[1], nn.GroupNorm)


@pytest.mark.parametrize(("option", "words"), [("batch", "fedhm.batch-norm"), ("recalibrate", ""), ("group", "")])
def test_a_node_with_one_sample_works_or_is_refused_by_name(tmp_path, option, words):
    settings = config(
        tmp_path, fedhm__model=GROUPED, fedhm__batch_norm=option, data__samples_per_node=1, data__test_fraction=0.0, num_rounds=1
    )
    the_grid = grid(settings, 2)
    if not words:
        run(settings, tmp_path / "out", the_grid)
        assert not rows(tmp_path / "out", "failure")
        return
    with pytest.raises(RuntimeError, match="0 of 2 sampled"):
        run(settings, tmp_path / "out", the_grid)
    assert {(f["node"], words in f["reason"]) for f in rows(tmp_path / "out", "failure")} == {("partition-0", True), ("partition-1", True)}


def test_with_the_masked_loss_rows_of_absent_classes_stay(tmp_path):
    settings = {"data__partitioner": "pathological", "data__classes_per_node": 1}
    moved = {}
    for masked in (False, True):
        trainer = node(config(tmp_path, fedhm__masked_loss=masked, **settings), 1)
        (present,) = trainer.context.task.train.targets.unique().tolist()
        sent = payload(trainer, 0.25)
        change = (trained(trainer, sent).tensors["head.weight"] - sent.tensors["head.weight"]).abs().sum(dim=1)
        moved[masked] = [bool(change[label] > 0) for label in range(3) if label != present], bool(change[present] > 0)
    assert moved == {False: ([True, True], True), True: ([False, False], True)}


def test_another_table_of_ranks_is_refused_by_node_and_by_server(tmp_path):
    trainer = node(config(tmp_path), 1)
    sent = payload(trainer, 0.25)
    with pytest.raises(ValueError, match=r"node partition-1: the ranks of mlp at ratio 0\.25 are not the server's .* ffff there"):
        trainer.receive(Payload(sent.tensors, {**sent.settings, "ranks": "ffff"}))
    settings = config(tmp_path)
    the_grid = grid(settings)

    def other(kind, who, content):
        if kind == "query.describe" and who == 1002:
            content["report"]["ranks"] = "0123456789abcdef"
        return content

    the_grid.tamper = other
    run(settings, tmp_path / "out", the_grid)
    (refused,) = rows(tmp_path / "out", "failure")
    assert refused["node"] == "partition-2"
    assert "0123456789abcdef" in refused["reason"]
    assert [r["sampled"] for r in rows(tmp_path / "out", "round")] == [2, 2]


@pytest.mark.parametrize("ratio", [1.0, 0.25])
def test_the_full_model_and_a_hybrid_are_exported_and_run_with_torch_alone(tmp_path, ratio):
    trainer = node(config(tmp_path, fedhm__model=GROUPED), 1)
    trained(trainer, payload(trainer, ratio))
    raw = trainer.context.task.test.inputs
    with torch.inference_mode():
        expected = trainer.predict(trainer.context.task.prepare(raw, False, None))
    paths = export_models(trainer, tmp_path / "exports", names=("model", "dense"), metrics={})
    for path in paths:
        program = torch.export.load(path).module()
        torch.testing.assert_close(program(raw), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(program(raw[:1]), expected[:1], rtol=1e-4, atol=1e-5)
    sizes = [json.loads(path.with_suffix(".json").read_text())["parameters"] for path in paths]
    assert (sizes[0] < sizes[1]) == (ratio < 1)
    assert not factored_layers(trainer.exportable()["dense"])
    named = f"{GROUPED} at {ratio:g}"
    cards = [json.loads(path.with_suffix(".json").read_text())["architecture"] for path in paths]
    assert cards == [named, f"{named}, factors multiplied out" if ratio < 1 else named]


def test_a_node_whose_ratio_cuts_nothing_says_so(tmp_path):
    trainer = node(config(tmp_path, fedhm__rho=99, fleet__rank_ratios="0.5"), 1)
    facts = trainer.describe()
    assert facts["model"] == f"{trainer.config.model} at 0.5 (nothing cut)"
    assert facts["warning"].endswith("is cut (fedhm.rho = 99): its nodes hold all of it")
    assert trainer.architecture("dense") == facts["model"]
    assert "warning" not in node(config(tmp_path, fleet__rank_ratios="0.5"), 1).describe()


def test_auto_is_the_largest_ratio_within_both_limits(tmp_path):
    limits = {
        "fedhm__rank_ratio": "auto",
        "fedhm__max_step_seconds": 0.5,
        "fedhm__max_memory_mb": 10.0,
        "fleet__rank_ratios": "0.125,1.0,0.5,0.25",
    }
    trainer = node(config(tmp_path, **limits), 1)
    costs = {0: (0.1, 99.0), 64: (0.7, 5.0), 32: (0.4, 9.0), 16: (0.1, 1.0)}  # by rank of the layer that is cut

    def measure(model, context):
        layer = factored_layers(model).get("extractor.fc2")
        return costs[layer.rank if layer else 0]

    assert largest_affordable(trainer.full, trainer.context, measure) == 0.25
    costs[32] = costs[16] = (9.0, 1.0)
    with pytest.raises(ValueError, match=r"partition-1: no ratio .* 0\.125 needs 9 s a step and 1 MB.*max-step-seconds = 0\.5"):
        largest_affordable(trainer.full, trainer.context, measure)


def test_auto_in_a_run_measures_each_node(tmp_path):
    limits = {"fedhm__rank_ratio": "auto", "fedhm__max_memory_mb": 0.6, "fleet__rank_ratios": "1.0,0.25"}
    run(config(tmp_path, num_rounds=1, **limits), tmp_path / "out")
    assert {r["rank_ratio"] for r in rows(tmp_path / "out", "node")} == {0.25}
