"""Node half of local training: the node's own model, kept in private state."""

from __future__ import annotations

import torch
from torch import nn

import models
from client_app.training import TrainStats, clip, sgd, train_epochs
from strategies.messages import Payload, Scalar, Tensors, Update
from strategies.seeds import seeded
from strategies.trainer import NodeContext, Trainer, load_exactly


def build_model(context: NodeContext, name: str, *seed: object, feature_dim: int | None = None) -> models.SplitModel:
    """Return model `name` for the context's task on its device, started from `seed`, channels last."""
    with seeded(*seed):
        model = models.build(name, input_shape=context.task.input_shape, num_outputs=context.task.num_outputs, feature_dim=feature_dim)
    return model.to(context.device).to(memory_format=torch.channels_last)


class NodeTrainer(Trainer):
    """Trains one model on the task's loss."""

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self.model = build_model(context, context.profile.model, context.seed, "private")

    def describe(self) -> dict[str, Scalar]:
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def private_state(self) -> Tensors:
        return self.model.state_dict()

    def load_private_state(self, state: Tensors) -> None:
        load_exactly(self.model, state)

    def receive(self, payload: Payload) -> None:
        """Nothing is shared."""

    def fit(self, generator: torch.Generator) -> TrainStats:
        """Train `self.model` for the run's local epochs and return what was done."""
        rates, task = self.context.settings.train, self.context.task
        optimizer = sgd(self.model.parameters(), rate=rates.learning_rate, momentum=rates.momentum, weight_decay=rates.weight_decay)

        def step(batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch, targets)
            loss.backward()
            clip([self.model], rates.clip_norm)
            optimizer.step()
            return loss

        return train_epochs(
            task,
            [self.model],
            step,
            epochs=rates.local_epochs,
            batch_size=rates.batch_size,
            device=self.context.device,
            generator=generator,
        )

    def loss(self, batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss that `fit` minimises, 0-d."""
        return self.context.task.loss(self.model(batch), targets)

    def train(self, payload: Payload, generator: torch.Generator) -> Update:
        stats = self.fit(generator)
        return Update({}, stats.samples, {"train_loss": stats.loss})

    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        return self.model(batch)

    def exportable(self) -> dict[str, nn.Module]:
        return {"model": self.model}
