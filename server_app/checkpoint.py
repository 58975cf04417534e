"""The server's checkpoints: one safetensors file a round with a JSON header, written atomically, the last two kept."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from server_app.resume import CheckpointError

__all__ = ["CheckpointError", "Checkpoints", "write_tensors", "write_text"]

_HEADER = "heterofleet"
_KEPT = 2


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of one strategy's run in `folder`."""

    folder: Path

    def save(self, state: dict[str, torch.Tensor], *, server_round: int, header: dict[str, Any]) -> Path:
        """Write the state after `server_round` and return its path; the newest two rounds are kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(server_round)
        write_tensors(path, state, {_HEADER: json.dumps({**header, "round": server_round})})
        for old in self.rounds()[:-_KEPT]:
            self._path(old).unlink(missing_ok=True)
        return path

    def rounds(self) -> list[int]:
        """Return the rounds that can be resumed from, ascending."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors"))

    def load(self) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return (round, state, header) of the newest checkpoint, or None where there is none.

        Raises:
            CheckpointError: no kept file can be read.
        """
        reason = ""
        for server_round in reversed(self.rounds()):
            path = self._path(server_round)
            try:
                with safe_open(path, "pt") as file:
                    header = json.loads((file.metadata() or {})[_HEADER])
                    return server_round, {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                reason = f"checkpoint {path} cannot be read: {error}"
        if reason:
            raise CheckpointError(reason)
        return None

    def _path(self, server_round: int) -> Path:
        return self.folder / f"round-{server_round:06d}.safetensors"


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to `path` atomically and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, temporary, metadata=metadata)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
