"""FedMuscle against local training and other objectives: six nodes, three families of models, three sets of labels.

    python benchmarks/muscle_federation.py --data CIFAR10 CIFAR100 MNIST CIFAR10 CIFAR100 CIFAR10 --public CIFAR100 \
        [--seeds 21 22 23] [--rounds 10] [--only muscle-3 pairwise-3] [--set fedmuscle.steps=32 ...]

Each is a folder or a name, as data.source. Node i reads the i-th source, cyclically; a source is divided among its nodes. A
node has 500 samples for training and 7500 for testing, pictures 16 pixels a side; a round is two epochs and 64 steps on
public batches of which every node sees random views of its own ("plain": the pictures as they are). All variants of a seed
start from the same models, splits and orders. "simclr" takes the same steps on two views of the node's own and exchanges
nothing. Delta is the mean over nodes of the relative gain in test accuracy over `local` of the same seed, in percent; +- is
the standard deviation over seeds. Bytes are those of all messages of a round, as serialised, a node. Seconds are of one
process with one torch thread that shares the machine with the other seeds; rounds without evaluation.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from server_app.inprocess import run
from server_app.overrides import parse_override, read_defaults

NODES = 6
RESNET = "benchmarks.muscle_models:resnet8"
MODELS = f"cnn5,{RESNET},mlp,mlp,cnn5,{RESNET}"
VARIANTS: dict[str, dict[str, Any]] = {
    "local": {"strategy": "local"},
    "simclr": {"fedmuscle.objective": "simclr"},
    "pairwise-3": {"fedmuscle.objective": "pairwise"},
    "gramian-3": {"fedmuscle.objective": "gramian"},
    "muscle-1": {"fedmuscle.peers": 1},
    "muscle-3": {},
    "muscle-5": {"fedmuscle.peers": 5, "fedmuscle.evaluator": "mean-field"},  # 0.7 % off in the gradient; exact is 17 times slower
    "muscle-3 + simclr": {"fedmuscle.simclr-weight": 1.0},
    "muscle-3 step": {"fedmuscle.exchange": "step"},
    "muscle-3 gradient": {"fedmuscle.exchange": "gradient"},
    "muscle-3 int8": {"fedmuscle.transport": "int8"},
    "muscle-3 plain": {"fedmuscle.public-views": "plain"},
}


@dataclass(frozen=True)
class Outcome:
    """What one run came to: test accuracy by node, kilobytes down and up a node and round, seconds a round, last contrastive loss."""

    accuracy: dict[str, float]
    down: float
    up: float
    seconds: float
    loss: float | None


def measure(job: tuple[str, int, dict[str, Any]]) -> tuple[str, int, Outcome]:
    """Run one variant with one seed in this process."""
    name, seed, config = job
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        run({**config, **VARIANTS[name], "seed": seed}, NODES, out)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rounds = [row for row in rows if row["kind"] == "round"]
    if failures := [row for row in rows if row["kind"] == "failure"]:
        raise RuntimeError(f"{name}, seed {seed}: {failures[0]}")
    accuracy = {row["node"]: row["accuracy"] for row in rows if row["kind"] == "node" and row["round"] == rounds[-1]["round"]}
    later = rounds[1:-1] or rounds  # the first fills caches, the last evaluates
    kilobytes = [statistics.fmean(row[key] for row in later) / NODES / 1e3 for key in ("bytes_down", "bytes_up")]
    losses = [row["method"].get("contrastive_loss") for row in rounds]
    return name, seed, Outcome(accuracy, *kilobytes, statistics.median(row["seconds"] for row in later), losses[-1])


def delta(outcome: Outcome, local: Outcome) -> float:
    """Return the mean over nodes of the relative gain over `local`, in percent."""
    return statistics.fmean(100.0 * (outcome.accuracy[node] / alone - 1.0) for node, alone in local.accuracy.items() if alone)


def spread(values: list[float]) -> str:
    """Return mean and standard deviation."""
    return f"{statistics.fmean(values):7.2f} +- {statistics.stdev(values) if len(values) > 1 else 0.0:4.2f}"


def table(found: dict[str, dict[int, Outcome]]) -> None:
    """Print one line a variant, then the accuracy of each node."""
    local = found["local"]
    print(f"\n{'variant':20}{'accuracy %':>16}{'Delta %':>17}{'loss':>8}{'kB down':>10}{'kB up':>9}{'s/round':>9}")
    for name, outcomes in found.items():
        accuracy = spread([100.0 * statistics.fmean(o.accuracy.values()) for o in outcomes.values()])
        gains = spread([delta(o, local[seed]) for seed, o in outcomes.items()])
        loss = "-" if (some := [o.loss for o in outcomes.values() if o.loss is not None]) == [] else f"{statistics.fmean(some):.2f}"
        down, up, seconds = (statistics.fmean(getattr(o, key) for o in outcomes.values()) for key in ("down", "up", "seconds"))
        print(f"{name:20}{accuracy:>16}{gains:>17}{loss:>8}{down:10.1f}{up:9.1f}{seconds:9.2f}")
    nodes = sorted(next(iter(local.values())).accuracy)
    print(f"\n{'accuracy % by node':20}" + "".join(f"{node:>14}" for node in nodes))
    for name, outcomes in found.items():
        print(f"{name:20}" + "".join(f"{100.0 * statistics.fmean(o.accuracy[n] for o in outcomes.values()):14.1f}" for n in nodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", nargs="+", required=True, metavar="SOURCE", help="of nodes 0, 1, ..., cyclically, as data.source")
    parser.add_argument("--public", required=True, help="the public set, as data.source; its labels are not used")
    parser.add_argument("--seeds", nargs="+", type=int, default=[21, 22, 23])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=8000, help="of each node, for training and testing")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS)[1:], default=list(VARIANTS)[1:])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every variant")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    defaults = read_defaults()
    config = {
        **defaults,
        "strategy": "fedmuscle",
        "alone": False,
        "num-rounds": options.rounds,
        "eval-every": 0,
        "data.partitioner": "iid",
        "data.samples-per-node": options.samples,
        "data.shared-test": 0,
        "data.image-size": 16,
        "data.test-fraction": 0.9375,
        "train.local-epochs": 2,
        "fleet.data": ",".join(options.data),
        "fleet.models": options.models,
        "fleet.min-nodes": NODES,
        "fedmuscle.public-source": options.public,
        "fedmuscle.public-views": "random",
        "fedmuscle.steps": 64,
    }
    config |= dict(parse_override(text, defaults) for text in options.set)
    jobs = [(name, seed, config) for seed in options.seeds for name in ["local", *options.only]]
    found: dict[str, dict[int, Outcome]] = {name: {} for name in ["local", *options.only]}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name, seed, outcome in pool.imap_unordered(measure, jobs):
            found[name][seed] = outcome
            print(f"{name}, seed {seed}: mean accuracy {100 * statistics.fmean(outcome.accuracy.values()):.2f} %", flush=True)
    table(found)


if __name__ == "__main__":
    main()
