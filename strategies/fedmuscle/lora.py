"""LoRA (Hu et al., 2022) by peft: of the named modules of an extractor only two narrow factors are trained.

W x + (alpha / r) B A x, A (r, in) random and B (out, r) zero at the start, alpha = 2 r; W and everything else of the
extractor stays as it was, for models that come with pretrained weights. peft is imported only where it is used.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from models import SplitModel

_ADAPTABLE = (nn.Linear, nn.Conv2d)


def adapted_modules(extractor: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Return the paths of the modules that one of `names` means: the whole path, or its last parts (`attn.q` for `blocks.0.attn.q`).

    Raises:
        ValueError: a module is meant that is neither a Linear nor a 1x1 convolution.
    """
    found = []
    for path, module in extractor.named_modules():
        if not any(path == name or path.endswith(f".{name}") for name in names):
            continue
        if not isinstance(module, _ADAPTABLE) or (isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)):
            raise ValueError(
                f"fedmuscle.lora-modules names {path}, a {_kind(module)}; LoRA is for Linear and 1x1 Conv2d, here: {_offered(extractor)}"
            )
        found.append(path)
    return found


def add_lora(model: SplitModel, rank: int, names: tuple[str, ...]) -> int:
    """Put LoRA factors into the extractor of `model` and freeze the rest of it; return how many modules got them.

    0 where none has one of the names: the model is left as it is, and trained whole. The random start is torch's.

    Raises:
        ValueError: peft is not installed, or a named module cannot be adapted.
    """
    paths = adapted_modules(model.extractor, names)
    if not paths:
        return 0
    peft = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=paths)
    for parameter in model.extractor.parameters():
        parameter.requires_grad_(False)
    peft.inject_adapter_in_model(config, model.extractor)
    return len(paths)


def folded(model: SplitModel) -> SplitModel:
    """Return a copy of `model` with the factors added into the weights: without peft, and with the same outputs."""
    copy = deepcopy(model)
    for path, module in list(copy.extractor.named_modules()):
        if hasattr(module, "lora_A"):
            module.merge(safe_merge=True)  # refuses a result that is not finite
            copy.extractor.set_submodule(path, module.get_base_layer())
    return copy


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"fedmuscle.lora-rank needs the package peft on this node ({error}); type: pip install peft, or set it to 0"
        ) from None
    return peft


def _offered(extractor: nn.Module) -> str:
    paths = [
        path
        for path, module in extractor.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))
    ]
    return ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "") or "none"


def _kind(module: nn.Module) -> str:
    size = f" of kernel {module.kernel_size}" if isinstance(module, nn.Conv2d) else ""
    return f"{type(module).__name__}{size}"
