"""A small federation for tests: synthetic pictures, tiny models, the real halves on the in-process Grid."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np

import heterofleet_app
from server_app.app import run_all
from tests.local_grid import LocalGrid

ROOT = Path(__file__).resolve().parent.parent


def defaults() -> dict[str, Any]:
    """Return the run config as Flower would build it from pyproject.toml: flat keys."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def pictures(folder: Path, count: int = 120, *, classes: int = 3, seed: int = 0, split: str = "train") -> Path:
    """Write `count` 8x8 grey pictures of `classes` separable classes as class folders, and return the folder."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    for index in range(count):
        label = index % classes
        values = rng.integers(0, 90, (8, 8), dtype=np.uint8)
        values[:, label * 2 : label * 2 + 3] += 120
        target = folder / split / f"class-{label}"
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(target / f"{index:04d}.png")
    return folder


def config(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return a run config for the synthetic pictures; `changes` use __ for a dot and _ for a dash."""
    source = tmp_path / "pictures"
    if not source.exists():
        pictures(source)
    base = {
        **defaults(),
        "data.source": str(source),
        "data.partitioner": "iid",
        "data.min-samples": 1,
        "data.shared-test": 0,
        "fleet.models": "mlp",
        "fleet.join-timeout": 5.0,
        "fleet.round-timeout": 300.0,
        "fedavg.model": "mlp",
        "fedmrl.small-model": "mlp",
        "fedmrl.shared-dim": 8,
        "num-rounds": 2,
        "alone": False,
        "train.batch-size": 8,
    }
    return base | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}


def grid(run_config: dict[str, Any], nodes: int = 3) -> LocalGrid:
    """Return a Grid of `nodes` simulated nodes."""
    return LocalGrid(heterofleet_app.client, [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)], run_config)


def run(run_config: dict[str, Any], out: Path, the_grid: LocalGrid | None = None, nodes: int = 3) -> LocalGrid:
    """Run what the ServerApp would run, into `out`, and return the Grid with everything that was sent."""
    the_grid = the_grid or grid(run_config, nodes)
    out.mkdir(parents=True, exist_ok=True)
    run_all(the_grid, run_config, out.resolve(), 7)
    return the_grid


def rows(out: Path, kind: str, run_name: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl of one kind (and one strategy)."""
    import json

    listed = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [r for r in listed if r["kind"] == kind and run_name in (None, r["run"])]
