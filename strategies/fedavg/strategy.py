"""Server half of FedAvg."""

from __future__ import annotations

from typing import cast

import torch

import models
from client_app.training import evaluate
from strategies.averaging import AveragingStrategy
from strategies.fedavg.config import Config
from strategies.trainer import load_exactly


class Strategy(AveragingStrategy):
    """Averages the whole model with sample counts as weights; the average is tested on the common test set."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> models.SplitModel:
        return models.build(cast(Config, self.config).model, input_shape=input_shape, num_outputs=num_outputs)

    def evaluate_shared(self) -> dict[str, float]:
        task = self.common_test()
        if task is None:
            return {}
        load_exactly(self.model, self.theta)
        self.model.eval()
        return evaluate(task, self.model, task.test, batch_size=256, device=torch.device("cpu"))
