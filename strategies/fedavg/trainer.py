"""Node half of FedAvg: the shared model, nothing private."""

from __future__ import annotations

import torch

from strategies.local.trainer import NodeTrainer as LocalTrainer
from strategies.local.trainer import build_model
from strategies.messages import Payload, Tensors, Update
from strategies.trainer import NodeContext, Trainer, load_exactly


class NodeTrainer(LocalTrainer):
    """Trains the shared model as it was received."""

    def __init__(self, context: NodeContext) -> None:
        Trainer.__init__(self, context)
        self.model = build_model(context, context.config.model, context.settings.seed, "shared")  # type: ignore[attr-defined]

    @property
    def model_name(self) -> str:
        return self.context.config.model  # type: ignore[attr-defined]

    def private_state(self) -> Tensors:
        return {}

    def load_private_state(self, state: Tensors) -> None:
        """There is none."""

    def receive(self, payload: Payload) -> None:
        load_exactly(self.model, payload.tensors)

    def train(self, payload: Payload, generator: torch.Generator) -> Update:
        stats = self.fit(generator)
        return Update(self.model.state_dict(), stats.samples, {"train_loss": stats.loss})
