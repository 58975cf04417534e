"""Inner layers of an extractor, with an exit after each: the model cut to its first n layers.

A layer is a child with weights of the extractor, where that is a Sequential, or else of the only Sequential in it (a
transformer's blocks), together with the norms, activations and poolings that follow it. Letters: B batch, D feature_dim.
"""

from __future__ import annotations

from copy import copy, deepcopy
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from models import SplitModel

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)
_SIDE = 2  # an exit reads feature maps pooled to 2 x 2


class Exits(nn.Module):
    """One exit for each inner layer of a model: its output -> a representation (B, D) that the model's own head reads.

    Where the rest of the extractor brings any layer's output to D by itself (a transformer's norm and pooling) the exit
    is no more than that; elsewhere it pools feature maps and has a Linear of its own. Layers count from 1.

    Attributes:
        num_layers: N of the model, the last included; there are exits after 1 to N - 1.
    """

    def __init__(self, model: SplitModel) -> None:
        super().__init__()
        ends = _ends(_chain(model.extractor)[1])
        if len(ends) < 2:
            raise ValueError(
                f"the model's extractor ({type(model.extractor).__name__}) has no inner layers; set fedmuscle.inner-layers to false"
            )
        self.num_layers = len(ends)
        self.exits = nn.ModuleList(_exit(model, layer) for layer in range(1, len(ends)))

    def forward(self, model: SplitModel, layer: int, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the representations (B, D) after `layer` and after the last layer, by one pass where the extractor is a Sequential."""
        extractor = model.extractor
        if isinstance(extractor, nn.Sequential):
            end = _ends(extractor)[layer - 1]
            inner = extractor[:end](batch)
            return self.exits[layer - 1](inner), extractor[end:](inner)
        return self.exits[layer - 1](shallow(extractor, layer)(batch)), model.features(batch)

    def cut(self, model: SplitModel, layer: int) -> SplitModel:
        """Return a copy of `model` that ends after `layer`, with its exit and the model's head."""
        extractor = nn.Sequential(deepcopy(shallow(model.extractor, layer)), deepcopy(self.exits[layer - 1]))
        sizes = {"feature_dim": model.feature_dim, "num_outputs": model.num_outputs}
        return SplitModel(extractor, deepcopy(model.head), input_shape=model.input_shape, **sizes)


def shallow(extractor: nn.Module, layer: int) -> nn.Module:
    """Return the extractor without what comes after `layer` (from 1); it shares its parameters with `extractor`.

    Of an extractor that is no Sequential only the later ones of its blocks are left out: their outputs have the shape of their inputs.
    """
    path, chain = _chain(extractor)
    cut = chain[: _ends(chain)[layer - 1]]
    if not path:
        return cut
    twin = copy(extractor)
    twin._modules = {**extractor._modules, path: cut}  # the copy is shallow, and would change the extractor
    return twin


def _chain(extractor: nn.Module) -> tuple[str, nn.Sequential]:
    """Return the Sequential whose children are the layers, and its name in the extractor; "" for the extractor itself."""
    if isinstance(extractor, nn.Sequential):
        return "", extractor
    inside = [(name, child) for name, child in extractor.named_children() if isinstance(child, nn.Sequential) and _ends(child)]
    return inside[0] if len(inside) == 1 else ("", nn.Sequential())


def _ends(chain: nn.Sequential) -> list[int]:
    """Return, for each layer of the chain, the number of children up to its end."""
    starts = [index for index, child in enumerate(chain) if not isinstance(child, _NORMS) and any(True for _ in child.parameters())]
    return [after for _, after in pairwise([*starts, len(chain)])]


def _exit(model: SplitModel, layer: int) -> nn.Module:
    """Return the layer's exit, its Linear with torch's random start."""
    extractor, example = model.extractor, next(model.parameters())
    was_training = extractor.training
    extractor.eval()
    with torch.no_grad():
        shape = shallow(extractor, layer)(torch.zeros(1, *model.input_shape, device=example.device, dtype=example.dtype)).shape[1:]
    extractor.train(was_training)
    if tuple(shape) == (model.feature_dim,) and not isinstance(extractor, nn.Sequential):
        return nn.Identity()
    if len(shape) == 3:
        steps: list[nn.Module] = [nn.AdaptiveAvgPool2d(_SIDE), nn.Flatten(), nn.Linear(shape[0] * _SIDE**2, model.feature_dim)]
    elif len(shape) == 1:
        steps = [nn.Linear(shape[0], model.feature_dim)]
    else:
        raise ValueError(f"layer {layer} of the model gives {tuple(shape)} a sample; exits are for feature maps (C, H, W) and vectors")
    return nn.Sequential(*steps).to(example.device)
