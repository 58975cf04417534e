"""What is learned: where samples come from, how they are split, the loss and the metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from client_app.profile import NodeProfile
    from server_app.settings import Settings


class DataError(ValueError):
    """A node's data cannot be used; the message names the node or file, the shape or value, and the cure."""


@dataclass(frozen=True)
class Samples:
    """Raw samples of one split, held once and never copied per epoch.

    Attributes:
        inputs: (N, *input_shape) uint8 (images) or float32.
        targets: (N,) int64.
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Task:
    """One node's view of what is learned.

    Attributes:
        kind: "classification".
        input_shape: (C, H, W) of a prepared sample.
        num_outputs: classes in the whole federation, not only those on this node.
        train, val, test: this node's splits; `val` and `test` may be empty.
        prepare: (raw batch on the device, train, generator) -> float32 batch: normalised, augmented when training.
        loss: (outputs (B, C), targets (B,)) -> mean loss, 0-d.
        metrics: (outputs (N, C), targets (N,)) -> name -> value; the first name is the main metric.
        class_names: names of the outputs, or empty.
    """

    kind: str
    input_shape: tuple[int, ...]
    num_outputs: int
    train: Samples
    val: Samples
    test: Samples
    prepare: Callable[[torch.Tensor, bool, torch.Generator | None], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    metrics: Callable[[torch.Tensor, torch.Tensor], dict[str, float]]
    class_names: tuple[str, ...] = field(default=())


def load(profile: NodeProfile, settings: Settings) -> Task:
    """Return the node's task: its own `profile.data`, else its partition of `settings.data.source`.

    Raises:
        DataError: nothing to read, labels outside 0..C-1, channels that do not fit, an empty split.
    """
    from tasks.classification import load_classification

    return load_classification(profile, settings)


def load_shared_test(settings: Settings) -> Task | None:
    """Return a task whose `test` is the common test set for shared models (the server's), or None without one."""
    from tasks.classification import load_common

    return load_common(settings)
