"""A learning rate that is far too high is noticed early, whatever the method, and said in words that help."""

import pytest
import torch

from client_app.training import DivergedError, train_epochs
from strategies.fleet import FleetError
from strategies.seeds import generator
from tests.fedmrl.test_matryoshka import trainer
from tests.fleet_fixture import config, rows, run


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
