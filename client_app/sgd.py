"""SGD with momentum without torch's `Optimizer`: the same numbers, and a process that starts faster and smaller.

The first `torch.optim.Optimizer` of a process imports torch._dynamo and sympy: 1.7 s of CPU and 70 MB. A real node would pay
for it with every message, since Flower starts a process for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim.sgd import sgd as torch_sgd


@dataclass
class _Group:
    """Parameters that share options, and a momentum buffer for each (None before its first step)."""

    parameters: list[nn.Parameter]
    rate: float
    momentum: float
    weight_decay: float
    buffers: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = [None] * len(self.parameters)


class Sgd:
    """What `torch.optim.SGD(parameters, lr=rate, ..., fused=True)` computes, to the bit.

    Args:
        parameters: parameters, or groups as torch's optimizers take them: dicts with `params` and, where it differs, `lr`,
            `momentum` or `weight_decay`.
        rate: learning rate of groups without one; likewise the others.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, object]], *, rate: float, momentum: float, weight_decay: float
    ) -> None:
        given = list(parameters)
        groups = [entry for entry in given if isinstance(entry, dict)] or [{"params": given}]
        defaults = {"lr": rate, "momentum": momentum, "weight_decay": weight_decay}
        self._groups = [_group({**defaults, **group}) for group in groups]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group in self._groups:
            for parameter in group.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self._groups:
            # torch's kernel begins momentum for all of its tensors or for none.
            has = [index for index, parameter in enumerate(group.parameters) if parameter.grad is not None]
            for begun in (True, False):
                _move(group, [index for index in has if (group.buffers[index] is not None) is begun])


def _group(options: dict[str, object]) -> _Group:
    parameters = options["params"]
    if not isinstance(parameters, Iterable):
        raise TypeError(f"params of a group must be parameters, not {type(parameters).__name__}")
    rate, momentum, weight_decay = (float(str(options[name])) for name in ("lr", "momentum", "weight_decay"))
    return _Group(list(parameters), rate, momentum, weight_decay)


def _move(group: _Group, indices: list[int]) -> None:
    if not indices:
        return
    buffers = [group.buffers[index] for index in indices]
    torch_sgd(
        [group.parameters[index] for index in indices],
        [gradient for index in indices if (gradient := group.parameters[index].grad) is not None],
        buffers,
        fused=True,
        foreach=False,
        lr=group.rate,
        momentum=group.momentum,
        weight_decay=group.weight_decay,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    for index, buffer in zip(indices, buffers, strict=True):
        group.buffers[index] = buffer
