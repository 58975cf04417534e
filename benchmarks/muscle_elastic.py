"""FedMuscle's elastic models: test accuracy and parameters of every size, and what being elastic costs at full size.

    python benchmarks/muscle_elastic.py [--data SOURCE] [--public SOURCE] [--seeds 1 2 3] [--set train.local-epochs=2 ...]

Four nodes share the source evenly; the models are cnn5 and mlp. Three runs a seed from the same starts, splits and orders: as it
is, with `prefixes` 8, 32 and 64, and with these and `inner-layers`. Accuracies are those on the cards of the exported files, the
mean over nodes of one model and over seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from server_app.inprocess import run
from server_app.overrides import parse_override, read_defaults

NODES = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefixes": {"fedmuscle.prefixes": "8,32,64"},
    "prefixes, inner layers": {"fedmuscle.prefixes": "8,32,64", "fedmuscle.inner-layers": True},
}
Sizes = dict[tuple[str, str], list[tuple[float, int]]]  # (model, size) -> (accuracy, parameters) of each node and seed


def cards(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cards of all models that a run exports, with the node's model under `kind`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        run(config, NODES, out)
        kinds = config["fleet.models"].split(",")
        paths = json.loads((out / "exports.json").read_text(encoding="utf-8"))
        if len(paths) < NODES:
            raise RuntimeError(f"{NODES - len(paths)} nodes exported nothing; see the failures in {out / 'metrics.jsonl'}")
        return [
            {**json.loads(card.read_text(encoding="utf-8")), "kind": kinds[int(node.rsplit("-", 1)[1]) % len(kinds)]}
            for node, path in sorted(paths.items())
            for card in sorted(Path(path).parent.glob("*.json"))
        ]


def table(found: dict[str, Sizes]) -> None:
    """Print a line for each model and size, and the difference of the full size to that of the plain run."""
    print(f"\n{'run':24}{'model':8}{'size':20}{'parameters':>12}{'accuracy %':>12}{'at full size':>14}")
    for variant, sizes in found.items():
        for (kind, size), values in sorted(sizes.items(), key=lambda item: (item[0][0], -item[1][0][1])):
            accuracy = 100 * statistics.fmean(a for a, _ in values)
            against = accuracy - 100 * statistics.fmean(a for a, _ in found["plain"][kind, "model"])
            cost = f"{against:+14.1f}" if size == "model" and variant != "plain" else ""
            print(f"{variant:24}{kind:8}{size:20}{values[0][1]:12,}{accuracy:12.1f}{cost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="embedded", help="as data.source")
    parser.add_argument("--public", default="embedded", help="the public set, as data.source; its labels are not used")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    defaults = read_defaults()
    base = {"strategy": "fedmuscle", "alone": False, "export": "all", "eval-every": 0, "data.partitioner": "iid", "data.shared-test": 0}
    base |= {
        "num-rounds": options.rounds,
        "data.source": options.data,
        "fedmuscle.public-source": options.public,
        "fleet.models": "cnn5,mlp",
    }
    base |= dict(parse_override(text, defaults) for text in options.set)
    found: dict[str, Sizes] = {name: defaultdict(list) for name in VARIANTS}
    for seed in options.seeds:
        for name, changes in VARIANTS.items():
            for card in cards({**defaults, **base, **changes, "seed": seed}):
                found[name][card["kind"], card["model"]].append((card["metrics"]["accuracy"], card["parameters"]))
            print(f"{name}, seed {seed}: done", flush=True)
    table(found)


if __name__ == "__main__":
    main()
