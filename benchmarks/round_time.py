"""Seconds of a FedMRL round against a plain PyTorch loop with the same work (benchmarks/plain.py).

    python benchmarks/round_time.py --data CIFAR10_FOLDER [--rounds 5] [--only cpu|wall]

Ten nodes, CNN-1..5, 500 training and 125 test pictures each, batch 64, one epoch, one torch thread a process.
(a) CPU seconds of training and evaluating all ten nodes: our trainer over the plain loop, the two in turn.
(b) wall seconds a round of `heterofleet simulate` with two workers, the first round left out, over the plain loop in
    one process, which runs before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import torch

import strategies
import tasks
from benchmarks.plain import PlainFederation
from client_app.profile import NodeProfile
from client_app.training import evaluate
from server_app.overrides import read_defaults
from strategies.aggregation import WeightedMean
from strategies.messages import Payload
from strategies.trainer import NodeContext

NODES, GOAL_CPU, GOAL_WALL = 10, 0.80, 0.65
CHOSEN = {
    "data.partitioner": "pathological",
    "data.classes-per-node": 2,
    "data.samples-per-node": 625,
    "train.batch-size": 64,
    "train.learning-rate": 0.01,
    "train.weight-decay": 0.001,
    "alone": False,
    "fedmrl.preset": "paper",  # what the plain loop computes
}


class OurFederation:
    """Our trainers and our average in one process, without messages, processes and disk."""

    def __init__(self, contexts: list[NodeContext]) -> None:
        self.trainers = [strategies.trainer_class("fedmrl")(context) for context in contexts]
        self.shared = {k: v.clone() for k, v in self.trainers[0].fused.shared.state_dict().items()}

    def round(self) -> float:
        """Train every node once, average, evaluate; return the mean accuracy."""
        mean = WeightedMean(self.shared, scale=float(500 * NODES))
        for trainer in self.trainers:
            trainer.receive(Payload(self.shared))
            update = trainer.train(Payload(self.shared), torch.Generator().manual_seed(1))
            mean.add(update.tensors, update.num_examples)
        self.shared = mean.result()
        scores = []
        for trainer in self.trainers:
            trainer.receive(Payload(self.shared))
            task = trainer.context.task
            scores.append(evaluate(task, trainer.predict, task.test, batch_size=256, device=torch.device("cpu"))["accuracy"])
        return statistics.fmean(scores)


def contexts(run_config: dict) -> list[NodeContext]:
    """Return the ten nodes as the app itself would make them."""
    settings, config = strategies.settings_of(run_config)
    profiles = [NodeProfile.of({"partition-id": i, "num-partitions": NODES}, settings) for i in range(NODES)]
    return [NodeContext(p, settings, config, tasks.load(p, settings), torch.device("cpu"), i) for i, p in enumerate(profiles)]


def timed(federation: object, clock) -> float:
    """Return the seconds of one round by `clock`."""
    start = clock()
    federation.round()
    return clock() - start


def cpu_part(run_config: dict, rounds: int) -> float:
    """Print and return (a)."""
    nodes = contexts(run_config)
    ours, plain = OurFederation(nodes), plain_federation(nodes)
    timed(ours, time.process_time), timed(plain, time.process_time)  # libraries warm up
    pairs = [(timed(plain, time.process_time), timed(ours, time.process_time)) for _ in range(rounds)]
    ratio = statistics.median(o / p for p, o in pairs)
    print(f"(a) CPU s a round, median of {rounds}: plain {statistics.median(p for p, _ in pairs):.2f}", end="  ")
    print(f"ours {statistics.median(o for _, o in pairs):.2f}  ratio {ratio:.2f} (goal {GOAL_CPU:.2f})")
    return ratio


def plain_federation(nodes: list[NodeContext]) -> PlainFederation:
    """Return the plain loop on the same nodes' data."""
    return PlainFederation([n.task for n in nodes], 64, 0.01, 0.9, 0.001)


def plain_wall(run_config: dict, rounds: int) -> list[float]:
    """Return wall seconds of each round of the plain loop, the first left out."""
    plain = plain_federation(contexts(run_config))
    return [timed(plain, time.perf_counter) for _ in range(rounds + 1)][1:]


def wall_part(data: str, run_config: dict, rounds: int) -> float:
    """Print and return (b)."""
    before = plain_wall(run_config, rounds)
    with tempfile.TemporaryDirectory() as folder:
        options = [part for key, value in CHOSEN.items() if key != "alone" for part in ("-c", f"{key}={value}")]
        command = [sys.executable, "-m", "server_app.cli", "simulate", "--nodes", str(NODES), "--workers", "2", "--no-alone", "--quiet"]
        command += ["-c", f"data.source={data}", "-c", f"num-rounds={rounds + 1}", "--out", f"{folder}/run", *options]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        ours = [row["seconds"] for row in lines if row["kind"] == "round"][1:]
    after = plain_wall(run_config, rounds)
    reference, mine = statistics.median(before + after), statistics.median(ours)
    print(f"(b) wall s a round, median of {rounds}: plain {reference:.2f} (before {statistics.median(before):.2f}, after", end=" ")
    print(f"{statistics.median(after):.2f})  simulate, 2 workers {mine:.2f}  ratio {mine / reference:.2f} (goal {GOAL_WALL:.2f})")
    return mine / reference


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: a Hugging Face name or a local folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("cpu", "wall"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = str(Path(options.data).resolve()) if Path(options.data).exists() else options.data
    run_config = {**read_defaults(), **CHOSEN, "data.source": source}
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.only != "wall":
        cpu_part(run_config, options.rounds)
    if options.only != "cpu":
        wall_part(run_config["data.source"], run_config, options.rounds)


if __name__ == "__main__":
    main()
