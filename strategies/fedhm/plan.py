"""What of each parameter a node gets, as data: Full, LowRank, Index or Absent; and the two pure functions on it.

`extract` cuts a node's tensors out of the full state; `lift` puts its reply back into the full shapes and says what
it covers; `merge.Merger` averages the lifted replies. A method that gives nodes smaller models (low rank, prefix of
the channels, rolling window, fewer layers) is another function that returns a Plan, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from strategies.fedhm.decompose import Factors
from strategies.fedhm.lowrank import matrix_size, product, roll

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Full:
    """The node holds the whole parameter."""


@dataclass(frozen=True)
class LowRank:
    """The node holds factors `<name>.ut` (rank, g*M) and `<name>.vt` (rank, g*N); their product covers everything.

    Attributes:
        rank: of each group's block.
        groups: of the convolution.
    """

    rank: int
    groups: int = 1


@dataclass(frozen=True)
class Index:
    """The node holds, and covers, the product of these indices.

    Attributes:
        dims: axis -> distinct int64 indices along it; axes not named are whole.
    """

    dims: Mapping[int, torch.Tensor]

    def __post_init__(self) -> None:
        for axis, index in self.dims.items():
            if index.dim() != 1 or index.dtype != torch.int64 or len(index.unique()) != len(index) or not len(index):
                raise ValueError(f"axis {axis}: indices must be distinct int64 in one row, not {index.tolist()}")

    def mesh(self, shape: torch.Size) -> tuple[torch.Tensor, ...]:
        """Return one index tensor for each axis, broadcasting to the product of all (a plain open mesh)."""
        for axis, index in self.dims.items():
            if not 0 <= axis < len(shape) or int(index.min()) < 0 or int(index.max()) >= shape[axis]:
                raise ValueError(f"axis {axis}: indices {index.tolist()} do not fit a parameter {tuple(shape)}")
        rows = [self.dims.get(axis, torch.arange(size)) for axis, size in enumerate(shape)]
        return tuple(row.reshape([-1 if a == axis else 1 for a in range(len(shape))]) for axis, row in enumerate(rows))


@dataclass(frozen=True)
class Absent:
    """The node does not hold the parameter."""


Part = Full | LowRank | Index | Absent
Plan = Mapping[str, Part]


@dataclass(frozen=True)
class Lifted:
    """One parameter of one reply.

    Attributes:
        value: in the parameter's shape, or in that of the index product.
        cover: the index product it covers; None: everything.
    """

    value: torch.Tensor
    cover: Index | None


def lowrank_plan(state: Tensors, ranks: Mapping[str, int], groups: Mapping[str, int]) -> dict[str, Part]:
    """Return FedHM's plan: layers named in `ranks` low-rank, integer and boolean buffers absent, all else full.

    Args:
        state: the full model's tensors, as `hybrid.state_of` names them.
        ranks: layer name -> rank.
        groups: layer name -> groups, for grouped convolutions at least.
    """
    plan: dict[str, Part] = {name: Full() if tensor.is_floating_point() else Absent() for name, tensor in state.items()}
    for layer, rank in ranks.items():
        if f"{layer}.weight" not in plan:
            raise ValueError(f"layer {layer!r} has no weight in this model")
        plan[f"{layer}.weight"] = LowRank(rank, groups.get(layer, 1))
    return plan


def needed_ranks(plans: Iterable[Plan]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return parameter name -> (its distinct ranks over all plans, largest first; its groups)."""
    ranks: dict[str, set[int]] = {}
    groups: dict[str, int] = {}
    for plan in plans:
        for name, part in plan.items():
            if isinstance(part, LowRank):
                ranks.setdefault(name, set()).add(part.rank)
                if groups.setdefault(name, part.groups) != part.groups:
                    raise ValueError(f"{name!r} has {groups[name]} groups in one plan and {part.groups} in another")
    return {name: (tuple(sorted(found, reverse=True)), groups[name]) for name, found in ranks.items()}


def extract(state: Tensors, plan: Plan, factors: Mapping[str, Factors]) -> dict[str, torch.Tensor]:
    """Return the tensors of a node: views of `state` and of `factors` wherever nothing has to be gathered.

    Args:
        state: the full tensors by name.
        plan: one part for each of them.
        factors: parameter name -> factors at the plan's rank or a larger one.
    """
    _same_names(state, plan)
    tensors: dict[str, torch.Tensor] = {}
    for name, part in plan.items():
        if isinstance(part, Full):
            tensors[name] = state[name]
        elif isinstance(part, Index):
            tensors[name] = state[name][part.mesh(state[name].shape)]
        elif isinstance(part, LowRank):
            ut, vt = factors[name].prefix(part.rank)
            dtype = state[name].dtype
            tensors[f"{name}.ut"], tensors[f"{name}.vt"] = ut.to(dtype), vt.to(dtype)
    return tensors


def layout(state: Tensors, plan: Plan) -> dict[str, torch.Tensor]:
    """Return what a node of this plan receives and sends, as tensors without memory (device "meta")."""
    _same_names(state, plan)
    like: dict[str, torch.Tensor] = {}
    for name, part in plan.items():
        tensor = state[name]
        if isinstance(part, LowRank):
            rows, columns = matrix_size(tuple(tensor.shape), part.groups)
            like[f"{name}.ut"] = torch.empty(part.rank, part.groups * rows, dtype=tensor.dtype, device="meta")
            like[f"{name}.vt"] = torch.empty(part.rank, part.groups * columns, dtype=tensor.dtype, device="meta")
        elif isinstance(part, Index):
            sizes = [len(part.dims[axis]) if axis in part.dims else size for axis, size in enumerate(tensor.shape)]
            like[name] = torch.empty(sizes, dtype=tensor.dtype, device="meta")
        elif isinstance(part, Full):
            like[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return like


def lift(tensors: Tensors, name: str, part: Part, shape: torch.Size) -> Lifted | None:
    """Return parameter `name` of a reply in the full shape, or None where the node does not hold it.

    Factors become their product here, never an average of factors: U and V of two nodes belong to different bases.

    Args:
        tensors: the reply, laid out as `layout` says.
        name: the parameter's name in the full model.
        part: its part of the node's plan.
        shape: its full shape.
    """
    if isinstance(part, Absent):
        return None
    if isinstance(part, LowRank):
        return Lifted(roll(product(tensors[f"{name}.ut"], tensors[f"{name}.vt"], part.groups), tuple(shape)), None)
    return Lifted(tensors[name], part if isinstance(part, Index) else None)


def _same_names(state: Tensors, plan: Plan) -> None:
    if differing := sorted(state.keys() ^ plan.keys()):
        raise ValueError(f"the plan and the state differ in {differing[0]!r} ({len(differing)} names in all)")
