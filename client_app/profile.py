"""Who this node is: the one reader of Flower's `node_config`.

In deployment a node says who it is with `flower-supernode --node-config`; in simulation Flower gives
exactly `partition-id` and `num-partitions`, and the rest comes from the run config's fleet tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server_app.settings import Settings, nearest

EXAMPLE = """--node-config 'name="pi-3" model="cnn1" data="/srv/pictures" state-dir="/var/lib/heterofleet"'"""
_SIMULATED = {"partition-id", "num-partitions"}


def simulated_partitions(node_config: Mapping[str, Any]) -> int:
    """Return how many nodes Flower simulates, or 0 for a real node: a simulated one is told exactly two numbers."""
    return int(node_config["num-partitions"]) if set(node_config) == _SIMULATED else 0


class ProfileError(ValueError):
    """`node_config` is missing, unknown or wrong; the message shows the line to type."""


class NodeProfile(BaseModel):
    """One node, frozen. Keys of `node_config` are these names in kebab-case (`name` for node_name).

    Attributes:
        node_name: stable name; names files and seeds. Letters, digits, dot, dash, underscore.
        partition: shard of the data source; None where the node reads its own `data`.
        num_partitions: shards of that source in all; None as above.
        fleet_size: nodes that Flower simulates; 0 for a real node.
        model: name for `models.build`.
        rank_ratio: kept rank over full rank, in (0, 1].
        device: "auto", "cpu" or "cuda".
        data: the node's own source (folder, file, Hugging Face name); empty: the run config's.
        state_dir: where private state is kept; absolute after `of`.
        simulated: True where Flower simulates this node.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    node_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    partition: Annotated[int | None, Field(ge=0)] = None
    num_partitions: Annotated[int | None, Field(ge=1)] = None
    fleet_size: Annotated[int, Field(ge=0)] = 0
    model: str
    rank_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda)$")] = "auto"
    data: str = ""
    state_dir: str
    simulated: bool = False

    @classmethod
    def of(cls, node_config: Mapping[str, Any], settings: Settings) -> NodeProfile:
        """Return the profile from `node_config` first, else from the fleet tables by partition.

        Raises:
            ProfileError: with the `--node-config` to type.
        """
        known = {"name", "partition-id", "num-partitions", "model", "rank-ratio", "device", "data", "state-dir"}
        for key in node_config:
            if key not in known:
                raise ProfileError(f"node-config key {key!r} is unknown{nearest(key, known)}; for example: {EXAMPLE}")
        partition = node_config.get("partition-id")
        if partition is None and not node_config.get("name"):
            raise ProfileError(f"this node has no name; start flower-supernode with, for example: {EXAMPLE}")
        if partition is None and not node_config.get("data"):
            raise ProfileError(f"node {node_config['name']!r} has neither data nor partition-id; for example: {EXAMPLE}")
        fleet, index, simulated = settings.fleet, int(partition or 0), simulated_partitions(node_config)
        own_data, shard, shards = str(node_config.get("data", "")), partition, node_config.get("num-partitions")
        if simulated and fleet.data:
            own_data, shard, shards = _share(fleet.data, index, simulated)
        state_dir = node_config.get("state-dir") or settings.state_dir or str(home() / "state")
        try:
            return cls(
                node_name=str(node_config.get("name") or f"partition-{partition}"),
                partition=shard,
                num_partitions=shards,
                fleet_size=simulated,
                model=str(node_config.get("model") or fleet.models[index % len(fleet.models)]),
                rank_ratio=node_config.get("rank-ratio", fleet.rank_ratios[index % len(fleet.rank_ratios)]),
                device=str(node_config.get("device", "auto")),
                data=own_data,
                state_dir=str(Path(state_dir).expanduser().resolve()),
                simulated=simulated > 0,
            )
        except ValidationError as error:
            lines = [f"{_as_typed(str(e['loc'][0]))} = {e['input']!r}: {_reason(e)}" for e in error.errors()]
            raise ProfileError("node-config: " + "; ".join(lines) + f"; for example: {EXAMPLE}") from None


def _as_typed(field: str) -> str:
    """Return the key of `node_config` that a field is read from."""
    return {"node_name": "name", "partition": "partition-id"}.get(field, field.replace("_", "-"))


def _reason(issue: Any) -> str:
    """Return what is wrong with a value; a pattern in words."""
    if issue["type"] != "string_pattern_mismatch":
        return str(issue["msg"])
    if issue["loc"][0] == "device":
        return "type auto, cpu or cuda"
    return "type 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit"


def _share(sources: tuple[str, ...], index: int, nodes: int) -> tuple[str, int, int]:
    """Return the source of simulated node `index` (cyclically), its number among the nodes of that source, and how many they are."""
    own = sources[index % len(sources)]
    fellows = [other for other in range(nodes) if sources[other % len(sources)] == own]
    return own, fellows.index(index) if index in fellows else index, len(fellows)


def home() -> Path:
    """Return the folder for state, caches and runs when no other is named: $HETEROFLEET_HOME or ~/.heterofleet."""
    return Path(os.environ.get("HETEROFLEET_HOME") or "~/.heterofleet").expanduser().resolve()


def safe_name(text: str) -> str:
    """Return `text` as one file-name part: anything but letters, digits, dot, dash, underscore becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"
