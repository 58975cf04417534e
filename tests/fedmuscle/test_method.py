"""Both halves of FedMuscle on the in-process Grid: what moves, what travels, and that it is the loss it says it is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image

from strategies.fedmuscle.public import choose_peers
from strategies.messages import decode, decode_parts
from tests.fedmuscle.muscle_fixture import BATCH, DIM, STEPS, muscle, states
from tests.fleet_fixture import config, pictures, rows, run

BN = "tests.user_models:batch_norm_net"
WAYS = ("round", "step", "gradient")


def accuracies(out, name):
    return [{k: r.get(k) for k in ("round", "node", "accuracy", "loss", "train_loss")} for r in rows(out, "node", name)]


def method_numbers(out):
    return [r["method"] for r in rows(out, "round", "fedmuscle")]


@pytest.mark.parametrize("way", WAYS)
def test_nodes_learn_and_align_and_nothing_private_travels(tmp_path, way):
    settings = muscle(tmp_path, num_rounds=5, train__learning_rate=0.1, fedmuscle__exchange=way)
    the_grid = run(settings, tmp_path / "out")
    assert not rows(tmp_path / "out", "failure")
    assert rows(tmp_path / "out", "round")[-1]["personalized"]["accuracy_mean"] > 0.9
    numbers = [m for m in method_numbers(tmp_path / "out") if m]
    assert len(numbers) == (4 if way == "round" else 5)
    assert numbers[-1]["contrastive_loss"] < 0.75 * numbers[0]["contrastive_loss"]
    assert {m["peers"] for m in numbers} == {2.0}
    sent = {"gradient"} if way == "gradient" else set()
    for kind, _, content in the_grid.sent:
        assert set(decode(content) if "arrays" in content else ()) <= sent
        assert all(part.keys() == {"rows"} for part in decode_parts(content).values())
        assert kind.startswith("train") or len(decode_parts(content)) == 0
    for kind, _, content in the_grid.received:
        if "arrays" in content:
            assert set(decode(content)) <= {"rows", "tag", "digest"}, kind
    exchanges = [kind for kind, _, _ in the_grid.sent if kind == "train.exchange"]
    assert len(exchanges) == (0 if way == "round" else 5 * 3 * STEPS)
    if way != "gradient":
        assert all(len(decode_parts(c)) == 2 for kind, _, c in the_grid.sent if kind == "train.exchange")


def test_without_an_objective_it_is_local_training_to_the_last_bit(tmp_path):
    run(muscle(tmp_path, num_rounds=3, fedmuscle__objective="none"), tmp_path / "none")
    run(config(tmp_path, strategy="local", num_rounds=3), tmp_path / "local")
    assert accuracies(tmp_path / "none", "fedmuscle") == accuracies(tmp_path / "local", "local")
    run(muscle(tmp_path, num_rounds=3), tmp_path / "muscle")
    assert accuracies(tmp_path / "muscle", "fedmuscle") != accuracies(tmp_path / "local", "local")


def test_the_gradient_way_takes_the_same_steps_as_the_step_way(tmp_path):
    for way in ("step", "gradient"):
        run(muscle(tmp_path, num_rounds=2, fedmuscle__exchange=way), tmp_path / way)
    one, two = states(tmp_path / "step"), states(tmp_path / "gradient")
    assert one.keys() == two.keys()
    for key, state in one.items():
        assert float(state["adam.step"]) == STEPS * int(key[-1])
        for name, tensor in state.items():
            torch.testing.assert_close(two[key][name], tensor, rtol=1e-3, atol=2e-5, msg=f"{key} {name}")


def by_hand(anchor, peers, tau, gamma):
    """Return the mean Muscle loss in float64, every tuple written out."""
    losses = []
    for i in range(len(anchor)):
        weights = {}
        for index in itertools.product(range(len(anchor)), repeat=len(peers)):
            chosen = [peer[j] for peer, j in zip(peers, index, strict=True)]
            pairs = sum(float(a @ b) for a, b in itertools.combinations(chosen, 2))
            weights[index] = sum(float(anchor[i] @ z) for z in chosen) / tau - gamma * pairs
        total = math.log(sum(math.exp(w) for w in weights.values()))
        losses.append(total - weights[(i,) * len(peers)])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_that_of_the_uploaded_representations_and_the_drawn_peers(tmp_path, way):
    settings = muscle(tmp_path, num_rounds=2, fedmuscle__exchange=way, fedmuscle__steps=1, fedmuscle__peers=2)
    settings |= {"fedmuscle.contrastive-rate": 1e-12, "train.learning-rate": 1e-12}
    the_grid = run(settings, tmp_path / "out", nodes=4)
    first = {}
    for kind, node, content in the_grid.received:
        if kind == "train" and int(decode(content)["tag"][0]) == 1:
            first[f"partition-{node - 1000}"] = decode(content)["rows"][0].double()
    assert len(first) == 4
    expected = []
    for node, anchor in first.items():
        chosen = choose_peers(node, first, count=2, seed=1, server_round=1, step=0)
        # linear temperatures at M = 2: tau = 0.05 * 3, and gamma = 1 / 0.1 - 1 / 0.15
        expected.append(by_hand(anchor, [first[p] for p in chosen], 0.15, 1 / 0.1 - 1 / 0.15))
    found = next(m["contrastive_loss"] for m in method_numbers(tmp_path / "out") if m)
    assert found == pytest.approx(sum(expected) / 4, abs=1e-4)


def test_each_peers_matrix_is_one_record_for_all_nodes(tmp_path):
    settings = muscle(tmp_path, num_rounds=2, fedmuscle__peers=4)
    the_grid = run(settings, tmp_path / "out", nodes=5)
    messages = [c for kind, _, c in the_grid.sent if kind == "train" and decode_parts(c)]
    records = [c[key] for c in messages for key in c if key.startswith("arrays.")]
    assert (len(messages), len(records), len({id(r) for r in records})) == (5, 20, 5)
    assert all(decode_parts(c)["peer-0"]["rows"].shape == (STEPS, BATCH, DIM) for c in messages)


@pytest.mark.parametrize("way", ["step", "round"])
def test_contrastive_steps_move_the_extractor_and_neither_head_nor_running_statistics(tmp_path, way):
    settings = muscle(tmp_path, fleet__models=BN, fedmuscle__exchange=way, fedmuscle__contrastive_rate=0.01, num_rounds=2)
    if way == "step":
        run(settings, tmp_path / "out")
        state = states(tmp_path / "out")["partition-0/round-000002"]
        before, after = ({n.removeprefix(p): t for n, t in state.items() if n.startswith(p)} for p in ("evaluated.", "model."))
    else:  # without local training what changes from round 1 to round 2 is phase (b)
        run({**settings, "train.learning-rate": 1e-30}, tmp_path / "out")
        found = states(tmp_path / "out")
        before, after = (
            {n.removeprefix("model."): t for n, t in found[f"partition-0/round-00000{r}"].items() if n.startswith("model.")} for r in (1, 2)
        )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    if way == "round":  # local training feeds the statistics even at rate 0
        moved -= {n for n in moved if "running" in n or "num_batches" in n}
    assert moved == {n for n in before if n.startswith("extractor.") and n.endswith(("weight", "bias"))}


def test_what_is_evaluated_is_the_model_after_local_training(tmp_path):
    """A contrastive phase that wrecks the model at once must not show in the round's own evaluation."""
    settings = muscle(tmp_path, num_rounds=1, train__learning_rate=0.1, train__local_epochs=6, fedmuscle__exchange="step")
    run({**settings, "fedmuscle.contrastive-rate": 3.0}, tmp_path / "out")
    run(config(tmp_path, strategy="local", num_rounds=1, train__learning_rate=0.1, train__local_epochs=6), tmp_path / "local")
    assert accuracies(tmp_path / "out", "fedmuscle") == accuracies(tmp_path / "local", "local")
    state = states(tmp_path / "out")["partition-0/round-000001"]
    moved = [float((state[n] - state[n.replace("model", "evaluated")]).abs().mean()) for n in state if n.startswith("model.extractor")]
    assert min(moved) > 1.0


def test_nodes_may_differ_in_source_shape_number_of_outputs_and_model(tmp_path):
    colours = tmp_path / "colours"
    rng = np.random.default_rng(3)
    for index in range(60):
        values = rng.integers(0, 80, (12, 10, 3), dtype=np.uint8)
        values[..., index % 2] += 100
        folder = colours / "train" / f"kind-{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(folder / f"{index}.png")
    settings = muscle(tmp_path, num_rounds=5, train__learning_rate=0.1, fleet__models=f"mlp,mlp,{BN},{BN}")
    settings |= {"fleet.data": f"{settings['data.source']},{colours}", "alone": True}
    run(settings, tmp_path / "out", nodes=4)
    assert not rows(tmp_path / "out", "failure")
    last = [r for r in rows(tmp_path / "out", "node", "fedmuscle") if r["round"] == 5]
    assert {(r["node"], r["model"]) for r in last} == {
        ("partition-0", "mlp"),
        ("partition-1", "mlp"),
        ("partition-2", BN),
        ("partition-3", BN),
    }
    assert min(r["accuracy"] for r in last) > 0.8
    found = states(tmp_path / "out")
    assert found["partition-0/round-000005"]["model.head.weight"].shape[0] == 3
    assert found["partition-1/round-000005"]["model.head.weight"].shape[0] == 2


@pytest.mark.parametrize("objective", ["pairwise", "gramian"])
@pytest.mark.parametrize("way", ["round", "gradient"])
def test_the_other_objectives_fall_too(tmp_path, objective, way):
    settings = muscle(tmp_path, num_rounds=4, fedmuscle__objective=objective, fedmuscle__exchange=way, fedmuscle__contrastive_rate=0.003)
    run(settings, tmp_path / "out")
    losses = [m["contrastive_loss"] for m in method_numbers(tmp_path / "out") if m]
    assert losses[-1] < losses[0]
    assert not rows(tmp_path / "out", "failure")


def test_a_public_set_may_be_larger_than_what_is_used(tmp_path):
    pictures(tmp_path / "public", count=200, seed=4)
    the_grid = run(muscle(tmp_path, num_rounds=1, fedmuscle__public_items=50), tmp_path / "out")
    facts = [dict(c["report"])["public_items"] for kind, _, c in the_grid.received if kind == "query.describe"]
    assert facts == [50, 50, 50]
