"""A learning rate that is far too high is noticed early, whatever the method, and said in words that help."""

import pytest
import torch

from client_app.training import DivergedError, train_epochs
from strategies.aggregation import UpdateError, check_growth
from strategies.fleet import FleetError
from strategies.messages import decode, encode
from strategies.seeds import generator
from tests.fedmrl.test_matryoshka import trainer
from tests.fleet_fixture import config, grid, rows, run


@pytest.mark.parametrize("strategy", ["local", "fedavg", "fedmrl"])
def test_a_diverging_run_ends_by_round_three_and_says_what_to_lower(tmp_path, strategy):
    settings = config(tmp_path, strategy=strategy, num_rounds=8, train__learning_rate=100.0)
    with pytest.raises(FleetError, match=r"partition-0.*training diverged, lower train.learning-rate"):
        run(settings, tmp_path / "out")
    assert max((row["round"] for row in rows(tmp_path / "out", "round")), default=0) < 3


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e5])
def test_a_loss_beyond_reason_is_refused(tmp_path, monkeypatch, loss):
    task = trainer(tmp_path, monkeypatch).context.task

    def step(batch, targets):
        return torch.tensor(loss)

    with pytest.raises(DivergedError, match=r"lower train\.learning-rate"):
        train_epochs(task, [], step, epochs=1, batch_size=8, device=torch.device("cpu"), generator=generator("x"))


def test_weights_that_grew_beyond_reason_are_refused_even_if_finite_and_vectors_may_grow():
    sent = {"weight": torch.full((3, 4), 0.05), "large": torch.full((2, 2), 2000.0), "running_var": torch.ones(4)}
    check_growth({"weight": torch.full((3, 4), 900.0), "large": torch.full((2, 2), 1e6), "running_var": torch.full((4,), 1e6)}, sent)
    with pytest.raises(UpdateError, match=r"^weight grew from 0\.05 to 1\.5e\+03: training diverged, lower train\.learning-rate"):
        check_growth({**sent, "weight": torch.full((3, 4), -1500.0)}, sent)


def test_a_fedhm_round_whose_factors_blew_up_keeps_the_model_that_was(tmp_path):
    settings = config(tmp_path, strategy="fedhm", fedhm__model="mlp", num_rounds=2, fleet__retries=0, alone=False)
    the_grid = grid(settings)

    def blown(kind, node, content):
        if kind == "train":
            tensors = {n: t * 200 if n.endswith((".ut", ".vt")) else t for n, t in decode(content).items()}
            content.update(encode(tensors))
        return content

    the_grid.tamper = blown
    with pytest.raises(FleetError, match=r"\(the factors' product\) grew from 0\.\d+ to .*: training diverged"):
        run(settings, tmp_path / "out", the_grid)
    assert not rows(tmp_path / "out", "round")
