"""FedHM's tiers of ResNet-18 (32x32, 10 classes): bytes on the way, a node's step and memory.

    python benchmarks/fedhm_tiers.py [--parts bytes steps] [--weights FULL_MODEL.safetensors]

- bytes: of the training message to a node and of its reply, as Flower serialises them, from a federation inside this
  process; float32 and float16. int8 is no transport of the app: its row is what `encode` makes of factors rounded with one
  scale for each row (a direction), with everything else in float16. The error is that of the product of two factors.
- steps: CPU time of a training step of batch 32, channels last, one thread; tiers in turn, in a new order each time. Memory
  is the largest resident one of a process that does nothing else, less what it had before the model was made.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file

import models
from client_app.training import channels_last, sgd
from server_app import app
from server_app.inprocess import SUPERLINK, InProcessGrid
from server_app.overrides import read_defaults
from strategies.fedhm.config import Config
from strategies.fedhm.decompose import Factors, full_svd, pack, squared_norm
from strategies.fedhm.hybrid import frobenius_penalty, state_of
from strategies.fedhm.lowrank import product, unroll
from strategies.fedhm.tiers import Tier, cost_of
from strategies.messages import encode, wire_bytes

RATIOS = (1.0, 0.5, 0.25, 0.125, 0.083)
SHAPE, CLASSES, BATCH, CONFIG = (3, 32, 32), 10, 32, Config(model="resnet18", rho=3)
MB = 1e6


def settings(ratios: tuple[float, ...], **more: Any) -> dict[str, Any]:
    """Return the run config of a federation of ResNet-18 on a few pictures of noise."""
    chosen = {"strategy": "fedhm", "alone": False, "data.source": "benchmarks.fedhm_tiers:noise", "data.shared-test": 0}
    chosen |= {"data.partitioner": "iid", "data.samples-per-node": 4, "data.test-fraction": 0.25, "data.min-samples": 1, "num-rounds": 1}
    chosen |= {"fleet.models": "resnet18", "fedhm.model": "resnet18", "fedhm.rho": CONFIG.rho}
    return {**read_defaults(), **chosen, "fleet.rank-ratios": ",".join(f"{r:g}" for r in ratios), **more}


def noise() -> tuple[Any, Any]:
    """Return pictures and labels, as a data source."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (100, *SHAPE), dtype=np.uint8), np.arange(100) % CLASSES


def model(path: str = "") -> models.SplitModel:
    """Return ResNet-18 at random, or with the weights of a file."""
    torch.manual_seed(0)
    built = models.build("resnet18", input_shape=SHAPE, num_outputs=CLASSES)
    if path:
        built.load_state_dict({**built.state_dict(), **load_file(path)})
    return built


class Counting(InProcessGrid):
    """Notes the bytes of training messages and replies by node."""

    def accept(self, key: str, message: Message) -> None:
        self.note("down", message, message.content)
        super().accept(key, message)

    def deliver(self, message: Message, content: RecordDict) -> RecordDict | None:
        self.note("up", message, content)
        return content

    def note(self, way: str, message: Message, content: RecordDict) -> None:
        if message.metadata.message_type == "train":
            self.counted[way, message.metadata.dst_node_id - 1000] = wire_bytes(content)

    counted: dict[tuple[str, int], int]


def message_bytes(dtype: str) -> dict[tuple[str, int], int]:
    """Return (way, index of the ratio) -> bytes of one round's training messages."""
    import heterofleet_app

    with tempfile.TemporaryDirectory() as folder:
        config = settings(RATIOS, **{"transport.dtype": dtype, "train.batch-size": 2, "out-dir": folder})
        configs = [{"partition-id": i, "num-partitions": len(RATIOS)} for i in range(len(RATIOS))]
        grid = Counting(heterofleet_app.client, configs, config, wire=True)
        grid.counted = {}
        app.main(grid, Context(grid.run.run_id, SUPERLINK, {}, RecordDict(), config))
    return grid.counted


def int8_bytes_and_errors(full: models.SplitModel, ratio: float, found: dict[str, Factors]) -> tuple[int, list[float]]:
    """Return bytes with int8 factors, and the largest errors over |W| of a layer: by int8, by float16, by the truncation itself."""
    ranks, state = Tier.of(full, ratio, CONFIG).ranks, state_of(full)
    sent: dict[str, torch.Tensor] = {}
    worst = [0.0, 0.0, 0.0]
    for name, tensor in state.items():
        if name not in found:
            sent |= {name: tensor} if tensor.is_floating_point() else {}
            continue
        factors, rounded = found[name].prefix(ranks[name.removesuffix(".weight")]), []
        for factor, rows in zip(("ut", "vt"), factors, strict=True):
            scale = (rows.abs().amax(1, keepdim=True) / 127.0).half().float().clamp_min(1e-7)
            sent |= {f"{name}.{factor}": (rows / scale).round().to(torch.int8), f"{name}.{factor}.scale": scale}
            rounded.append((rows / scale).round() * scale)
        exact, matrix = product(*factors), unroll(tensor)
        halved = product(*(rows.half().float() for rows in factors))
        errors = [product(*rounded) - exact, halved - exact, matrix - exact]
        worst = [max(old, float(error.norm() / matrix.norm())) for old, error in zip(worst, errors, strict=True)]
    return wire_bytes(encode(sent, "float16")), worst


def show_bytes(path: str) -> None:
    """Print bytes down and up for each tier."""
    counted = {dtype: message_bytes(dtype) for dtype in ("float32", "float16")}
    whole, full = counted["float32"]["up", 0], model(path)
    state = state_of(full)
    found: dict[str, Factors] = {}
    for layer, rank in Tier.of(full, RATIOS[1], CONFIG).ranks.items():
        matrix = unroll(state[f"{layer}.weight"])
        found[f"{layer}.weight"] = pack(full_svd(matrix), rank, squared_norm(matrix))
    columns = ["ratio", "down, float32", "up, float32", "of full", "up, float16", "of full", "up, int8", "of full"]
    columns += ["error int8", "float16", "truncation"]
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for i, ratio in enumerate(RATIOS):
        down, up, half = (counted[d][w, i] for d, w in (("float32", "down"), ("float32", "up"), ("float16", "up")))
        row = f"| {ratio:g} | {down / MB:.2f} MB | {up / MB:.2f} MB | {up / whole:.3f} | {half / MB:.2f} MB | {half / whole:.3f} |"
        if ratio == 1:
            row += " |" * 5
        else:
            small, errors = int8_bytes_and_errors(full, ratio, found)
            row += f" {small / MB:.2f} MB | {small / whole:.3f} | " + " | ".join(f"{100 * e:.2g} %" for e in errors) + " |"
        print(row)


class Step:
    """One tier's training step as the node half takes it."""

    def __init__(self, full: models.SplitModel, ratio: float) -> None:
        tier = Tier.of(full, ratio, CONFIG)
        self.net = tier.hybrid(full).to(memory_format=torch.channels_last).train()
        with torch.no_grad():  # zero factors give zeros, which some kernels finish sooner
            for name, tensor in self.net.named_parameters():
                if name.endswith((".u.weight", ".v.weight")):
                    tensor.normal_(std=tensor[0].numel() ** -0.5)
        self.optimizer = sgd(self.net.parameters(), rate=1e-9, momentum=0.9, weight_decay=0.0)
        self.batch, self.targets = channels_last(torch.randn(BATCH, *SHAPE)), torch.arange(BATCH) % CLASSES

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.net(self.batch), self.targets)
        (loss + 0.5e-4 * frobenius_penalty(self.net)).backward()
        self.optimizer.step()


def show_steps(repetitions: int) -> None:
    """Print step time and memory for each tier."""
    full = model()
    steps = {ratio: Step(full, ratio) for ratio in RATIOS}
    seconds: dict[float, list[float]] = {ratio: [] for ratio in RATIOS}
    rng = random.Random(0)
    for step in steps.values():
        step()
    for _ in range(repetitions):
        for ratio in rng.sample(RATIOS, len(RATIOS)):
            began = time.process_time()
            steps[ratio]()
            seconds[ratio].append(time.process_time() - began)
    medians = {ratio: statistics.median(values) for ratio, values in seconds.items()}
    print("\n| ratio | parameters | MACs of a sample | CPU s a step | of full | activations of a sample | resident | of full |")
    print("|---|---|---|---|---|---|---|---|")
    memory = {ratio: alone(ratio) for ratio in RATIOS}
    for ratio in RATIOS:
        cost = cost_of(full, ratio, CONFIG)
        print(
            f"| {ratio:g} | {cost.parameters:,} | {cost.macs / MB:.0f} M | {medians[ratio]:.3f} | {medians[ratio] / medians[1.0]:.2f} "
            f"| {cost.activation_bytes / MB:.2f} MB | {memory[ratio]:.0f} MB | {memory[ratio] / memory[1.0]:.2f} |"
        )


def alone(ratio: float) -> float:
    """Return the largest resident memory of three steps in a fresh process, in MB above what it had before the model."""
    command = [sys.executable, __file__, "--resident", f"{ratio}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def resident(ratio: float) -> float:
    """Return the same of this process."""
    base = status("VmRSS:")
    step = Step(model(), ratio)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the full model is gone
    for _ in range(3):
        step()
    return status("VmHWM:") - base


def status(key: str) -> float:
    """Return a line of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 / MB for line in lines if line.startswith(key))


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("bytes", "steps"), default=["bytes", "steps"])
    parser.add_argument("--weights", default="", help="safetensors file of a full model, for the errors of the factors")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--resident", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if options.resident:
        print(resident(options.resident))
        return
    print(f"torch {torch.__version__}, one thread, ResNet-18 for 32x32, rho = {CONFIG.rho}, load {os.getloadavg()[0]:.1f}")
    if "bytes" in options.parts:
        show_bytes(options.weights)
    if "steps" in options.parts:
        show_steps(options.repetitions)


if __name__ == "__main__":
    main()
