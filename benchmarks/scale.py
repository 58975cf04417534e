"""10, 100 and 1,000 simulated nodes with a shared part of about 1 MB: seconds a round, and the server's memory.

    python benchmarks/scale.py [--nodes 10,100,1000] [--sampled 50] [--rounds 6] [--strategy fedmrl] [--workers 2]

At most `--sampled` nodes take part in a round, so that 100 and 1,000 nodes do the same work: 4 training samples each, of the digits
that come with the app (or `--data`). The server is the process that runs the ServerApp; in simulation Flower's in-memory SuperLink
and the bookkeeping of the simulated nodes are in it too. Its memory is read from /proc every 50 ms: "rounds" is the peak from the end
of round 1 to the end of the last but one, "run" that of the whole run with the evaluation of every node after the last round.
"own" leaves out mapped files, such as the code of libraries; the claim is that "rounds own" of the most nodes is at most 1.3 times that
of 100. "s round" is the median of those same rounds; "s join" is the time until every node has described itself, with the start of
the workers, "s first" and "s last" are the rounds left out, the last with the evaluation of all nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server_app.launch import Launch, simulate
from server_app.overrides import merged

LIMIT = 1.3
MARK = "HETEROFLEET_SCALE"
SAMPLES = 5  # a node, one of them for testing


def processes(token: str, program: str) -> Iterator[Path]:
    """Yield the /proc folders of the processes of this benchmark that run `program`."""
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and f"{MARK}={token}".encode() in (path / "environ").read_bytes().split(b"\0"):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if any(word.endswith(program.encode()) for word in words):
                    yield path
        except OSError:  # ended meanwhile
            continue


def megabytes(path: Path) -> dict[str, float]:
    """Return a process's resident memory in MB: all of it, and what is its own (without mapped files, such as libraries)."""
    lines = (line.split() for line in (path / "status").read_text().splitlines())
    values = {words[0]: int(words[1]) / 1024 for words in lines if words[0].startswith(("VmRSS", "Rss"))}
    return {"rss": values["VmRSS:"], "own": values["RssAnon:"] + values["RssShmem:"]}


@dataclass
class Watch:
    """Follows one run: the server's peaks while it runs, and when each round ended."""

    token: str
    last_round: int
    server: Path | None = None
    ended: dict[int, float] = field(default_factory=dict)
    rounds: dict[str, float] = field(default_factory=lambda: {"rss": 0.0, "own": 0.0})
    run: dict[str, float] = field(default_factory=lambda: {"rss": 0.0, "own": 0.0})
    done: threading.Event = field(default_factory=threading.Event)

    def status(self, status: dict[str, Any]) -> None:
        self.ended.setdefault(int(status.get("round", 0)), time.monotonic())

    def sample(self) -> None:
        """Read the server's memory until `done`."""
        while not self.done.wait(0.05):
            self.server = self.server or next(processes(self.token, "flwr-simulation"), None)
            if self.server is None:
                continue
            try:
                now = megabytes(self.server)
            except (OSError, KeyError):  # the run has ended; a dead process has no memory to read
                continue
            within = 1 in self.ended and self.last_round - 1 not in self.ended
            for peaks in (self.run, self.rounds) if within else (self.run,):
                peaks.update({key: max(peaks[key], value) for key, value in now.items()})


def run(args: argparse.Namespace, nodes: int, folder: Path) -> dict[str, float]:
    """Run `nodes` nodes and return what was measured."""
    fraction = min(1.0, args.sampled / nodes)
    settings = {
        "strategy": args.strategy,
        "alone": "false",
        "num-rounds": args.rounds,
        "eval-every": 0,
        "fleet.fraction": fraction,
        "fleet.models": "mlp",
        "fleet.join-timeout": 600,
        "fedavg.model": "mlp",
        "fedmrl.small-model": "mlp",
        "data.source": args.data,
        "data.partitioner": "iid",
        "data.samples-per-node": SAMPLES,
        "data.min-samples": 1,
        "data.shared-test": 0,
        "train.batch-size": 4,
    }
    checked = merged([f"{key}={value}" for key, value in settings.items()], {"out-dir": str(folder)})
    watch = Watch(os.environ[MARK], args.rounds)
    reader = threading.Thread(target=watch.sample, daemon=True)
    reader.start()
    try:
        simulate(Launch(out_dir=folder, run_config=checked.flat, nodes=nodes, workers=args.workers), watch.status)
    finally:
        watch.done.set()
        reader.join()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    failures = [row for row in rows if row["kind"] == "failure"]
    if failures:
        raise RuntimeError(f"{len(failures)} failures, the first: {failures[0]}")
    rounds = [row for row in rows if row["kind"] == "round"]
    return {
        "nodes": nodes,
        "sampled": rounds[1]["sampled"],
        "megabytes": rounds[1]["bytes_up"] / rounds[1]["replied"] / 2**20,
        "describe": watch.ended[1] - watch.ended[0] - rounds[0]["seconds"],
        "first": rounds[0]["seconds"],
        "round": statistics.median(row["seconds"] for row in rounds[1:-1]),
        "last": rounds[-1]["seconds"],
        **{f"rounds_{key}": value for key, value in watch.rounds.items()},
        **{f"run_{key}": value for key, value in watch.run.items()},
    }


COLUMNS = {
    "nodes": ("nodes", "{:8.0f}"),
    "sampled": ("sampled", "{:8.0f}"),
    "megabytes": ("MB up", "{:8.2f}"),
    "describe": ("s join", "{:8.1f}"),
    "first": ("s first", "{:8.1f}"),
    "round": ("s round", "{:8.2f}"),
    "last": ("s last", "{:8.1f}"),
    "rounds_rss": ("rounds RSS", "{:12.0f}"),
    "rounds_own": ("rounds own", "{:12.0f}"),
    "run_rss": ("run RSS", "{:12.0f}"),
    "run_own": ("run own", "{:12.0f}"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="10,100,1000")
    parser.add_argument("--sampled", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--strategy", default="fedmrl", choices=("fedavg", "fedmrl"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", default="embedded", help=f"as data.source; at least {SAMPLES} samples a node")
    args = parser.parse_args()
    if args.rounds < 4:
        parser.error("--rounds: at least 4, for two between the first and the last")
    os.environ[MARK] = secrets.token_hex(8)
    print(f"{args.strategy}, {args.workers} workers, {SAMPLES - 1} training samples a node; memory of the server's process in MB")
    print("".join(f"{title:>{len(form.format(0.0))}}" for title, form in COLUMNS.values()), flush=True)
    found: dict[int, dict[str, float]] = {}
    for nodes in [int(text) for text in args.nodes.split(",")]:
        with tempfile.TemporaryDirectory() as folder:
            found[nodes] = run(args, nodes, Path(folder) / "out")
        print("".join(form.format(found[nodes][key]) for key, (_, form) in COLUMNS.items()), flush=True)
    most = max(found)
    if 100 not in found or most <= 100:
        return 0
    ratio = found[most]["rounds_own"] / found[100]["rounds_own"]
    print(f"memory of {most} nodes over that of 100: {ratio:.2f} (at most {LIMIT}): {'ok' if ratio <= LIMIT else 'TOO MUCH'}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
