"""Server cost of redistributing ResNet-18 and ResNet-34 (32x32 inputs) to four tiers, one thread.

Four ways are timed in turn, in a new order each repetition, in one process, by the wall clock and by CPU time:

- naive: one full SVD for each layer and tier, as the authors' program does;
- full: one full SVD for each layer, tiers are slices;
- exact: Gram matrix with Rayleigh-Ritz, one for each layer;
- auto: subspace iteration from the basis of the round before.

Weights: `gaussian` (the hardest spectrum; the basis comes from the same weights before a drift of 10 %), `simulated`
(truncate, perturb the factors, average; the basis comes from the round before the last), `trained` with --train DATA (real
FedHM rounds: a node for each ratio, 12 steps of batch 16 a round), and `file` with --weights PREVIOUS NOW, two safetensors files
of a model after two following rounds.

    python benchmarks/svd.py --repetitions 5 [--train CIFAR10_FOLDER]
    python benchmarks/svd.py --kinds simulated --busy        # auto on all cores, alone and beside a busy process
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file

import models
from server_app.inprocess import run as run_federation
from server_app.overrides import read_defaults
from strategies.fedhm.config import Config
from strategies.fedhm.decompose import Factors, full_svd, pack, squared_norm
from strategies.fedhm.lowrank import product, roll, round_half_up, unroll
from strategies.fedhm.spectral import Decomposer, Layer
from strategies.fedhm.tiers import Tier

Weights = dict[str, torch.Tensor]
BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
FULL = {"resnet18": ("layer1.0",), "resnet34": ("layer1.", "layer2.")}  # with the stem: what stays full (rho = 3, 15)
KINDS = ("trained", "simulated", "gaussian")
RHO = {"resnet18": 3, "resnet34": 15}
BUSY = "x = 1.0\nwhile True:\n    x = x * 1.0000001 % 7.0"


def shapes(model: str) -> dict[str, tuple[int, int, int, int]]:
    """Return name -> (m, n, 3, 3) of the convolutions that are factorized."""
    found, channels = {}, 64
    for stage, (count, width) in enumerate(zip(BLOCKS[model], (64, 128, 256, 512), strict=True), start=1):
        for block in range(count):
            for conv in (1, 2):
                name = f"layer{stage}.{block}.conv{conv}.weight"
                if not name.startswith(FULL[model]):
                    found[name] = (width, channels, 3, 3)
                channels = width
    return found


def gaussian(model: str, drift: float, generator: torch.Generator) -> tuple[Weights, Weights]:
    """Return weights before and after a relative change of `drift`."""
    before = {name: torch.randn(shape, generator=generator) for name, shape in shapes(model).items()}
    return before, {name: w + drift * torch.randn(w.shape, generator=generator) for name, w in before.items()}


def simulated_rounds(model: str, ratios: list[float], rounds: int, step: float, generator: torch.Generator) -> tuple[Weights, Weights]:
    """Return weights after `rounds - 1` and `rounds` rounds: each tier's factors move by a relative `step`, products are averaged.

    The first rounds move more (step, step/2, step/3, ...), as training does.
    """
    now = {name: torch.randn(shape, generator=generator) / (shape[1] * 9) ** 0.5 for name, shape in shapes(model).items()}
    before = now
    for done in range(1, rounds + 1):
        before, now = now, {}
        size = step / done
        for name, weight in before.items():
            matrix = unroll(weight)
            factors = pack(full_svd(matrix), round_half_up(max(ratios) * weight.shape[0]), squared_norm(matrix))
            total = torch.zeros_like(matrix)
            for ratio in ratios:
                moved = [_moved(x, size, generator) for x in factors.prefix(round_half_up(ratio * weight.shape[0]))]
                total += product(moved[0], moved[1]) / len(ratios)
            now[name] = roll(total, tuple(weight.shape)).contiguous()
    return before, now


def _moved(x: torch.Tensor, size: float, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=generator)
    return x + size * float(x.norm() / noise.norm()) * noise


def trained_rounds(model: str, options: argparse.Namespace) -> tuple[Weights, Weights]:
    """Return the cut weights after `rounds - 1` and `rounds` rounds of a federation in this process, a node for each ratio."""
    data, ratios = options.train, options.ratios
    common = {
        **read_defaults(),
        "strategy": "fedhm",
        "alone": False,
        "eval-every": 0,
        "data.source": str(Path(data).resolve()) if Path(data).exists() else data,
        "data.partitioner": "iid",
        "data.samples-per-node": 208,
        "data.test-fraction": 16 / 208,
        "data.shared-test": 0,
        "train.batch-size": 16,
        "train.learning-rate": 0.05,
        "fleet.rank-ratios": ",".join(f"{ratio:g}" for ratio in ratios),
        "fedhm.model": model,
        "fedhm.rho": RHO[model],
    }
    found = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        for rounds in (options.rounds - 1, options.rounds):
            run_federation({**common, "num-rounds": rounds, **({"resume": str(out)} if found else {})}, len(ratios), out)
            state = load_file(out / "shared" / "fedhm.safetensors")
            full = models.build(model, input_shape=(3, 32, 32), num_outputs=10)
            cut = Tier.of(full, ratios[0], Config(rho=RHO[model])).ranks
            found.append({f"{name}.weight": state[f"{name}.weight"] for name in cut})
    return found[0], found[1]


def layers_of(weights: Mapping[str, torch.Tensor], ratios: list[float]) -> dict[str, Layer]:
    """Return the layers with their ranks at `ratios`, largest first."""
    ranks = {name: sorted({round_half_up(r * w.shape[0]) for r in ratios}, reverse=True) for name, w in weights.items()}
    return {name: Layer(weight, tuple(ranks[name])) for name, weight in weights.items()}


def plain_full(layers: Mapping[str, Layer]) -> dict[str, Factors]:
    """Return the factors from one full SVD for each layer."""
    matrices = {name: unroll(layer.weight) for name, layer in layers.items()}
    return {name: pack(full_svd(m), layers[name].ranks[0], squared_norm(m)) for name, m in matrices.items()}


def warm(before: Mapping[str, Layer], now: Mapping[str, Layer], tolerance: float, workers: int = 1) -> Callable[[], dict[str, Factors]]:
    """Return a call that decomposes `now` from the bases of `before`, the same bases each time."""
    first = Decomposer("auto", tolerance=tolerance, workers=1)
    first(before)
    bases = first.state_dict()

    def call() -> dict[str, Factors]:
        decomposer = Decomposer("auto", tolerance=tolerance, workers=workers)
        decomposer.load_state_dict(bases)
        found = decomposer(now)
        if set(decomposer.used.values()) != {"warm"}:
            print("  not all warm:", {name: way for name, way in decomposer.used.items() if way != "warm"})
        return found

    return call


def excess(ways: list[Mapping[str, Factors]], layers: Mapping[str, Layer]) -> list[float]:
    """Return each way's largest (error - optimal) / optimal over layers and tiers, all in float64."""
    worst = [0.0] * len(ways)
    for name, layer in layers.items():
        matrix = unroll(layer.weight).double()
        s = torch.linalg.svdvals(matrix)
        for i, found in enumerate(ways):
            for rank in layer.ranks:
                ut, vt = found[name].prefix(rank)
                error = float(torch.linalg.norm(matrix - ut.double().mT @ vt.double()))
                worst[i] = max(worst[i], error / float(s[rank:].square().sum().sqrt()) - 1)
    return worst


def timed(ways: Mapping[str, Callable[[], object]], repetitions: int, rng: random.Random) -> dict[str, tuple[float, float]]:
    """Return the median wall and CPU seconds of each way; every repetition runs all of them in a new order."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name in rng.sample(list(ways), len(ways)):
            wall, cpu = time.perf_counter(), time.process_time()
            ways[name]()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: (statistics.median(w for w, _ in found), statistics.median(c for _, c in found)) for name, found in seconds.items()}


def measure(label: str, before: Weights, now: Weights, options: argparse.Namespace) -> None:
    """Print one row for each clock: seconds, ratios and excess errors."""
    old, new = layers_of(before, options.ratios), layers_of(now, options.ratios)
    if options.busy:
        beside_a_competitor(label, warm(old, new, options.tolerance, os.cpu_count() or 1), options.repetitions)
        return
    exact, naive = Decomposer("exact", workers=1), Decomposer("naive", workers=1)
    auto = warm(old, new, options.tolerance)
    ways = {"naive": lambda: naive(new), "full": lambda: plain_full(new), "exact": lambda: exact(new), "auto": auto}
    both = timed(ways, options.repetitions, random.Random(options.seed))
    errors = excess([auto(), exact(new)], new)
    for i, clock in enumerate(("wall", "CPU")):
        t = {name: found[i] for name, found in both.items()}
        figures = [t["naive"], t["full"], t["exact"], t["auto"], t["naive"] / t["auto"], t["full"] / t["auto"], t["naive"] / t["exact"]]
        print(f"| {label}, {clock} | " + " | ".join(f"{f:.2f}" for f in figures) + " | " + " | ".join(f"{e:.1e}" for e in errors) + " |")
    sys.stdout.flush()


def beside_a_competitor(label: str, auto: Callable[[], object], repetitions: int) -> None:
    """Print the wall seconds of `auto` on all cores, alone and beside a process that keeps a core busy, in turn."""
    competitor = subprocess.Popen([sys.executable, "-c", BUSY])
    alone, beside = [], []
    try:
        for _ in range(repetitions):
            for sign, found in ((signal.SIGSTOP, alone), (signal.SIGCONT, beside)):
                competitor.send_signal(sign)
                began = time.perf_counter()
                auto()
                found.append(time.perf_counter() - began)
    finally:
        competitor.kill()
        competitor.wait()
    a, b = statistics.median(alone), statistics.median(beside)
    print(f"| {label} | {a:.2f} | {b:.2f} | {b / a:.2f} |", flush=True)


def convolutions(path: str) -> Weights:
    """Return the kernels wider than 1x1 of a safetensors file, without the stem."""
    return {name: w.float() for name, w in load_file(path).items() if w.dim() == 4 and max(w.shape[2:]) > 1 and w.shape[1] > 3}


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    print(f"torch {torch.__version__}, ratios {options.ratios}, median of {options.repetitions}, load {os.getloadavg()[0]:.1f}")
    columns = ["weights", "naive s", "full s", "exact s", "auto s", "naive/auto", "full/auto", "naive/exact", "auto excess", "exact excess"]
    if options.busy:
        columns = ["weights", f"auto s, {os.cpu_count()} cores", "beside a busy process", "ratio"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    if options.weights:
        measure("file", *(convolutions(path) for path in options.weights), options)
        return
    for model in options.models:
        generator = torch.Generator().manual_seed(options.seed)
        if "trained" in options.kinds and options.train:
            measure(f"{model} trained", *trained_rounds(model, options), options)
        if "simulated" in options.kinds:
            measure(f"{model} simulated", *simulated_rounds(model, options.ratios, options.rounds, options.step, generator), options)
        if "gaussian" in options.kinds:
            measure(f"{model} gaussian", *gaussian(model, options.drift, generator), options)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.25, 0.125, 0.083])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=4, help="before the measured decomposition")
    parser.add_argument("--step", type=float, default=0.5, help="relative change of the factors in the first simulated round")
    parser.add_argument("--drift", type=float, default=0.1, help="relative change of the Gaussian weights")
    parser.add_argument("--weights", nargs=2, metavar=("PREVIOUS", "NOW"), help="two safetensors files instead")
    parser.add_argument("--train", default="", metavar="DATA", help="CIFAR-10 or such: also after real rounds")
    parser.add_argument("--busy", action="store_true", help="only auto, on all cores, alone and beside a process that keeps one busy")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    run(options)


if __name__ == "__main__":
    main()
