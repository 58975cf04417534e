"""`heterofleet deploy-local`: what it will run, the run, and what it took, Flower's byte counts beside ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.deploy import Deployment, deployment
from server_app.launch import Follower, Launch, closing_status
from server_app.overrides import RunConfig, Scalar, merged
from server_app.rundata import RunData, read_run
from server_app.settings import SettingsError

_ROUNDS = 3  # an exchange takes seconds here, not the milliseconds of a simulation


@dataclass(frozen=True)
class Plan:
    """What to deploy, checked before anything starts.

    Attributes:
        config: the whole run config.
        out_dir: absolute; gets the results, `logs/` and `nodes/<name>/state`.
        names: of the nodes.
        secure: TLS and registered keys.
    """

    config: RunConfig
    out_dir: Path
    names: tuple[str, ...]
    secure: bool


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
    """Return what to deploy.

    Raises:
        SettingsError: naming the option or key.
    """
    folder = (out_dir or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")).expanduser().resolve()
    if (folder / "run.json").exists():
        raise SettingsError(f"--out {folder} already holds a run; name another folder")
    options = {"strategy": strategy, "num-rounds": rounds}
    typed: dict[str, Scalar] = {key: value for key, value in options.items() if value is not None}
    first = [f"num-rounds={_ROUNDS}", "alone=false", f"fleet.min-nodes={nodes}"]
    checked = merged([*first, *config], {**typed, "out-dir": str(folder)})
    if checked.settings.resume:
        raise SettingsError("resume is for runs whose nodes still have their state; deploy-local starts new ones: leave it out")
    if checked.settings.fleet.min_nodes > nodes:
        raise SettingsError(f"fleet.min-nodes = {checked.settings.fleet.min_nodes}, but --nodes {nodes}: round 1 would never begin")
    return Plan(checked, folder, tuple(f"node-{number}" for number in range(1, nodes + 1)), secure)


def deploy(plan: Plan, on_status: Callable[[dict[str, Any]], None] = lambda status: None) -> Cost:
    """Start the fleet, run to the end, take everything down, and return what it took.

    Raises:
        SettingsError: the data cannot be divided among the nodes.
        LaunchError: the run did not complete.
        KeyboardInterrupt: interrupted; everything has been taken down.
    """
    plan.out_dir.mkdir(parents=True, exist_ok=True)
    with closing_status(plan.out_dir), deployment(plan.out_dir / "logs", keys=len(plan.names), secure=plan.secure) as made:
        run_config = start_fleet(made, plan)
        follower = Follower(Launch(out_dir=plan.out_dir, run_config=run_config, nodes=0), made, on_status)
        follower.follow()
    state = follower.state
    return cost_of(read_run(plan.out_dir), down=state.bytes_sent, up=state.bytes_recv)


def start_fleet(made: Deployment, plan: Plan) -> dict[str, Scalar]:
    """Write each node's share of the data, start the SuperLink and all nodes, and return the run config to submit."""
    from server_app.deploy_data import write_shards

    settings, fleet = plan.config.settings, plan.config.settings.fleet
    made.start_superlink()
    shards = [made.home(name) / "data.parquet" for name in plan.names]
    classes = write_shards(settings, shards)
    for index, (name, shard) in enumerate(zip(plan.names, shards, strict=True)):
        made.register(name, name)
        state = plan.out_dir / "nodes" / name
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        config: dict[str, Scalar] = {
            "name": name,
            "model": fleet.models[index % len(fleet.models)],
            "rank-ratio": fleet.rank_ratios[index % len(fleet.rank_ratios)],
            "data": str(shard),
            "state-dir": str(state),
        }
        made.start_node(name, config, key=name if plan.secure else "")
    made.wait_online(len(plan.names))
    return {**plan.config.flat, "data.num-classes": classes}


def cost_of(run: RunData, *, down: int, up: int) -> Cost:
    """Return what the rows of a run say, beside Flower's bytes to (`down`) and from (`up`) the nodes."""
    rounds = [row for by_round in run.rounds.values() for row in by_round.values()]
    slowest = [_slowest(by_node) for by_round in run.nodes.values() for by_node in by_round.values()]
    return Cost(
        exchanges=sum(row["exchanges"] for row in rounds),
        seconds=sum(row["seconds_exchanges"] for row in rounds),
        seconds_train=sum(slowest),
        down=(sum(row["bytes_down"] for row in rounds), down),
        up=(sum(row["bytes_up"] for row in rounds), up),
    )


def _slowest(rows: Mapping[str, Mapping[str, Any]]) -> float:
    return max((float(row.get("seconds_train", 0.0)) for row in rows.values()), default=0.0)
