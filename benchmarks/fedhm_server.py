"""FedHM's server: the largest resident memory during a round of 10 and of 100 nodes, in full models (ResNet-18, 44.7 MB).

    python benchmarks/fedhm_server.py [--nodes 10 100]

Five ratios in turn, 1 among them; nodes send back what they got. Above the memory at the round's start, when the server holds its
model and the factors of it:

- paper, delta: the method's half alone, with one reply at a time;
- messages: the whole server as it runs in deployment, with the engine, its outgoing messages and the replies of one pull; what
  has been sent lies in a folder, where the SuperLink, another process, would hold it, serialised and read back as Flower does it.

glibc keeps freed blocks of up to 32 MB for later, so that "usual malloc" depends on what was freed before. "returned" is with
MALLOC_MMAP_THRESHOLD_=4194304: freed blocks of more than 4 MB go back at once, and what is counted is what the server needs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

import strategies
from benchmarks.fedhm_tiers import CONFIG, MB, RATIOS, model, settings, status
from client_app.protocol import APP_DIR, REPORT, fingerprint
from server_app import app
from server_app.inprocess import SUPERLINK, InProcessGrid
from strategies.fedhm.hybrid import state_of
from strategies.fedhm.tiers import Tier
from strategies.fleet import Node
from strategies.messages import Update

FACTS = {"input_shape": "3,32,32", "num_outputs": 10, "class_names": "", "num_train": 10}


class Server(InProcessGrid):
    """Nodes that send back what they got; notes memory at the start of each round and at its end."""

    def __init__(self, count: int, config: dict[str, Any], folder: Path) -> None:
        full, self.folder = model(), folder
        self.sent: dict[str, tuple[Any, str, list[str]]] = {}  # message id -> metadata, the content's object, all its objects
        self.tables = {ratio: Tier.of(full, ratio, CONFIG).table for ratio in RATIOS[1:]}
        super().__init__(self.reply, [{}] * count, config)  # type: ignore[arg-type]
        self.peaks: list[tuple[float, float]] = []  # of the round that ended, at the start of the next
        self.answering = False

    def reply(self, message: Message, context: Context) -> Message:
        index, kind = message.metadata.dst_node_id - 1000, message.metadata.message_type
        ratio = RATIOS[1:][index % len(self.tables)] if index % 5 else 1.0
        said: dict[str, Any] = {"fingerprint": fingerprint(), "app_dir": str(APP_DIR), "node_name": f"n{index:03d}", "num_examples": 10}
        if kind == "query.describe":
            table = self.tables.get(ratio) or Tier.of(model(), 1.0, CONFIG).table
            said |= {**FACTS, "rank_ratio": ratio, "ranks": table, "model": "resnet18", "num_partitions": 0}
        content = RecordDict({key: message.content[key] for key in ("arrays", "dtypes") if kind == "train"})
        content[REPORT] = ConfigRecord(said)
        return Message(content, reply_to=message)

    def accept(self, key: str, message: Message) -> None:
        with no_object_id_recompute():
            objects = get_all_nested_objects(message.content)
            for name, value in objects.items():
                if not (self.folder / name).exists():
                    (self.folder / name).write_bytes(value.deflate())
            self.sent[key] = (message.metadata, message.content.object_id, list(objects))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answer(self.read(*self.sent.pop(key))) for key in message_ids if key in self.sent]

    def read(self, metadata: Any, content: str, objects: list[str]) -> Message:
        """Return the message that was sent."""
        found = inflate_object_from_contents(content, {name: (self.folder / name).read_bytes() for name in objects})
        return make_message(metadata=metadata, content=found)  # type: ignore[arg-type]

    def answer(self, message: Message) -> Message:
        self.answering = True
        try:
            return super().answer(message)
        finally:
            self.answering = False

    def get_node_ids(self) -> list[int]:
        if not self.answering:  # the engine asks who is here: the start of a round
            self.peaks.append((peak(), start()))
        return list(self.contexts)


def with_messages(count: int, dtype: str) -> float:
    """Return the larger peak of the second and third round above the round's start, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"num-rounds": 4, "eval-every": 0, "out-dir": folder, "fleet.min-nodes": count, "transport.dtype": dtype}
        config = settings((1.0,), **asked)
        (store := Path(folder, "superlink")).mkdir()
        grid = Server(count, config, store)
        app.main(grid, Context(grid.run.run_id, SUPERLINK, {}, RecordDict(), config))
    return max(high - base for (_, base), (high, _) in pairwise(grid.peaks[-3:]))


def alone(count: int, aggregation: str) -> tuple[float, float]:
    """Return the peaks of folding and of the round's end above the round's start, in MB, in the second round."""
    chosen, method = strategies.settings_of(settings(RATIOS, **{"fedhm.aggregation": aggregation}))
    half = strategies.strategy_class("fedhm")(chosen, method, SimpleNamespace(run="fedhm", checkpoint_round=0), None)
    bare = [Node(f"n{i:03d}", i, {**FACTS, "rank_ratio": RATIOS[i % len(RATIOS)]}) for i in range(count)]
    half.build_for(bare)
    half._here = [Node(n.name, n.node_id, {**n.facts, "ranks": half.tier(n.facts["rank_ratio"]).table}) for n in bare]
    half.prepare(half._here)
    found = (0.0, 0.0)
    for server_round in (1, 2):
        base = start()
        half.begin_round(server_round, half._here)
        for node in half._here if server_round == 2 else half._here[:10]:
            half.fold(node, Update({name: t.clone() for name, t in half.payload_for(node).tensors.items()}, 10))
        folding = peak()
        reset_peak()
        half.end_round()
        found = (folding - base, peak() - base)
    return found


def show_server(counts: list[int]) -> None:
    """Print the server's memory above the start of a round, in full models."""
    one = sum(t.numel() * t.element_size() for t in state_of(model()).values()) / MB
    print(f"\nserver, in full models of {one:.1f} MB above the start of the round")
    print("| nodes | what | folding, usual malloc | end of the round | folding, returned | end of the round |")
    print("|---|---|---|---|---|---|")
    for count in counts:
        for what in ("paper", "delta", "messages", "messages-float16"):
            figures = [value / one for returned in (False, True) for value in child(count, what, returned=returned)]
            print(f"| {count} | {what} | " + " | ".join(f"{value:.2f}" if value else "-" for value in figures) + " |", flush=True)


def child(count: int, what: str, *, returned: bool) -> tuple[float, float]:
    """Return what a fresh process measures."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    if returned:
        environment |= {"MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "4194304"}
    command = [sys.executable, __file__, "--nodes", f"{count}", "--what", what]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    first, second = json.loads(said.splitlines()[-1])
    return first, second


def start() -> float:
    """Begin anew with `peak` and return the resident memory in MB, without what malloc kept of freed blocks at the end of its heap."""
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    return status("VmRSS:")


def peak() -> float:
    """Return the largest since `reset_peak`, in MB."""
    return status("VmHWM:")


def reset_peak() -> None:
    """Begin anew with `peak`."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[10, 100])
    parser.add_argument("--what", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if not options.what:
        show_server(options.nodes)
    elif options.what.startswith("messages"):
        print(json.dumps([with_messages(options.nodes[0], options.what.partition("-")[2] or "float32"), 0.0]))
    else:
        print(json.dumps(alone(options.nodes[0], options.what)))


if __name__ == "__main__":
    main()
