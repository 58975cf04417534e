"""A small FedMuscle federation: tiny pictures, a public set of the same kind, the real halves on the in-process Grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import strategies
import tasks
from client_app.profile import NodeProfile
from strategies.fedmuscle.trainer import NodeTrainer
from strategies.trainer import NodeContext
from tests.fleet_fixture import config, pictures

STEPS, BATCH, DIM = 3, 8, 16


def muscle(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a run config for FedMuscle; `changes` as for `fleet_fixture.config`."""
    public = tmp_path / "public"
    if not public.exists():
        pictures(public, count=40, seed=9)
    base = {
        "strategy": "fedmuscle",
        "fedmuscle__public_source": str(public),
        "fedmuscle__steps": STEPS,
        "fedmuscle__public_batch": BATCH,
        "fedmuscle__dim": DIM,
        "fedmuscle__contrastive_rate": 0.001,
    }
    return config(tmp_path, **{**base, **changes})


def states(out: Path) -> dict[str, dict[str, Any]]:
    """Return every private state that a run left, by node and file name."""
    return {f"{p.parent.name}/{p.stem}": load_file(p) for p in sorted((out / "state").rglob("fedmuscle/**/*.safetensors"))}


def trainer(tmp_path: Path, monkeypatch: Any, **changes: Any) -> NodeTrainer:
    """Return the node half of partition 0 alone; `changes` as for `muscle`."""
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "home"))
    settings, own = strategies.settings_of(muscle(tmp_path, **changes))
    profile = NodeProfile.of({"partition-id": 0, "num-partitions": 3}, settings)
    return NodeTrainer(NodeContext(profile, settings, own, tasks.load(profile, settings), torch.device("cpu"), 5))
