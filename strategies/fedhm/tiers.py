"""One model at one rank ratio: the table of ranks on which server and node must agree, the hybrid, and what it costs."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from torch import nn

from models.cost import activation_bytes, forward_macs, parameter_count
from models.split import SplitModel
from strategies.fedhm.config import Config
from strategies.fedhm.hybrid import Choice, Predicate, choose_ranks, default_predicate, load_state, ranks_of, state_of, with_ranks
from strategies.fedhm.lowrank import groups_of
from strategies.fedhm.plan import Part, Tensors, lowrank_plan


@dataclass(frozen=True)
class Tier:
    """A model at one rank ratio.

    Attributes:
        ratio: in (0, 1].
        choices: what became of each layer.
    """

    ratio: float
    choices: list[Choice]

    @classmethod
    def of(cls, model: nn.Module, ratio: float, config: Config) -> Tier:
        """Return the tier of the full `model` at `ratio`."""
        chosen = choose_ranks(model, ratio, rho=config.rho, predicate=_predicate(model), rule=config.rank_rule)
        return cls(ratio, chosen)

    @property
    def ranks(self) -> dict[str, int]:
        """Layer name -> rank of the layers that are low-rank."""
        return ranks_of(self.choices)

    @property
    def table(self) -> str:
        """A digest of all layers' names, shapes and ranks."""
        lines = [f"{c.name} {c.shape} {c.rank}" for c in self.choices]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def plan(self, model: nn.Module, state: Tensors) -> dict[str, Part]:
        """Return what a node of this tier holds of the full model's `state`."""
        return lowrank_plan(state, self.ranks, {name: groups_of(model.get_submodule(name)) for name in self.ranks})

    def hybrid(self, model: nn.Module, tensors: Tensors | None = None) -> nn.Module:
        """Return a copy of the full `model` cut to this tier with `tensors` in it; without, the factors are zero."""
        cut = with_ranks(model, self.ranks, spectral=False)
        if tensors is not None:
            load_state(cut, tensors)
        return cut


@dataclass(frozen=True)
class TierCost:
    """What a tier costs a node.

    Attributes:
        ratio: rank ratio.
        parameters: numbers learned.
        macs: multiply-accumulates of one sample's forward pass.
        bytes: of what travels one way in the model's own dtype.
        activation_bytes: per sample, kept from the forward to the backward pass in training.
    """

    ratio: float
    parameters: int
    macs: int
    bytes: int
    activation_bytes: int


def cost_of(model: SplitModel, ratio: float, config: Config) -> TierCost:
    """Return the cost of the full `model` at `ratio`."""
    cut = Tier.of(model, ratio, config).hybrid(model)
    shape = model.input_shape
    return TierCost(ratio, parameter_count(cut), forward_macs(cut, shape), travelling_bytes(cut), activation_bytes(cut, shape))


def travelling_bytes(model: nn.Module) -> int:
    """Return the bytes of what travels of a full or hybrid model, without headers."""
    return sum(t.numel() * t.element_size() for t in state_of(model).values() if t.is_floating_point())


def drawn_ratio(ratios: tuple[float, ...], seed: int, node: str, server_round: int) -> float:
    """Return one of `ratios`, drawn from (seed, node, round): one that stands there twice is twice as likely."""
    return random.Random(f"{seed}/{server_round}/{node}/rank-ratio").choice(ratios)


def _predicate(model: nn.Module) -> Predicate | None:
    """Return None for the default, or the default without what attention reads past its children's `forward`."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))
    if not inside:
        return None
    usual = default_predicate(model)
    return lambda name, module: not name.startswith(inside) and usual(name, module)
