"""AdamW whose whole state is one named dict of tensors, so that it survives a round in the node's private state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from strategies.messages import Tensors


class Adam:
    """AdamW (Loshchilov and Hutter, 2019) over named parameters.

    Args:
        named: name -> parameter; all are stepped together.
        rate: learning rate.
        weight_decay: decoupled.
        rates: first part of a name -> its own learning rate.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, rate: float, weight_decay: float, rates: Mapping[str, float] | None = None
    ) -> None:
        self._parameters = dict(named)
        own = rates or {}
        groups = [{"params": [p], "lr": own.get(name.partition(".")[0], rate)} for name, p in self._parameters.items()]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=weight_decay, fused=True)
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, loss: torch.Tensor) -> None:
        """Take one step down the gradient of `loss`; a parameter it does not reach only decays."""
        self._optimizer.zero_grad()
        loss.backward()
        for parameter in self._parameters.values():
            if parameter.grad is None:  # else its step count would lag behind the others', which share one number in `state`
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> Tensors:
        """Return the moments of every parameter by its name, and `step`, the number of steps taken."""
        states = {name: self._optimizer.state[parameter] for name, parameter in self._parameters.items()}
        moments = {f"{key}.{name}": state[key] for name, state in states.items() for key in ("exp_avg", "exp_avg_sq")}
        return {"step": next(iter(states.values()))["step"], **moments}

    def load(self, state: Tensors) -> None:
        """Take over what `state` returned; raises KeyError for a missing name."""
        for name, parameter in self._parameters.items():
            own = self._optimizer.state[parameter]
            own["step"].copy_(state["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                own[key].copy_(state[f"{key}.{name}"])
