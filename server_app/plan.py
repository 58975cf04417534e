"""The options of `heterofleet simulate` -> what to launch, checked before anything starts."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from server_app.launch import Launch
from server_app.overrides import RunConfig, Scalar, merged
from server_app.settings import SettingsError


def plan(
    *,
    nodes: int | None,
    strategy: str | None,
    config: list[str],
    cpus: int,
    gpus: float,
    workers: int,
    out_dir: Path | None,
    experiment: str | None,
    resume: Path | None,
    alone: bool | None,
) -> Launch:
    """Return what to launch, after every check that needs no data.

    Raises:
        SettingsError: naming the option or key.
    """
    if resume and out_dir and resume.expanduser().resolve() != out_dir.expanduser().resolve():
        raise SettingsError(f"--resume {resume} goes on in that folder; leave --out away")
    folder = (resume or out_dir or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")).expanduser().resolve()
    base, before = _earlier(folder) if resume else ({}, {})
    if not resume and (folder / "run.json").exists():
        raise SettingsError(f"--out {folder} already holds a run; go on with it by --resume {folder}, or name another folder")
    options = {"strategy": strategy, "experiment": experiment, "alone": alone, "resume": str(folder) if resume else None}
    extra: dict[str, Scalar] = {key: value for key, value in options.items() if value is not None}
    checked = merged(config, {**extra, "out-dir": str(folder)}, base)
    count = nodes or int(before.get("nodes", 10))
    if count != int(before.get("nodes", count)):
        raise SettingsError(f"--nodes {count}, but the run had {before['nodes']}: another number splits the data anew; leave --nodes out")
    _check_resources(checked, count, cpus, gpus, workers)
    return Launch(out_dir=folder, run_config=checked.flat, nodes=count, cpus=cpus, gpus=gpus, workers=workers)


def _earlier(folder: Path) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """Return the run config and the launch of an earlier run."""
    try:
        base = json.loads((folder / "run.json").read_text(encoding="utf-8"))["run_config"]
    except (OSError, ValueError, KeyError):
        raise SettingsError(f"--resume {folder}: no readable run.json in it; name the folder of an earlier run") from None
    with contextlib.suppress(OSError, ValueError):
        return base, json.loads((folder / "launch.json").read_text(encoding="utf-8"))
    return base, {}


def _check_resources(checked: RunConfig, nodes: int, cpus: int, gpus: float, workers: int) -> None:
    fleet = checked.settings.fleet
    if fleet.min_nodes > nodes:
        raise SettingsError(
            f"fleet.min-nodes = {fleet.min_nodes}, but --nodes {nodes}: round 1 would never begin; lower one or raise the other"
        )
    if workers and workers < cpus:
        raise SettingsError(f"--workers {workers} is less than --cpus {cpus} of a single node")
    if gpus > 1 and not gpus.is_integer():
        raise SettingsError(f"--gpus {gpus}: a share below 1, or a whole number of GPUs")
    if gpus:
        import torch

        if not torch.cuda.is_available():
            raise SettingsError(f"--gpus {gpus:g}, but torch finds no GPU here; `heterofleet doctor` tells more")
