"""A node's models as single files that load and predict with torch alone."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from strategies.trainer import Trainer


class Deployable(nn.Module):
    """Raw pictures in, class scores out: the task's normalisation and the model in one graph."""

    def __init__(self, model: nn.Module, trainer: Trainer) -> None:
        super().__init__()
        self.model = model
        self._prepare = trainer.context.task.prepare

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        """(B, *input_shape) as the task's samples are (uint8 pictures, float32 vectors) -> (B, C)."""
        return self.model(self._prepare(raw, False, None))


def export_models(
    trainer: Trainer,
    folder: Path,
    *,
    names: tuple[str, ...],
    metrics: Mapping[str, float],
    others: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Path]:
    """Write `<name>.pt2` (torch.export) and `<name>.json` (a card) for each of `names`; return the .pt2 paths.

    Use one with `torch.export.load(path).module()(batch)`, batch of any size in the samples' raw dtype.

    Args:
        trainer: holds the trained models.
        folder: made where it is missing; files are replaced atomically.
        names: which of `trainer.exportable()`.
        metrics: of the model the node uses, the first of `exportable()`, for its card.
        others: of the other models by name, for theirs.

    Raises:
        ValueError: an unknown name.
    """
    available = trainer.exportable()
    if unknown := [n for n in names if n not in available]:
        raise ValueError(f"cannot export {', '.join(unknown)}; this method has {', '.join(available)}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in names:
        path = folder / f"{name}.pt2"
        program = _program(available[name], trainer)
        temporary = path.with_name(f".{os.getpid()}.{path.name}")
        torch.export.save(program, temporary)
        temporary.chmod(0o600)  # it holds the node's own model
        os.replace(temporary, path)
        measured = metrics if name == next(iter(available)) else (others or {}).get(name, {})
        card = _card(name, available[name], trainer, dict(measured))
        path.with_suffix(".json").write_text(json.dumps(card, indent=1), encoding="utf-8")
        paths.append(path)
    return paths


def _program(model: nn.Module, trainer: Trainer) -> torch.export.ExportedProgram:
    task = trainer.context.task
    sample = torch.zeros((2, *task.input_shape), dtype=task.train.inputs.dtype)
    was_training = model.training
    module = Deployable(model, trainer).to("cpu").eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, (sample,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=65536)},))
    model.to(trainer.context.device).train(was_training)
    return program


def _card(name: str, model: nn.Module, trainer: Trainer, metrics: dict[str, float]) -> dict[str, object]:
    context = trainer.context
    return {
        "model": name,
        "architecture": trainer.architecture(name),
        "node": context.profile.node_name,
        "strategy": context.settings.strategy,
        "input": {"shape": ["batch", *context.task.input_shape], "dtype": str(context.task.train.inputs.dtype).removeprefix("torch.")},
        "outputs": list(context.task.class_names) or context.task.num_outputs,
        "parameters": sum(p.numel() for p in model.parameters()),
        "metrics": metrics,
        "torch": torch.__version__,
        "load": "torch.export.load(path).module()(batch)",
    }
