"""BatchNorm when models are cut: truncation moves every activation, so that running statistics of the full model do not fit.

What each option means, in training always the batch's own statistics:

- `recalibrate`: running statistics travel and are averaged like weights, but are measured anew before every use: a node's
  on its own training samples (at most `SAMPLES`, not augmented), those of the full model and of each tier on the
  common test set's inputs, never its labels. Counters do not travel.
- `batch`: no running statistics; also in evaluation a batch is normalised by itself, as in the authors' program, so
  that results depend on the batch (256 samples here). An exported model is recalibrated.
- `group`: GroupNorm in place of BatchNorm, of at most 32 groups; nothing to measure.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

SAMPLES = 512
"""Samples on which statistics are measured, at most."""

_BATCH = 128

Model = TypeVar("Model", bound=nn.Module)


def with_norm(model: Model, option: str) -> Model:
    """Return `model`, changed in place to the option's normalisation."""
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, _BatchNorm) or option == "recalibrate":
            continue
        if option == "batch":
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        else:
            model.set_submodule(name, _grouped(layer))
    return model


def calibrated(model: nn.Module, inputs: torch.Tensor, prepare: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of `model` in evaluation mode whose BatchNorm statistics are those of `inputs`; the model itself without BatchNorm.

    One sample has no statistics: then the copy keeps those that it has.

    Args:
        model: on the device that computes.
        inputs: (N, *input_shape) raw samples; the first `SAMPLES` are used.
        prepare: raw batch -> what the model takes.
    """
    if not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        return model.eval()
    # Evaluation runs in inference mode, whose tensors could not be exported.
    with torch.inference_mode(False), torch.no_grad():
        measured = copy.deepcopy(model).eval()
        chosen = inputs[:SAMPLES]
        if len(chosen) < 2:
            return measured
        for layer in measured.modules():
            if isinstance(layer, _BatchNorm):
                _start(layer)
        for batch in chosen.tensor_split(math.ceil(len(chosen) / _BATCH)):
            measured(prepare(batch))
    return measured.eval()


@contextmanager
def explained(option: str) -> Iterator[None]:
    """Say what to set where a batch of one value a channel cannot be normalised by itself."""
    try:
        yield
    except ValueError as error:
        if option != "batch" or "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            f"a batch of one sample cannot be normalised by itself ({error}); set fedhm.batch-norm to recalibrate or group"
        ) from error


def _start(layer: _BatchNorm) -> None:
    """Let `layer` measure: momentum None is the mean over all batches."""
    place = layer.weight.device if layer.weight is not None else None
    layer.track_running_stats, layer.momentum = True, None
    layer.running_mean = torch.zeros(layer.num_features, device=place)
    layer.running_var = torch.ones(layer.num_features, device=place)
    layer.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=place)
    layer.train()


def _grouped(layer: _BatchNorm) -> nn.GroupNorm:
    norm = nn.GroupNorm(math.gcd(32, layer.num_features), layer.num_features, layer.eps, affine=layer.affine)
    return norm.to(layer.weight) if layer.affine else norm
