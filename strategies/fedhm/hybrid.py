"""Any model at a node's rank ratio: which layers become low-rank, at which rank, and how tensors are named on the way.

Server and node agree from names and ranks alone: both walk the same full model by name with the same settings.
On the way a factorized `conv1.weight` is `conv1.weight.ut` and `conv1.weight.vt`; all other names are the full model's.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from strategies.fedhm.lowrank import Factored, break_even, factorize, groups_of, matrix_size, rank_of, refusal

Predicate = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Choice:
    """What becomes of one layer.

    Attributes:
        name: the layer's name in the full model.
        shape: of its weight.
        rank: rank of each group's block, or None where the layer stays full.
        reason: why it stays full; empty where it does not.
        parameters: of its weight, full and as chosen.
    """

    name: str
    shape: tuple[int, ...]
    rank: int | None
    reason: str
    parameters: tuple[int, int]

    def __str__(self) -> str:
        full, now = self.parameters
        what = f"rank {self.rank}, {full} -> {now} parameters" if self.rank else f"full ({self.reason}), {full} parameters"
        return f"{self.name} {self.shape}: {what}"


def default_predicate(model: nn.Module) -> Predicate:
    """Return the predicate that lets every convolution wider than 1x1 and every Linear but the classifier be factorized.

    The classifier is all of `head` where the model has one (the built-in models do), else its last such layer.
    """
    reason = _default_reason(model)
    return lambda name, module: not reason(name, module)


def _default_reason(model: nn.Module) -> Callable[[str, nn.Module], str]:
    last = [name for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))][-1:]
    headed = isinstance(getattr(model, "head", None), nn.Module)

    def reason(name: str, module: nn.Module) -> str:
        if isinstance(module, nn.Conv2d) and max(module.kernel_size) == 1:
            return "1x1"
        return "classifier" if (name.split(".")[0] == "head" if headed else name in last) else ""

    return reason


def choose_ranks(
    model: nn.Module, rank_ratio: float, *, rho: int = 0, predicate: Predicate | None = None, rule: str = "outputs"
) -> list[Choice]:
    """Return one choice for each Conv2d and Linear, in the order in which the model registers them.

    At ratio 1 every layer stays full: rank = outputs would already cut a square 3x3 kernel to a third of its rank.

    Args:
        model: the full model.
        rank_ratio: kept rank over full rank, in (0, 1].
        rho: how many of the first layers that could be factorized stay full.
        predicate: (name, module) -> whether it may be factorized; None: `default_predicate`. Tied, depthwise and
            hooked layers stay full whatever it says.
        rule: a name in `lowrank.RANK_RULES`.

    Raises:
        ValueError: ratio, rho or rule out of range.
    """
    if not 0 < rank_ratio <= 1:
        raise ValueError(f"rank ratio {rank_ratio} is not within (0, 1]")
    if rho < 0:
        raise ValueError(f"rho = {rho}: the number of first layers kept full cannot be negative")
    unwanted = _default_reason(model) if predicate is None else lambda name, layer: "" if predicate(name, layer) else "not chosen"
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    choices, kept = [], 0
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Conv2d, nn.Linear)):
            continue
        rank, reason = None, _stays_full(name, layer, owners) or unwanted(name, layer)
        if not reason and kept < rho:
            kept, reason = kept + 1, f"among the first {rho}"
        elif not reason and rank_ratio == 1:
            reason = "rank ratio 1"
        elif not reason:
            rank = rank_of(layer, rank_ratio, rule)
            if rank >= break_even(layer):
                rank, reason = None, f"rank {rank} saves nothing: break-even at {break_even(layer):.1f}"
        full = layer.weight.numel()
        thin = full if rank is None else rank * groups_of(layer) * sum(matrix_size(tuple(layer.weight.shape), groups_of(layer)))
        choices.append(Choice(name, tuple(layer.weight.shape), rank, reason, (full, thin)))
    return choices


def hybridize(
    model: nn.Module,
    rank_ratio: float,
    *,
    rho: int = 0,
    predicate: Predicate | None = None,
    rule: str = "outputs",
    spectral: bool = True,
) -> tuple[nn.Module, list[Choice]]:
    """Return a copy of `model` at `rank_ratio` and what became of each layer; `model` is untouched.

    Args:
        model, rank_ratio, rho, predicate, rule: see `choose_ranks`.
        spectral: start the factors from the SVD; without, they are zero until `load_state`.
    """
    choices = choose_ranks(model, rank_ratio, rho=rho, predicate=predicate, rule=rule)
    return with_ranks(model, ranks_of(choices), spectral=spectral), choices


def ranks_of(choices: list[Choice]) -> dict[str, int]:
    """Return layer name -> rank of the layers that become low-rank."""
    return {c.name: c.rank for c in choices if c.rank is not None}


def with_ranks(model: nn.Module, ranks: Mapping[str, int], *, spectral: bool = True) -> nn.Module:
    """Return a copy of `model` whose layers named in `ranks` are factorized; raises ValueError naming the layer that cannot."""
    hybrid = copy.deepcopy(model)
    for name, rank in ranks.items():
        parent, _, leaf = name.rpartition(".")
        try:
            layer = hybrid.get_submodule(name)
            if not name or not isinstance(layer, (nn.Conv2d, nn.Linear)):
                raise ValueError("it is no Conv2d or Linear inside a model")
            setattr(hybrid.get_submodule(parent), leaf, factorize(layer, rank, spectral=spectral))
        except (AttributeError, ValueError) as error:
            raise ValueError(f"layer {name!r}: {error}") from None
    return hybrid


def factored_layers(model: nn.Module) -> dict[str, Factored]:
    """Return name -> low-rank layer."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Factored)}


def frobenius_penalty(model: nn.Module) -> torch.Tensor | float:
    """Return the sum of |U Vᵀ|² over the low-rank layers (0-d, differentiable), 0.0 where there is none.

    The node's loss adds half of it times the decay; plain weight decay must then leave `factor_parameters` alone.
    """
    return sum((layer.frobenius_penalty() for layer in factored_layers(model).values()), 0.0)


def factor_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights of all low-rank layers, without biases."""
    return [half.weight for layer in factored_layers(model).values() for half in (layer.v, layer.u)]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what travels of a full or hybrid model: each shared tensor once, under the full model's names.

    Buffers that `state_dict` leaves out stay out; integer buffers are included (a plan marks them absent).
    """
    state = {name: tensor.detach() for name, tensor in _tensors(model).items()}
    for layer, thin in factored_layers(model).items():
        del state[f"{layer}.u.weight"], state[f"{layer}.v.weight"]
        ut, vt = thin.factors()
        state |= {f"{layer}.weight.ut": ut.detach().contiguous(), f"{layer}.weight.vt": vt.detach().contiguous()}
        if thin.bias is not None:
            state[f"{layer}.bias"] = state.pop(f"{layer}.u.bias")
    return state


@torch.no_grad()
def load_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors named as by `state_of` into `model`; integer buffers may be left out.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs; nothing is copied then.
    """
    own = state_of(model)
    needed = {name for name, tensor in own.items() if tensor.is_floating_point()}
    if missing := sorted(needed - state.keys()):
        raise ValueError(f"{missing[0]!r} is missing ({len(missing)} in all)")
    for name, tensor in state.items():
        if name not in own:
            raise ValueError(f"{name!r} is not in this model: its ranks or its architecture differ")
        if tensor.shape != own[name].shape:
            raise ValueError(f"{name!r} is {tuple(tensor.shape)}, this model needs {tuple(own[name].shape)}")
    thin = factored_layers(model)
    for layer, module in thin.items():
        module.load_factors(state[f"{layer}.weight.ut"], state[f"{layer}.weight.vt"])
    targets = _tensors(model) | {f"{layer}.bias": m.bias for layer, m in thin.items() if m.bias is not None}
    for name, tensor in state.items():
        if not name.endswith((".ut", ".vt")):
            targets[name].copy_(tensor)


def _stays_full(name: str, layer: nn.Conv2d | nn.Linear, owners: Counter[int]) -> str:
    if reason := refusal(layer):
        return reason
    if owners[id(layer.weight)] > 1:
        return "its weight is shared with another layer"
    if layer._forward_pre_hooks or layer._forward_hooks:
        return "it has hooks, as weight normalisation does"
    return "" if name else "it is the whole model"


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent parameters and buffers by name, shared ones once."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    persistent = model.state_dict().keys()
    return {name: tensor for name, tensor in named.items() if name in persistent}
