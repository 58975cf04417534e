"""A small FedHM federation for tests, and one node of it without messages."""

import torch
from safetensors.torch import load_file

import strategies
import tasks
from client_app.profile import NodeProfile
from strategies.messages import Payload, decode
from strategies.seeds import derive_seed
from strategies.trainer import NodeContext
from tests.fleet_fixture import config as base
from tests.fleet_fixture import rows

GROUPED = "tests.fedhm.nets:grouped"


def config(tmp_path, **changes):
    """Return a run config: MLP of which one layer is cut, ratios 1, 1/4 and 1/8, plain L2 off."""
    chosen = {"strategy": "fedhm", "fedhm__model": "mlp", "fleet__rank_ratios": "1.0,0.25,0.125", "data__shared_test": 30}
    return base(tmp_path, **{**chosen, "train__learning_rate": 0.1, **changes})


def node(run_config, index=0, nodes=3):
    """Return the trainer of simulated node `index`."""
    settings, method = strategies.settings_of(run_config)
    profile = NodeProfile.of({"partition-id": index, "num-partitions": nodes}, settings)
    task = tasks.load(profile, settings)
    seed = derive_seed(settings.seed, profile.node_name)
    return strategies.trainer_class("fedhm")(NodeContext(profile, settings, method, task, torch.device("cpu"), seed))


def payloads(the_grid, kind="train"):
    """Return (node id, payload) of each message sent."""
    return [(n, Payload(decode(c), dict(c["payload"]))) for k, n, c in the_grid.sent if k == kind]


def updates(the_grid):
    """Return (node id, tensors) of each training reply."""
    return [(n, decode(c)) for k, n, c in the_grid.received if k == "train"]


def full(out, name="fedhm"):
    """Return the shared tensors at the end."""
    return load_file(out / "shared" / f"{name}.safetensors")


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def ratios_by_round(out):
    """Return (round, node) -> rank ratio with which it trained."""
    return {(r["round"], r["node"]): r["rank_ratio"] for r in rows(out, "node") if "rank_ratio" in r}
