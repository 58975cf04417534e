"""The node half of a method: what `client_app.app` calls, and all that a method must write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from strategies.messages import Payload, Scalar, Tensors, Update

if TYPE_CHECKING:
    from client_app.profile import NodeProfile
    from server_app.settings import Section, Settings
    from tasks import Task


@dataclass(frozen=True)
class NodeContext:
    """What a trainer is built from.

    Attributes:
        profile: who this node is (name, model, rank ratio, device).
        settings: the run's settings; `config` is the method's own, already checked.
        task: this node's data, loss and metric.
        device: where tensors are put.
        seed: 63-bit integer from (run seed, node name); the node's random start depends on nothing else.
    """

    profile: NodeProfile
    settings: Settings
    config: Section
    task: Task
    device: torch.device
    seed: int


class Trainer(ABC):
    """One node's models and how they are trained. Built anew for each message; state comes from the store.

    `__init__` builds the models with the node's seeded random start and must not read data.
    """

    def __init__(self, context: NodeContext) -> None:
        self.context = context

    @property
    def model_name(self) -> str:
        """Name of the model this node uses under the method, for tables and cards; by default the node's own."""
        return self.context.profile.model

    def architecture(self, name: str) -> str:
        """Return what `exportable()[name]` is, for its card."""
        return self.model_name

    def describe(self) -> dict[str, Scalar]:
        """Return what the server must know to build a payload for this node (sizes, layouts).

        A `warning` in it is shown before a simulation starts.
        """
        return {}

    @abstractmethod
    def private_state(self) -> Tensors:
        """Return the tensors that survive a round on this node and never leave it."""

    @abstractmethod
    def load_private_state(self, state: Tensors) -> None:
        """Take over `state`; names, shapes and dtypes equal those of `private_state()` (the store checks)."""

    @abstractmethod
    def receive(self, payload: Payload) -> None:
        """Take over the shared tensors of `payload`; raises ValueError naming the key that does not fit."""

    @abstractmethod
    def train(self, payload: Payload, generator: torch.Generator) -> Update:
        """Return the update after local training; `receive(payload)` has been called.

        Args:
            payload: what the server sent (its `settings` may steer the training).
            generator: CPU generator seeded from (run seed, node name, round): the only source of randomness.
        """

    def exchange(self, payload: Payload, generator: torch.Generator) -> Update:
        """Return the answer to a further exchange of a round, for methods that hold some; state after it is saved.

        The private state of this round's training has been loaded; `receive` has not been called.
        """
        raise ValueError(f"{type(self).__module__} holds no further exchange")

    @abstractmethod
    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        """Return outputs (B, C) of this node's own model for a prepared batch; evaluation calls nothing else."""

    @abstractmethod
    def exportable(self) -> dict[str, nn.Module]:
        """Return the models worth taking away, the default one first: name -> module, (B, *input_shape) -> (B, C)."""


def load_exactly(module: nn.Module, tensors: Tensors) -> None:
    """Load `tensors` into `module`; raises ValueError naming every key that is missing, unexpected or of another shape."""
    own = module.state_dict()
    wrong = [f"{name} is missing" for name in sorted(own.keys() - tensors.keys())]
    wrong += [f"{name} is unexpected" for name in sorted(tensors.keys() - own.keys())]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in sorted(own.keys() & tensors.keys())
        if own[name].shape != tensors[name].shape
    ]
    if wrong:
        raise ValueError(
            f"tensors do not fit the model: {'; '.join(wrong[:6])}" + (f"; and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
