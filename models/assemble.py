"""Parts common to many architectures: the split into extractor and head, a representation of a wanted width."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from models.registry import ModelError, Shape
from models.split import SplitModel


def image_shape(name: str, input_shape: Shape, *, smallest: int = 1) -> tuple[int, int, int]:
    """Return (C, H, W), or say why `input_shape` does not do.

    Args:
        name: the model, for the message.
        input_shape: of one sample.
        smallest: pixels that height and width must have at least.

    Raises:
        ModelError: not an image, or too small.
    """
    if len(input_shape) != 3:
        raise ModelError(f"model {name!r} takes images (channels, height, width), not samples of shape {input_shape}; 'mlp' takes any")
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ModelError(f"model {name!r} cannot take images of shape {input_shape}; the smallest is {(channels, smallest, smallest)}")
    return channels, height, width


def assemble(
    extractor: nn.Module, width: int, input_shape: Shape, num_outputs: int, feature_dim: int | None, *, head: nn.Linear | None = None
) -> SplitModel:
    """Return extractor + head; a Linear and a ReLU widen or narrow the representation where another width is wanted.

    Args:
        extractor: (B, *input_shape) -> (B, width).
        width: of what the extractor gives.
        input_shape: of one sample.
        num_outputs: width of the output.
        feature_dim: wanted width of the representation; None: `width`.
        head: Linear to keep where the width stays; None: a new one.
    """
    if feature_dim is not None and feature_dim != width:
        extractor = nn.Sequential(OrderedDict(body=extractor, resize=nn.Linear(width, feature_dim), relu=nn.ReLU()))
        width, head = feature_dim, None
    head = nn.Linear(width, num_outputs) if head is None else head
    return SplitModel(extractor, head, input_shape=input_shape, feature_dim=width, num_outputs=num_outputs)
