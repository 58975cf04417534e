"""Models from elsewhere: torchvision's classifiers and builders of the user's own, cut into extractor and head."""

from __future__ import annotations

import importlib
import traceback
from bisect import bisect_left
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from models.assemble import assemble, image_shape
from models.registry import ModelError, Shape
from models.split import SplitModel
from server_app.settings import nearest

_LARGEST_TRIED = 320  # pixels a side, when looking for the smallest image that works
_SIZED = ("vit_", "maxvit_")  # built for one size of image, and not for every larger one
_SHAPE_ERRORS = (RuntimeError, ValueError, AssertionError, ZeroDivisionError, IndexError)


def from_torchvision(name: str, input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """Return `torchvision:<name>` without pretrained weights; the last Linear is the head.

    torchvision's own dropout stays, and draws from torch's global random numbers.

    Raises:
        ModelError: torchvision has no such classifier, or it cannot take the shape; names the smallest that works.
    """
    from torchvision import models as zoo

    kind = name.partition(":")[2]
    known = zoo.list_models(module=zoo)
    if kind not in known:
        raise ModelError(f"torchvision has no classifier {kind!r}{nearest(kind, known)}; for example torchvision:resnet18")
    shape = image_shape(name, input_shape)
    problem = _torchvision_problem(kind, shape)
    if problem:
        raise ModelError(f"model {name!r} cannot take images of shape {input_shape}: {problem}{_working_shapes(kind, shape)}")
    extractor, head = _cut(_torchvision_net(kind, shape, num_outputs))
    if not isinstance(head, nn.Linear):  # SqueezeNet classifies with a 1x1 convolution before pooling
        head = nn.Linear(head.in_channels, num_outputs)
    return assemble(extractor, head.in_features, input_shape, num_outputs, feature_dim, head=head)


def _torchvision_net(kind: str, shape: tuple[int, int, int], num_outputs: int) -> nn.Module:
    from torchvision import models as zoo

    channels, height, width = shape
    options: dict[str, Any] = {}
    if kind in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}  # auxiliary outputs would make training return a tuple
    elif kind.startswith("vit_"):
        if height != width:
            raise ValueError("it takes square images only")
        options = {"image_size": height}
    elif kind == "maxvit_t":
        options = {"input_size": (height, width)}
    net = zoo.get_model(kind, weights=None, num_classes=num_outputs, **options)
    if channels != 3:
        path, conv = next((path, part) for path, part in net.named_modules() if isinstance(part, nn.Conv2d))
        options = {"kernel_size": conv.kernel_size, "stride": conv.stride, "padding": conv.padding, "bias": conv.bias is not None}
        net.set_submodule(path, nn.Conv2d(channels, conv.out_channels, **options))
    return net


@lru_cache(maxsize=1024)
def _torchvision_problem(kind: str, shape: tuple[int, int, int]) -> str:
    """Return why the net cannot take `shape`, or an empty string; found on the meta device, without arithmetic."""
    try:
        net = _meta_net(kind, shape if kind.startswith(_SIZED) else (shape[0], 224, 224))
        with torch.no_grad():
            net(torch.empty(2, *shape, device="meta"))
    except _SHAPE_ERRORS as error:
        return str(error).splitlines()[0].rstrip(".!") if str(error) else type(error).__name__
    return ""


@lru_cache(maxsize=8)
def _meta_net(kind: str, shape: tuple[int, int, int]) -> nn.Module:
    # RegNet computes its widths with tensors, which the meta device cannot do.
    device = "cpu" if kind.startswith("regnet_") else "meta"
    with torch.random.fork_rng(devices=[]), torch.device(device):
        return _torchvision_net(kind, shape, 2).to("meta").eval()


def _working_shapes(kind: str, shape: tuple[int, int, int]) -> str:
    channels, longest = shape[0], max(shape[1:])

    def works(side: int) -> bool:
        return not _torchvision_problem(kind, (channels, side, side))

    def first_from(side: int) -> int | None:
        sides = range(side, _LARGEST_TRIED + 1)
        if kind.startswith(_SIZED):
            return next((side for side in sides if works(side)), None)
        found = bisect_left(sides, True, key=works)
        return sides[found] if found < len(sides) else None

    smallest = first_from(1)
    if smallest is None:
        return f"; no square image of up to {_LARGEST_TRIED} pixels a side works"
    text = f"; the smallest is {(channels, smallest, smallest)}"
    larger = first_from(longest) if longest > smallest else None
    return text + (f", the next from yours {(channels, larger, larger)}" if larger else "")


def from_user(name: str, input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """Return what `module:function` builds when called with (input_shape, num_outputs, feature_dim).

    The function returns a SplitModel, or any module whose last Linear gives the outputs and becomes the head.

    Raises:
        ModelError: nothing to call, or the result is no model for these shapes.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelError(
            f"model {name!r}: {module_name!r} cannot be imported here ({error}); install it on this machine, or choose another model"
        ) from error
    except Exception as error:  # whatever the user's own code raises is told with its place
        raise ModelError(f"model {name!r}: importing {module_name!r} failed: {_told(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"model {name!r}: {module_name} has no function {function_name!r}{nearest(function_name, dir(module))}")
    try:
        built = function(input_shape, num_outputs, feature_dim)
    except Exception as error:  # as above
        raise ModelError(f"model {name!r} failed: {_told(error)}") from error
    if not isinstance(built, nn.Module):
        raise ModelError(f"model {name!r} returned {type(built).__name__}; return a SplitModel or a torch.nn.Module")
    if isinstance(built, SplitModel):
        if feature_dim not in (None, built.feature_dim):
            raise ModelError(f"model {name!r} has feature_dim {built.feature_dim}, but was asked for {feature_dim}")
        _check_shapes(name, built, input_shape, num_outputs)
        return built
    return _split_user_net(name, built, input_shape, num_outputs, feature_dim)


def _told(error: Exception) -> str:
    """Return the error with the last place in it that is no library's: where the user's own code is at fault."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def _split_user_net(name: str, net: nn.Module, input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    probe = _probe(input_shape)
    whole = _run(name, net, probe, input_shape)
    extractor, head = _cut(net)
    if not isinstance(head, nn.Linear) or head.out_features != num_outputs:
        raise ModelError(f"model {name!r} must end in a Linear with {num_outputs} outputs, but the layer registered last is {head}")
    model = assemble(extractor, head.in_features, input_shape, num_outputs, None, head=head)
    _check_shapes(name, model, input_shape, num_outputs)
    # Under torch.device("meta") only the layout is wanted, and there are no numbers to compare.
    if not whole.is_meta and not torch.allclose(whole, _run(name, model, probe, input_shape), rtol=1e-4, atol=1e-5):
        raise ModelError(f"model {name!r} does more than its last Linear ({head}) at the end; return a SplitModel to say what is the head")
    return assemble(extractor, head.in_features, input_shape, num_outputs, feature_dim, head=head)


def _check_shapes(name: str, model: SplitModel, input_shape: Shape, num_outputs: int) -> None:
    rep = _run(name, model.extractor, _probe(input_shape), input_shape)
    if rep.shape != (2, model.feature_dim):
        raise ModelError(f"model {name!r}: a batch of 2 gives a representation {tuple(rep.shape)}, not (2, {model.feature_dim})")
    outputs = _run(name, model, _probe(input_shape), input_shape)
    if outputs.shape != (2, num_outputs):
        raise ModelError(f"model {name!r}: a batch of 2 gives outputs {tuple(outputs.shape)}, not (2, {num_outputs})")


def _probe(input_shape: Shape) -> torch.Tensor:
    batch = torch.empty(2, *input_shape)
    return torch.linspace(-1.0, 1.0, batch.numel()).reshape(batch.shape)


def _run(name: str, net: nn.Module, batch: torch.Tensor, input_shape: Shape) -> torch.Tensor:
    try:
        with torch.no_grad():
            outputs = net.eval()(batch)
    except _SHAPE_ERRORS as error:
        raise ModelError(f"model {name!r} cannot take samples of shape {input_shape}: {_told(error)}") from error
    except Exception as error:  # a bug in the user's forward
        raise ModelError(f"model {name!r} failed: {_told(error)}") from error
    finally:
        net.train()
    if not isinstance(outputs, torch.Tensor):
        raise ModelError(f"model {name!r} returns {type(outputs).__name__}, not a tensor")
    return outputs


def _cut(net: nn.Module) -> tuple[nn.Module, Any]:
    """Take the last Linear (else the last convolution) out of `net`; return the rest and it (None: there is none)."""
    layers: list[tuple[str, nn.Module]] = [item for item in net.named_modules() if isinstance(item[1], nn.Linear)]
    layers = layers or [item for item in net.named_modules() if isinstance(item[1], nn.Conv2d)]
    if not layers:
        return net, None
    path, last = layers[-1]
    if not path:
        return nn.Identity(), last
    net.set_submodule(path, nn.Identity())
    return net, last
