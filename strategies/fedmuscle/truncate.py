"""A model cut to the first k dimensions of its representation."""

from __future__ import annotations

from copy import deepcopy
from typing import cast

import torch
from torch import nn

from models import SplitModel

_ELEMENTWISE = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Dropout)


class Cut(nn.Module):
    """The first `size` dimensions of an extractor's representation: (B, *input_shape) -> (B, size)."""

    def __init__(self, extractor: nn.Module, size: int) -> None:
        super().__init__()
        self.extractor, self.size = extractor, size

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.extractor(batch)[:, : self.size]


def truncated(model: SplitModel, size: int) -> nn.Module:
    """Return a copy of the model that reads and, where the last layer is a Linear, computes `size` dimensions only.

    Args:
        model: with a Linear head; unchanged.
        size: k, 1 to the model's feature_dim.

    Raises:
        ValueError: size out of range, or another head.
    """
    if not isinstance(model.head, nn.Linear) or not 1 <= size <= model.feature_dim:
        raise ValueError(
            f"a {type(model.head).__name__} head on {model.feature_dim} dimensions cannot be cut to {size}; "
            f"need a Linear, and 1 to {model.feature_dim} dimensions"
        )
    extractor = deepcopy(model.extractor)
    last = _last_linear(extractor)
    if last is None:
        extractor = Cut(extractor, size)
    else:
        extractor.set_submodule(last, _rows(cast(nn.Linear, extractor.get_submodule(last)), size))
    return nn.Sequential(extractor, _columns(model.head, size))


def _last_linear(extractor: nn.Module) -> str | None:
    """Return the name of the Linear that makes the representation, where only elementwise functions follow it."""
    if not isinstance(extractor, nn.Sequential):
        return None
    for name, module in reversed(list(extractor.named_children())):
        if isinstance(module, nn.Linear):
            return name
        if not isinstance(module, _ELEMENTWISE):
            inner = _last_linear(module)
            return None if inner is None else f"{name}.{inner}"
    return None


def _rows(linear: nn.Linear, size: int) -> nn.Linear:
    return _linear(linear.weight[:size], None if linear.bias is None else linear.bias[:size])


def _columns(linear: nn.Linear, size: int) -> nn.Linear:
    return _linear(linear.weight[:, :size], linear.bias)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        new.weight.copy_(weight)
        if bias is not None:
            new.bias.copy_(bias)
    return new
