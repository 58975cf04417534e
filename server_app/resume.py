"""May a run go on in a folder, and is a folder free for a new one? Needs nothing heavy: asked before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server_app.rundata import read_object

# What may differ between a run and the run that goes on with it; everything else decides the result.
MAY_CHANGE = {"num-rounds", "out-dir", "state-dir", "resume", "export", "experiment"}
MAY_CHANGE |= {f"fleet.{key}" for key in ("min-nodes", "quorum", "join-timeout", "round-timeout", "return-timeout", "retries")}


class CheckpointError(RuntimeError):
    """A run cannot be gone on with; the message names the folder or file and the difference."""


def read_header(folder: Path) -> dict[str, Any]:
    """Return `run.json` of an earlier run: experiment, lineage, run_config, fingerprint, and nodes (simulated; 0: real ones).

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    header = read_object(folder / "run.json")
    if not isinstance(header.get("run_config"), dict):
        raise CheckpointError(f"resume = {str(folder)!r}: no readable run.json in it; name the folder of an earlier run")
    return header


def done_rounds(folder: Path) -> dict[str, int]:
    """Return run -> its newest complete round, as the names of the checkpoints say."""
    found: dict[str, int] = {}
    for path in (folder / "checkpoint").glob("*/round-*.safetensors"):
        found[path.parent.name] = max(found.get(path.parent.name, 0), int(path.stem.removeprefix("round-")))
    return found


def settings_to_resume(folder: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a bare `resume` goes on with: those of `header`, and as many rounds as were last asked for."""
    asked = read_object(folder / "status.json").get("num_rounds")
    return {**header["run_config"], **({"num-rounds": asked} if isinstance(asked, int) and asked > 0 else {})}


def is_complete(folder: Path, num_rounds: int) -> bool:
    """Return whether a run ended well and each of its strategies has this many rounds behind it, so that nothing is left to do."""
    status, done = read_object(folder / "status.json"), done_rounds(folder)
    runs = status.get("runs") or ()
    return status.get("state") == "completed" and bool(runs) and all(done.get(run, 0) >= num_rounds for run in runs)


def is_free(folder: Path) -> bool:
    """Return whether a new run may use the folder: it holds none, or one that failed before its first round was complete."""
    if not (folder / "run.json").exists():
        return True
    return read_object(folder / "status.json").get("state") == "failed" and not done_rounds(folder)


def check_resume(folder: Path, header: Mapping[str, Any], run_config: Mapping[str, Any], nodes: int | None = None) -> None:
    """Return if a run with this config and this many nodes may go on in the folder of the run that `header` is of.

    Args:
        folder: of the earlier run.
        header: its `run.json`.
        run_config: flat, of the run that is to go on.
        nodes: simulated ones; 0: real ones; None: not known yet.

    Raises:
        CheckpointError: naming each setting, or the number, that differs.
    """
    then = header.get("nodes")
    if then == 0 and nodes:
        raise CheckpointError(f"cannot resume {folder} with simulated nodes: {_of_real_nodes(folder)}")
    before = header["run_config"]
    differences = [
        f"{key}: {before.get(key)!r} then, {run_config.get(key)!r} now"
        for key in sorted({*before, *run_config} - MAY_CHANGE)
        if before.get(key) != run_config.get(key)
    ]
    if None not in (then, nodes) and then != nodes:
        differences.append(f"{_count(then)} then, {_count(nodes)} now: another number splits the data anew")
    if differences:
        raise CheckpointError(f"cannot resume {folder} with other settings: {'; '.join(differences)}")
    wanted, done = int(run_config["num-rounds"]), done_rounds(folder)
    if wanted < max(done.values(), default=0):
        run = max(done, key=lambda name: done[name])
        raise CheckpointError(
            f"num-rounds = {wanted}, but {run} in {folder} has {done[run]} rounds behind it; type num-rounds={done[run]} or more"
        )


def _of_real_nodes(folder: Path) -> str:
    """Return how to go on with a run of real nodes, which hold its private state and its data."""
    if (folder / "nodes").is_dir():
        return "it was run by deploy-local, whose nodes were taken down with their data; start a new run in another folder"
    again = f"resume='{folder}'"
    return (
        f"it is a run of real nodes, which keep its private state; with these nodes connected and the same settings, type: "
        f'flwr run . <your SuperLink> --run-config "{again} ..."'
    )


def _count(nodes: int | None) -> str:
    return f"{nodes} simulated nodes" if nodes else "real nodes"
