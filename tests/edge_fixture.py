"""What the tests of edge conditions share: what a run left, and replies changed on their way."""

from __future__ import annotations

from flwr.app import RecordDict
from safetensors.torch import load_file

from strategies.messages import decode, encode
from tests.fleet_fixture import grid, rows

BN = "tests.user_models:batch_norm_net"


def shared(out, name="fedmrl"):
    return load_file(out / "shared" / f"{name}.safetensors")


def failures(out):
    return {(f["node"], f["phase"]): f["reason"] for f in rows(out, "failure")}


def tampering(settings, change, nodes=3):
    """Return a Grid on which `change(node, content)` replaces the reply of node 1001 to every training message."""
    the_grid = grid(settings, nodes)
    the_grid.tamper = lambda kind, node, content: change(content) if kind == "train" and node == 1001 else content
    return the_grid


def with_tensors(content, change):
    return RecordDict({**dict(content), **encode(change(decode(content)))})
