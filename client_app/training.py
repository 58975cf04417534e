"""The one epoch loop and the one evaluation loop, whatever the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from client_app.sgd import Sgd
from tasks import Samples, Task

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_TOO_MUCH = 1e4  # mean loss of a local training; a model that learns nothing has about ln(classes)


class DivergedError(RuntimeError):
    """The training loss is not finite or beyond all reason; the message names the round's mean loss and what to lower."""


@dataclass(frozen=True)
class TrainStats:
    """What one local training did: mean loss per sample, optimiser steps, distinct samples used."""

    loss: float
    steps: int
    samples: int


def batch_indices(count: int, batch_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return one epoch's shuffled index batches; every sample occurs once.

    A last batch of a single sample joins the batch before it: BatchNorm cannot train on one value a channel.
    """
    batches = list(torch.randperm(count, generator=generator).split(batch_size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        tail = batches.pop()
        batches[-1] = torch.cat((batches[-1], tail))
    return batches


def train_epochs(
    task: Task, modules: Iterable[nn.Module], step: Step, *, epochs: int, batch_size: int, device: torch.device, generator: torch.Generator
) -> TrainStats:
    """Run `step` over the task's training samples and return what was done.

    Args:
        task: gives `train` and `prepare`.
        modules: put in train mode; where the node has exactly one sample, their BatchNorm layers use running statistics.
        step: (batch (B, *input_shape) float32 channels_last where it has 4 axes, targets (B,)) -> mean loss, 0-d.
        generator: CPU; order and augmentation draw from it.

    Raises:
        DivergedError: the mean loss is not finite, or above 1e4.
    """
    samples, parts = task.train, list(modules)
    for part in parts:
        part.train()
    total = torch.zeros((), dtype=torch.float64, device=device)
    steps = seen = 0
    with _batch_norm_frozen(parts, frozen=len(samples) == 1):
        for _ in range(epochs):
            for index in batch_indices(len(samples), batch_size, generator):
                batch = task.prepare(samples.inputs[index].to(device), True, generator)
                loss = step(channels_last(batch), samples.targets[index].to(device))
                total += loss.detach().double() * len(index)
                steps, seen = steps + 1, seen + len(index)
    mean = float(total) / max(seen, 1)
    if not mean < _TOO_MUCH:  # nan compares false
        raise DivergedError(
            f"the training loss is {mean:.3g}: training diverged, lower train.learning-rate or the method's own, or set train.clip-norm"
        )
    return TrainStats(mean, steps, len(samples))


@torch.inference_mode()
def evaluate(
    task: Task, predict: Callable[[torch.Tensor], torch.Tensor], samples: Samples, *, batch_size: int, device: torch.device
) -> dict[str, float]:
    """Return `loss` and the task's metrics of `predict` on `samples`, each sample counted once; {} for an empty split."""
    if not len(samples):
        return {}
    outputs = [
        predict(channels_last(task.prepare(samples.inputs[start : start + batch_size].to(device), False, None))).float()
        for start in range(0, len(samples), batch_size)
    ]
    joined, targets = torch.cat(outputs), samples.targets.to(device)
    return {**task.metrics(joined, targets), "loss": float(task.loss(joined, targets))}


def channels_last(batch: torch.Tensor) -> torch.Tensor:
    """Return `batch` with channels as the fastest axis where it has four (convolutions run faster so)."""
    return batch.contiguous(memory_format=torch.channels_last) if batch.dim() == 4 else batch


def sgd(parameters: Iterable[nn.Parameter] | list[dict[str, object]], *, rate: float, momentum: float, weight_decay: float) -> Sgd:
    """Return a fresh fused SGD; a fresh one each round, or momentum would leak between nodes and rounds."""
    return Sgd(parameters, rate=rate, momentum=momentum, weight_decay=weight_decay)


def clip(modules: Iterable[nn.Module], norm: float) -> None:
    """Clip the gradient norm of each module on its own; `norm` 0 does nothing."""
    if norm > 0:
        for module in modules:
            nn.utils.clip_grad_norm_(module.parameters(), norm)


@contextmanager
def _batch_norm_frozen(modules: list[nn.Module], *, frozen: bool) -> Iterator[None]:
    layers = [m for part in modules for m in part.modules() if isinstance(m, _BatchNorm)] if frozen else []
    for layer in layers:
        layer.eval()
    yield
    for layer in layers:
        layer.train()
