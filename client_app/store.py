"""A node's private state on its own disk: safetensors files with a small JSON header, written atomically.

One file a version: `<state-dir>/<experiment>/<lineage>/<run>/<node>/round-000012.safetensors`. A run that is
resumed repeats the rounds after its checkpoint, so versions back to the newest one the checkpoint covers are
kept: the repeated round starts from exactly the state from which it started before. `lineage` is drawn when a
run starts afresh, so that two runs under one experiment name never mix.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from client_app.profile import safe_name

_FILE = re.compile(r"^round-(\d{6,})\.safetensors$")
_HEADER = "heterofleet"
_FORMAT = 1


class StoreError(RuntimeError):
    """Private state cannot be read or written as asked; the message names the file and the difference."""


@dataclass(frozen=True)
class PrivateStore:
    """Versions of one node's private state.

    Attributes:
        folder: this node's own folder; made when first written, readable by its owner only.
        durable: flush to the device before a version counts (real nodes: a power cut must not lose it).
    """

    folder: Path
    durable: bool = True

    @classmethod
    def of(cls, state_dir: str | Path, experiment: str, lineage: str, run: str, node: str, *, durable: bool = True) -> PrivateStore:
        """Return the store of `node` for one run of one experiment."""
        parts = [safe_name(part) for part in (experiment, lineage, run, node)]
        return cls(Path(state_dir).expanduser().joinpath(*parts), durable)

    def rounds(self) -> list[int]:
        """Return the rounds after which a version was saved, ascending."""
        try:
            found = [_FILE.match(name) for name in os.listdir(self.folder)]
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in found if match)

    def load(self, like: Mapping[str, torch.Tensor], *, up_to: int) -> dict[str, torch.Tensor] | None:
        """Return the newest version saved after a round <= `up_to`, or None where there is none.

        Raises:
            StoreError: names, shapes or dtypes differ from `like`, or the file is damaged.
        """
        usable = [r for r in self.rounds() if r <= up_to]
        if not usable:
            return None
        path = self._path(usable[-1])
        try:
            with safe_open(path, "pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise StoreError(f"private state {path} cannot be read ({error}); move the file away to start this node afresh") from error
        differences = _differences(state, like)
        if differences:
            raise StoreError(
                f"private state {path} does not fit this node's model: {'; '.join(differences)}. "
                "Use another experiment name, or the model the state was made with"
            )
        return state

    def header(self, server_round: int) -> dict[str, object]:
        """Return the JSON header of the version saved after `server_round`."""
        with safe_open(self._path(server_round), "pt") as file:
            header: dict[str, object] = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
        return header

    def save(self, state: Mapping[str, torch.Tensor], *, server_round: int, header: Mapping[str, object] | None = None) -> Path:
        """Write `state` as the version of `server_round` and return its path; versions of later rounds are removed.

        They belong to a future that was given up when the run was resumed from an earlier round.

        Raises:
            StoreError: a value is not finite (the earlier version stays), or the disk refuses.
        """
        for name, tensor in state.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise StoreError(
                    f"private tensor {name} is not finite after round {server_round}: training diverged, the earlier state is kept"
                )
        path = self._path(server_round)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        text = json.dumps({"format": _FORMAT, "round": server_round, **(header or {})})
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_file({n: t.detach().cpu().contiguous() for n, t in state.items()}, temporary, metadata={_HEADER: text})
            os.chmod(temporary, 0o600)
            if self.durable:
                _flush(temporary)
            os.replace(temporary, path)
            if self.durable:
                _flush(self.folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"private state cannot be written to {self.folder}: {error}; set state-dir to a writable folder") from error
        for later in self.rounds():
            if later > server_round:
                self._path(later).unlink(missing_ok=True)
        return path

    def prune(self, *, checkpoint_round: int) -> None:
        """Remove the versions that a run resumed from `checkpoint_round` would not read."""
        covered = [r for r in self.rounds() if r <= checkpoint_round]
        for old in covered[:-1]:
            self._path(old).unlink(missing_ok=True)

    def _path(self, server_round: int) -> Path:
        return self.folder / f"round-{server_round:06d}.safetensors"


def _differences(state: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> list[str]:
    found = [f"{name} is unexpected" for name in sorted(state.keys() - like.keys())[:3]]
    found += [f"{name} is missing" for name in sorted(like.keys() - state.keys())[:3]]
    for name in sorted(like.keys() & state.keys()):
        have, want = state[name], like[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            found.append(f"{name} is {tuple(have.shape)} {have.dtype}, the model has {tuple(want.shape)} {want.dtype}")
    return found[:6] + ([f"and {len(found) - 6} more"] if len(found) > 6 else [])


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
