"""`heterofleet deploy-local`: what it will run, the run, and what it took, Flower's byte counts beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client_app.profile import NodeProfile
from server_app.deploy import Deployment, deployment
from server_app.launch import Follower, Launch, closing_status
from server_app.overrides import RunConfig, Scalar, merged
from server_app.plan import plan
from server_app.rundata import RunData, read_run
from server_app.settings import SettingsError

_ROUNDS = 3  # an exchange takes seconds here, not the milliseconds of a simulation


@dataclass(frozen=True)
class Plan:
    """What to deploy, checked before anything starts.

    Attributes:
        config: the whole run config.
        launch: what `heterofleet simulate` would launch: the folder, the user's own modules, warnings.
        names: of the nodes.
        secure: TLS and registered keys.
    """

    config: RunConfig
    launch: Launch
    names: tuple[str, ...]
    secure: bool

    @property
    def out_dir(self) -> Path:
        """Absolute; gets the results, `logs/` and `nodes/<name>/`."""
        return self.launch.out_dir


@dataclass(frozen=True)
class Cost:
    """What a deployed run took.

    Attributes:
        exchanges: messages out to all nodes and their replies, in all rounds.
        seconds: of all of them together.
        seconds_train: of the slowest node's training in each round, summed; the rest of `seconds` is Flower's and the link's.
        down, up: bytes (by our count, by Flower's) to the nodes and from them.
    """

    exchanges: int
    seconds: float
    seconds_train: float
    down: tuple[int, int]
    up: tuple[int, int]


def plan_deployment(*, nodes: int, strategy: str | None, rounds: int | None, config: list[str], secure: bool, out_dir: Path | None) -> Plan:
    """Return what to deploy, after the checks that `heterofleet simulate` makes for as many nodes.

    Raises:
        SettingsError: naming the option or key.
    """
    if any(text.partition("=")[0].strip() == "resume" for text in config):
        raise SettingsError("resume is for nodes that still have their state; deploy-local starts new ones: leave it out")
    first, last = [f"num-rounds={_ROUNDS}", "alone=false", f"fleet.min-nodes={nodes}"], [f"num-rounds={rounds}"] if rounds else []
    launch = plan(
        nodes=nodes,
        strategy=strategy,
        config=[*first, *config, *last],
        cpus=1,
        gpus=0.0,
        workers=0,
        out_dir=out_dir,
        experiment=None,
        resume=None,
        alone=None,
        resumable=False,
    )
    return Plan(merged([], {}, launch.run_config), launch, tuple(f"node-{number}" for number in range(1, nodes + 1)), secure)


def deploy(wanted: Plan, on_status: Callable[[dict[str, Any]], None] = lambda status: None) -> Cost:
    """Start the fleet, run to the end, take everything down, and return what it took.

    Raises:
        SettingsError: the data cannot be divided among the nodes.
        LaunchError: the run did not complete.
        KeyboardInterrupt: interrupted; everything has been taken down.
    """
    wanted.out_dir.mkdir(parents=True, exist_ok=True)
    logs, keys, modules = wanted.out_dir / "logs", len(wanted.names), wanted.launch.modules
    with closing_status(wanted.out_dir), deployment(logs, keys=keys, secure=wanted.secure, modules=modules) as made:
        run_config = start_fleet(made, wanted)
        follower = Follower(replace(wanted.launch, run_config=run_config, nodes=0), made, on_status)
        follower.follow()
    state = follower.state
    return cost_of(read_run(wanted.out_dir), down=state.bytes_sent, up=state.bytes_recv)


def start_fleet(made: Deployment, wanted: Plan) -> dict[str, Scalar]:
    """Write each node's share of the data, start the SuperLink and all nodes, and return the run config to submit."""
    from server_app.deploy_data import write_shards

    count = len(wanted.names)
    simulated = [NodeProfile.of({"partition-id": number, "num-partitions": count}, wanted.config.settings) for number in range(count)]
    made.start_superlink()
    shards = [made.home(name) / "data.parquet" for name in wanted.names]
    classes = write_shards(wanted.config.settings, simulated, shards)
    for name, profile, shard in zip(wanted.names, simulated, shards, strict=True):
        made.register(name, name)
        state = wanted.out_dir / "nodes" / name
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        config: dict[str, Scalar] = {"name": name, "model": profile.model, "rank-ratio": profile.rank_ratio}
        made.start_node(name, {**config, "data": str(shard), "state-dir": str(state)}, key=name if wanted.secure else "")
    made.wait_online(count)
    return {**wanted.config.flat, "data.num-classes": classes}


def cost_of(run: RunData, *, down: int, up: int) -> Cost:
    """Return what the rows of a run say, beside Flower's bytes to (`down`) and from (`up`) the nodes."""
    rounds = [row for by_round in run.rounds.values() for row in by_round.values()]
    slowest = [_slowest(by_node) for by_round in run.nodes.values() for by_node in by_round.values()]
    return Cost(
        exchanges=sum(row["exchanges"] for row in rounds),
        seconds=sum(row["seconds_exchanges"] for row in rounds),
        seconds_train=sum(slowest),
        down=(sum(run.traffic(name, "bytes_down") for name in run.runs), down),
        up=(sum(run.traffic(name, "bytes_up") for name in run.runs), up),
    )


def _slowest(rows: Mapping[str, Mapping[str, Any]]) -> float:
    return max((float(row.get("seconds_train", 0.0)) for row in rows.values()), default=0.0)
