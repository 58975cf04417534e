"""What edge_node.py and slow_link.py share: pictures for nodes, and a run of a deployment on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from server_app.deploy import Deployment
from server_app.launch import Follower, Launch
from server_app.overrides import Scalar, merged
from server_app.settings import DataSettings
from tasks.sources import open_source


def digit_folders(folders: list[Path], samples: int) -> None:
    """Write `samples` of the embedded digits into each of `folders`, other ones into each, as folders of classes."""
    source = open_source("embedded", DataSettings())
    for index, folder in enumerate(folders):
        for position in range(index * samples, (index + 1) * samples):
            place = folder / str(int(source.labels[position]))
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(source.inputs[position][0])).save(place / f"{position:05}.png")
        for label in range(10):
            (folder / str(label)).mkdir(exist_ok=True)


def run_on(made: Deployment, out_dir: Path, settings: Mapping[str, Scalar]) -> list[dict[str, Any]]:
    """Run the app on the nodes of a deployment and return the rows of its metrics.jsonl; raises LaunchError if it does not complete."""
    fixed: dict[str, Scalar] = {"alone": False, "data.num-classes": 10, "data.shared-test": 0, "fleet.quorum": 1.0}
    checked = merged([], {**fixed, **settings, "out-dir": str(out_dir)})
    out_dir.mkdir(parents=True, exist_ok=True)
    Follower(Launch(out_dir=out_dir, run_config=checked.flat, nodes=0), made, lambda status: None).follow()
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def of_kind(rows: list[dict[str, Any]], kind: str, node: str = "") -> list[dict[str, Any]]:
    """Return the rows of one kind (and one node)."""
    return [row for row in rows if row["kind"] == kind and node in ("", row.get("node"))]
