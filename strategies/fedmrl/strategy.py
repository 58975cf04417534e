"""Server half of FedMRL: averages the small model G, sees nothing else (algorithm 1)."""

from __future__ import annotations

from typing import cast

import models
from strategies.averaging import AveragingStrategy
from strategies.fedmrl.config import Config
from strategies.fedmrl.normalize import normalized
from strategies.messages import Scalar


class Strategy(AveragingStrategy):
    """theta^t = sum_k (n_k / n) theta_k^t over the nodes that replied."""

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return cast(Config, self.config).weighting == "uniform"

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> models.SplitModel:
        config = cast(Config, self.config)
        model = models.build(config.small_model, input_shape=input_shape, num_outputs=num_outputs, feature_dim=config.shared_dim)
        return normalized(model) if config.normalize else model

    def settings_of_round(self, server_round: int) -> dict[str, Scalar]:
        return {"warmup": server_round <= cast(Config, self.config).warmup_rounds}
