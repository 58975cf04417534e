"""Names -> models. A builder is a function under `@register`; its name is the config string."""

from __future__ import annotations

from collections.abc import Callable

from models.split import SplitModel
from server_app.settings import nearest

Shape = tuple[int, ...]
Builder = Callable[[Shape, int, int | None], SplitModel]

_BUILDERS: dict[str, Builder] = {}


class ModelError(ValueError):
    """A model cannot be built; the message names the model, the wrong value or shape, and what to use instead."""


def register(builder: Builder) -> Builder:
    """Make `builder(input_shape, num_outputs, feature_dim) -> SplitModel` known under its own name.

    `feature_dim` None means the architecture's own width. The builder may draw from torch's random
    numbers for the start values, but names, shapes and dtypes must follow from its arguments alone.

    Raises:
        ModelError: the name is taken.
    """
    name = builder.__name__
    if name in _BUILDERS:
        raise ModelError(f"a model named {name!r} is registered twice, the second time in {builder.__module__}")
    _BUILDERS[name] = builder
    return builder


def names() -> tuple[str, ...]:
    """Return the registered names, in the order of registration."""
    return tuple(_BUILDERS)


def build(name: str, *, input_shape: Shape, num_outputs: int, feature_dim: int | None = None) -> SplitModel:
    """Return a new model; the same arguments always give the same tensor names, shapes and dtypes.

    Args:
        name: a registered name, `torchvision:<name>`, or `module:function` for a builder of the user's own.
        input_shape: of one sample, without the batch: (C, H, W) for images, (F,) for vectors.
        num_outputs: width of the output.
        feature_dim: width of the representation; None: the architecture's own.

    Raises:
        ModelError: unknown name, or a shape or width with which the model cannot work.
    """
    input_shape = tuple(input_shape)
    if not input_shape or min(input_shape) < 1:
        raise ModelError(f"model {name!r}: input_shape = {input_shape} needs at least one axis, all of length 1 or more")
    if num_outputs < 1:
        raise ModelError(f"model {name!r}: num_outputs = {num_outputs} must be 1 or more")
    if feature_dim is not None and feature_dim < 1:
        raise ModelError(f"model {name!r}: feature_dim = {feature_dim} must be 1 or more")
    return _builder(name)(input_shape, num_outputs, feature_dim)


def _builder(name: str) -> Builder:
    if name in _BUILDERS:
        return _BUILDERS[name]
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        known = ", ".join(names())
        raise ModelError(
            f"model {name!r} is unknown{nearest(name, names())}; choose one of {known}, or torchvision:<name>, or module:function"
        )
    from models import foreign

    def builder(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
        make = foreign.from_torchvision if module == "torchvision" else foreign.from_user
        return make(name, input_shape, num_outputs, feature_dim)

    return builder
