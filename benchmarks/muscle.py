"""What the Muscle loss costs and how exact it is: time, memory, bytes and gradient errors, with the goals beside them.

    python -m benchmarks.muscle            all of it, two minutes; naive with four peers takes 4 GB once
    python -m benchmarks.muscle --quick    without that

One thread, batch 32, width 256, float32, linear temperatures unless said otherwise. Times are CPU time for value and
gradient, the least of several runs; the two sides of a ratio are measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.muscle_data import KINDS, representations
from strategies.fedmuscle.evaluators import Evaluation, mean_field, sampled
from strategies.fedmuscle.exact import exact
from strategies.fedmuscle.loss import evaluate
from strategies.fedmuscle.temperatures import LinearSchedule, Temperatures
from strategies.fedmuscle.transport import TRANSPORTS, decode_rows, encode_rows
from strategies.messages import encode, wire_bytes

BATCH, WIDTH = 32, 256
FIXED, LINEAR = Temperatures(0.2, 0.15), LinearSchedule()


def row(*cells: object, goal: str = "", met: bool = True) -> None:
    """Print one line of a table; a missed goal is marked."""
    print("  ".join(f"{cell:>14}" for cell in cells) + (f"   goal {goal}: {'met' if met else 'MISSED'}" if goal else ""), flush=True)


def cpu_ms(call: Callable[[], object], repeats: int, *, warm: bool = True) -> float:
    """Return the least CPU time of one call, in ms."""
    if warm:
        call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def run(evaluator: str, num_peers: int, *, kind: str = "mid", batch: int = BATCH) -> Callable[[], Evaluation]:
    """Return one evaluation, ready to be called."""
    anchor, peers = representations(kind, num_peers, batch, WIDTH)
    generator = torch.Generator().manual_seed(0)
    return lambda: evaluate(anchor, peers, LINEAR, evaluator=evaluator, generator=generator)


def added_mb(evaluator: str, num_peers: int) -> float:
    """Return the memory one evaluation adds to a fresh process, in MB."""
    command = [sys.executable, "-m", "benchmarks.muscle", "--peak", evaluator, str(num_peers)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(evaluator: str, num_peers: int) -> None:
    """Print how far one evaluation raises this process's peak resident memory, in MB (Linux)."""
    run(evaluator, min(num_peers, 4), batch=4)()
    call = run(evaluator, num_peers)
    # getrusage would report the parent's peak, which survives exec.
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water_mb()
    call()
    print(high_water_mb() - before)


def high_water_mb() -> float:
    """Return this process's peak resident memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def equality() -> None:
    print("\nExact against naive, float64, all kinds of data")
    row("peers", "batch", "value", "gradient")
    for num_peers, batch in ((1, 32), (2, 24), (3, 12), (4, 7)):
        worst = [0.0, 0.0]
        for kind in KINDS:
            anchor, peers = representations(kind, num_peers, batch, WIDTH, dtype=torch.float64)
            one, two = (evaluate(anchor, peers, LINEAR, evaluator=e) for e in ("naive", "exact"))
            errors = (float((one.loss - two.loss).abs()), float((one.gradient - two.gradient).abs().max()))
            worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        row(num_peers, batch, f"{worst[0]:.1e}", f"{worst[1]:.1e}", goal="1e-10", met=max(worst) < 1e-10)


def speed(quick: bool) -> None:
    print("\nCPU time, ms, and added memory, MB")
    row("peers", "naive", "exact", "ratio", "mean-field", "sampled 256", "exact MB", "mean-field MB")
    goals = {3: 100.0, 4: 500.0}
    for num_peers, repeats in ((1, 200), (2, 200), (3, 100), (4, 30), (5, 5), (9, 0), (31, 0)):
        exact_ms = cpu_ms(run("exact", num_peers), repeats) if repeats else None
        naive_ms = None
        if num_peers < 4 or (num_peers == 4 and not quick):
            naive_ms = cpu_ms(run("naive", num_peers), 5 if num_peers < 4 else 1, warm=num_peers < 4)
        ratio = naive_ms / exact_ms if naive_ms and exact_ms else None
        field_ms, sampled_ms = (cpu_ms(run(e, num_peers), 5) for e in ("mean-field", "sampled"))
        exact_mb = added_mb("exact", num_peers) if exact_ms else None
        goal, met = f">= {goals[num_peers]:.0f}x" if ratio and num_peers in goals else "", not ratio or ratio >= goals.get(num_peers, 0)
        if num_peers == 5 and exact_ms and exact_mb:
            goal, met = "250 ms, 150 MB", exact_ms <= 250 and exact_mb <= 150
        if num_peers == 31:
            goal, met = "60 ms", field_ms <= 60
        cells = (naive_ms, exact_ms, ratio, field_ms, sampled_ms, exact_mb, added_mb("mean-field", num_peers))
        row(num_peers, *("-" if cell is None else f"{cell:.3g}" for cell in cells), goal=goal, met=met)


def payload_bytes(transport: str) -> int:
    """Return the serialised bytes of one peer's batch."""
    rep, _ = representations("mid", 1, BATCH, WIDTH)
    return wire_bytes(encode({"rows": encode_rows(rep, transport)}))


def size(count: float) -> str:
    """Return bytes for people; 1 GB = 1e9."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def traffic() -> None:
    print("\nDownload per public batch and node, as serialised (paper: S and alpha, float32)")
    row("peers", "paper", *(f"step {t}" for t in TRANSPORTS), "gradient")
    per_peer = [payload_bytes(t) for t in TRANSPORTS]
    gradient = payload_bytes("float32")
    for num_peers in (1, 3, 5, 9, 31):
        paper = 4.0 * float(BATCH) ** num_peers * (WIDTH + 1)
        allowed = [num_peers * BATCH * WIDTH * width + 1024 for width in (4, 2, 1)]
        goal, met = "", True
        if num_peers <= 5:
            goal = "M B d bytes + 1 KB"
            met = all(num_peers * a <= b for a, b in zip(per_peer, allowed, strict=True)) and gradient <= BATCH * WIDTH * 4 + 1024
        if num_peers == 31:
            goal, met = "1.1 MB float32", num_peers * per_peer[0] <= 1.1e6
        row(num_peers, size(paper), *(size(num_peers * each) for each in per_peer), size(gradient), goal=goal, met=met)
    print(f"  of which {per_peer[0] - 4 * BATCH * WIDTH} bytes of header a peer")


def relative(got: Evaluation, want_gradient: torch.Tensor) -> float:
    return float((got.gradient - want_gradient).norm() / want_gradient.norm())


def by_gibbs(anchor: torch.Tensor, stacked: torch.Tensor, pair: Temperatures, *, chains: int, sweeps: int, seed: int) -> torch.Tensor:
    """Return the gradient by Gibbs sampling, which shares nothing with mean field: a reference where exact is out of reach.

    Every chain holds one tuple per anchor and redraws one peer's index at a time; conditional means are averaged,
    which is less noisy than the draws. The first fifth of the sweeps is dropped.
    """
    num_peers, batch, _ = stacked.shape
    generator = torch.Generator().manual_seed(seed)
    fields = (anchor @ stacked.transpose(1, 2) / pair.tau)[:, :, None].expand(-1, -1, chains, -1)
    state = torch.multinomial(fields.softmax(3).reshape(-1, batch), 1, generator=generator).view(num_peers, batch * chains)
    total = sum(stacked[m][state[m]] for m in range(num_peers))
    mean = torch.zeros_like(anchor)
    kept = range(sweeps // 5, sweeps)
    for sweep in range(sweeps):
        for m in range(num_peers):
            others = total - stacked[m][state[m]]
            chances = (fields[m].reshape(-1, batch) - pair.gamma * others @ stacked[m].T).softmax(1)
            state[m] = torch.multinomial(chances, 1, generator=generator).flatten()
            total = others + stacked[m][state[m]]
            if sweep in kept:
                mean += chances.view(batch, chains, batch).mean(1) @ stacked[m]
    return (mean / len(kept) - stacked.sum(0)) / (pair.tau * batch)


def reference(anchor: torch.Tensor, stacked: torch.Tensor, pair: Temperatures) -> tuple[torch.Tensor, float]:
    """Return the true gradient and the relative error to expect of it: exact, or the mean of two Gibbs runs."""
    if len(stacked) < 10:
        return exact(anchor.double(), stacked.double(), pair).gradient.to(anchor.dtype), 0.0
    one, two = (by_gibbs(anchor, stacked, pair, chains=16, sweeps=60, seed=seed) for seed in (1, 2))
    mean = (one + two) / 2
    return mean, float((one - two).norm() / 2 / mean.norm())


def errors() -> None:
    print("\nGradient error, % of its norm, worst of five kinds (reference: exact, or Gibbs sampling for 31 peers)")
    row("temperatures", "peers", "batch", "mean-field", "sampled 256", "least ESS / R", "reference +-")
    fixed = [("fixed", m, b, 3.5) for m, b in ((3, 32), (5, 32), (9, 6), (31, 32))]
    # With two and three peers `auto` takes exact, so that only the bound of the worst case is asked of mean field.
    linear = [("linear", m, b, goal) for m, b, goal in ((2, 32, 10.0), (3, 32, 10.0), (5, 32, 1.0), (9, 6, 1.0), (31, 32, 1.0))]
    for name, num_peers, batch, goal in fixed + linear:
        pair = FIXED if name == "fixed" else LINEAR.at(num_peers)
        found = []
        for kind in KINDS:
            anchor, peers = representations(kind, num_peers, batch, WIDTH)
            stacked = torch.stack(peers)
            want, doubt = reference(anchor, stacked, pair)
            drawn = sampled(anchor, stacked, pair, samples=256, generator=torch.Generator().manual_seed(0))
            found.append((relative(mean_field(anchor, stacked, pair), want), relative(drawn, want), -(drawn.ess or 0.0), doubt))
        field, draws, ess, doubt = (max(column) for column in zip(*found, strict=True))
        cells = (f"{100 * field:.2g}", f"{100 * draws:.2g}", f"{-ess:.2g}", f"{100 * doubt:.2g}")
        row(name, num_peers, batch, *cells, goal=f"{goal:g} %", met=100 * field <= goal)


def rounding() -> None:
    print("\nGradient error by transport, % of its norm, three peers, worst of five kinds")
    row(*TRANSPORTS)
    worst = dict.fromkeys(TRANSPORTS, 0.0)
    for kind in KINDS:
        anchor, peers = representations(kind, 3, BATCH, WIDTH)
        want = evaluate(anchor, peers, LINEAR).gradient
        for transport in TRANSPORTS:
            arrived = [decode_rows(encode_rows(peer, transport), shape=(BATCH, WIDTH), sender="peer") for peer in peers]
            worst[transport] = max(worst[transport], relative(evaluate(anchor, arrived, LINEAR), want))
    row(*(f"{100 * worst[t]:.2g}" for t in TRANSPORTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out naive with four peers")
    parser.add_argument("--peak", nargs=2, metavar=("EVALUATOR", "PEERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        print_peak(options.peak[0], int(options.peak[1]))
        return
    print(f"batch {BATCH}, width {WIDTH}, one thread, torch {torch.__version__}")
    equality()
    speed(options.quick)
    traffic()
    errors()
    rounding()


if __name__ == "__main__":
    main()
