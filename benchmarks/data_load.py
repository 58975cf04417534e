"""Reading the data of many virtual nodes, over decoding the set once.

    python benchmarks/data_load.py [--source embedded] [--nodes 100] [--processes 1] [--partitioner dirichlet]

Each case starts with an empty cache. "decode once" fills the cache; "split" computes the partition; "nodes, cache there" loads every
node's train, validation and test tensors, in one process or in several that are already running; "nodes from nothing" does all three.
The claim is that the last takes at most 1.5 times the first. Importing the partitioners, once in the process that splits, is its own
line: it takes the same seconds whatever the data.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tasks
from client_app.profile import NodeProfile
from server_app.settings import Settings
from tasks.partitions import partition_indices
from tasks.sources import open_source

LIMIT = 1.5


def load_nodes(settings: Settings, partitions: list[int], num_partitions: int) -> int:
    """Load each node as a virtual node does; return the number of samples."""
    total = 0
    for partition in partitions:
        profile = NodeProfile.of({"partition-id": partition, "num-partitions": num_partitions}, settings)
        task = tasks.load(profile, settings)
        total += len(task.train) + len(task.val) + len(task.test)
    return total


def load_in_processes(settings: Settings, num_partitions: int, processes: int) -> tuple[float, int]:
    """Return (seconds, samples) of all nodes spread over `processes` that have started and imported."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(abs, range(processes), chunksize=1)
        shares = [(settings, list(range(start, num_partitions, processes)), num_partitions) for start in range(processes)]
        start = time.perf_counter()
        total = sum(pool.starmap(load_nodes, shares, chunksize=1))
        return time.perf_counter() - start, total


def timed(function, *args) -> tuple[float, object]:
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", "--data", default="embedded", help="as data.source")
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--partitioner", default="dirichlet")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings.model_validate({"data": {"source": args.source, "partitioner": args.partitioner}})
    with tempfile.TemporaryDirectory() as home:
        os.environ["HETEROFLEET_HOME"] = home
        decode, source = timed(open_source, args.source, settings.data)
        imports, _ = timed(importlib.import_module, "flwr_datasets.partitioner")
        split, _ = timed(partition_indices, source, settings, args.nodes)
        if args.processes == 1:
            load, total = timed(load_nodes, settings, list(range(args.nodes)), args.nodes)
        else:
            load, total = load_in_processes(settings, args.nodes, args.processes)
    everything = decode + split + load
    ratio = everything / decode
    print(f"source {args.source}, {args.nodes} nodes, {args.processes} process(es), {total} samples on nodes, {args.partitioner}")
    print(f"{'':32}{'seconds':>9}{'over decoding':>16}")
    print(f"{'import of the partitioners':32}{imports:9.2f}")
    for name, seconds in (("decode once", decode), ("split", split), ("nodes, cache there", load), ("nodes from nothing", everything)):
        print(f"{name:32}{seconds:9.2f}{seconds / decode:16.3f}")
    print(f"ratio {ratio:.3f} (at most {LIMIT}): {'ok' if ratio <= LIMIT else 'TOO SLOW'}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
