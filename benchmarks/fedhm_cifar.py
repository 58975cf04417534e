"""CIFAR-10: FedHM's full model and tiers round by round, against FedAvg of the smallest and of the full model.

    python benchmarks/fedhm_cifar.py --data CIFAR10_FOLDER --out RESULTS [--jobs 2]

Ten nodes, IID and Dirichlet 0.5, rank ratios 1, 1/2, 1/4, 1/8 in turn (3, 3, 2, 2 nodes), 500 training and 125 test pictures
each. The model is ResNet-18 reduced in two ways, so that a run takes minutes on one core: a quarter of the width (16, 32, 64,
128 channels: 0.70 M parameters), and a stem of stride 2, so that stages work at 16, 8, 4 and 2 pixels a side, a quarter of
the arithmetic. rho = 3 as published. Runs are in-process, one torch thread each; a run that is done is not repeated. Every
case goes through the same code, evaluation and BatchNorm: at ratio 1 with sample weights FedHM is FedAvg, and "smallest" is
FedAvg of the model cut to 1/8, factors as plain layers.

Accuracy is that of a common test set of 4000 pictures: `full`, and the full model truncated to each tier. For cases of
one tier there is one model. `personal` is the mean over the nodes of their own cut on their own test split.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from models.assemble import assemble
from models.split import SplitModel
from server_app.inprocess import run
from server_app.overrides import read_defaults
from strategies.fedhm.config import Config
from strategies.fedhm.hybrid import with_ranks
from strategies.fedhm.tiers import Tier

NODES, RHO, RATIOS = 10, 3, (1.0, 0.5, 0.25, 0.125)
MODEL, SMALLEST = "benchmarks.fedhm_cifar:resnet18_w16", "benchmarks.fedhm_cifar:smallest"
_FEDAVG = {"fleet.rank-ratios": "1.0", "fedhm.weighting": "uniform", "fedhm.times-samples": True}
CASES: dict[str, dict[str, Any]] = {
    "paper": {"fedhm.aggregation": "paper"},
    "delta": {"fedhm.aggregation": "delta"},
    "delta-decay": {"fedhm.aggregation": "delta-decay"},
    "later": {"fedhm.aggregation": "delta", "fedhm.delta-after": 10},
    "floor": {"fedhm.floor": 0.1},
    "fedavg-smallest": {**_FEDAVG, "fedhm.model": SMALLEST},
    "fedavg-full": _FEDAVG,
}
SPLITS: dict[str, dict[str, Any]] = {"iid": {"data.partitioner": "iid"}, "dirichlet": {"data.partitioner": "dirichlet", "data.alpha": 0.5}}


def resnet18_w16(input_shape: tuple[int, ...], num_outputs: int, feature_dim: int | None = None) -> SplitModel:
    """ResNet-18 with 16 channels in place of 64: 3x3 stem of stride 2, no max-pooling, representation 128 wide."""
    from torchvision.models.resnet import BasicBlock

    stem = nn.Conv2d(input_shape[0], 16, 3, stride=2, padding=1, bias=False)
    parts: list[nn.Module] = [nn.Sequential(stem, nn.BatchNorm2d(16), nn.ReLU())]
    channels = 16
    for width, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
        shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)) if stride > 1 else None
        parts.append(nn.Sequential(BasicBlock(channels, width, stride, shortcut), BasicBlock(width, width)))
        channels = width
    extractor = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for layer in extractor.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return assemble(extractor, channels, input_shape, num_outputs, feature_dim)


def smallest(input_shape: tuple[int, ...], num_outputs: int, feature_dim: int | None = None) -> SplitModel:
    """The same cut to the smallest ratio from its random start, as the smallest tier begins."""
    model = resnet18_w16(input_shape, num_outputs, feature_dim)
    return cast(SplitModel, with_ranks(model, Tier.of(model, min(RATIOS), Config(rho=RHO)).ranks))


def one(job: tuple[str, str, dict[str, Any], Path]) -> tuple[str, str, Path]:
    """Run one case on one split into its own folder, or go on with it; return (split, case, folder)."""
    split, case, settings, folder = job
    torch.set_num_threads(1)
    status = folder / "status.json"
    state = json.loads(status.read_text())["state"] if status.exists() else ""
    if state != "completed":
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # Flower's log
            run({**settings, **({"resume": str(folder)} if (folder / "run.json").exists() else {})}, NODES, folder)
    return split, case, folder


def rounds(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all rounds."""
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["kind"] == "round"]


def show(split: str, case: str, folder: Path, shown: int) -> None:
    """Print one case: about `shown` rounds, the last among them."""
    listed = rounds(folder)
    tiers = [f"{ratio:g}" for ratio in RATIOS[1:] if f"accuracy_{ratio:g}" in listed[-1]["shared"]]
    print(f"\n{split}, {case}: {sum(r['seconds'] for r in listed):.0f} s, {listed[-1]['bytes_up'] / 1e6:.2f} MB up a round")
    print("round   full " + "".join(f"{tier:>7}" for tier in tiers) + "  personal  worst  eff.rank  beyond " + " ".join(tiers))
    evaluated = [r for r in listed if "shared" in r]
    for row in evaluated[:: -max(1, len(evaluated) // shown)][::-1]:
        shared, own, method = row["shared"], row["personalized"], row["method"]
        line = f"{row['round']:5d} {shared['accuracy']:6.3f} " + "".join(f"{shared[f'accuracy_{tier}']:7.3f}" for tier in tiers)
        line += f" {own['accuracy_mean']:9.3f} {own['accuracy_worst']:6.3f}"
        if "effective_rank" in method:
            line += f" {method['effective_rank']:9.1f}  " + " ".join(f"{method[f'energy_beyond_{tier}']:.4f}" for tier in tiers)
        print(line)


def layers(folder: Path) -> None:
    """Print each layer's effective rank in the first and the last round."""
    first, last = (rounds(folder)[i]["method"] for i in (0, -1))
    for key in sorted(k for k in last if k.startswith("effective_rank/")):
        print(f"  {key.partition('/')[2]:<28} {first[key]:8.1f} -> {last[key]:8.1f}")


def main() -> None:
    """Run all cases on all splits and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: a Hugging Face name or a local folder")
    parser.add_argument("--out", required=True, type=Path, help="folder for the runs")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--samples", type=int, default=625, help="pictures of one node, a fifth of them for its test")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=5, help="rounds")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--batch-norm", default="recalibrate", choices=("recalibrate", "batch", "group"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are spawned
    common = {
        **read_defaults(),
        "strategy": "fedhm",
        "seed": options.seed,
        "num-rounds": options.rounds,
        "eval-every": options.eval_every,
        "alone": False,
        "data.source": str(Path(options.data).resolve()) if Path(options.data).exists() else options.data,
        "data.samples-per-node": options.samples,
        "data.shared-test": 4000,
        "data.augment": "crop-flip",
        "fleet.models": MODEL,
        "fleet.rank-ratios": ",".join(f"{ratio:g}" for ratio in RATIOS),
        "train.local-epochs": options.epochs,
        "train.learning-rate": options.rate,
        "train.weight-decay": 0.0001,
        "fedhm.model": MODEL,
        "fedhm.rho": RHO,
        "fedhm.batch-norm": options.batch_norm,
    }
    where = options.out.resolve()
    jobs = [
        (split, case, {**common, **SPLITS[split], **CASES[case]}, where / f"{split}-{case}")
        for split in options.splits
        for case in options.cases
    ]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options}")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for split, case, folder in pool.map(one, jobs):
            show(split, case, folder, 8)
            layers(folder)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
