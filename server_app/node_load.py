"""Whether a node's data, memory and disk suffice: measured on the node, told in a line each."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from server_app.doctor import available_memory
from server_app.node_link import Check
from server_app.node_probe import Measured, Wanted
from server_app.overrides import APP_DIR

# Resident memory of flower-supernode and flower-superexec together on Flower 1.42, as benchmarks/edge_node.py prints it.
FLOWER_BYTES = 260_000_000
_VERSIONS = 3  # of private state: those a resumed run may go back to
_SPARE_DISK = 200_000_000
_SECONDS = 600.0


@dataclass(frozen=True)
class Load:
    """What was found, and the bytes that all processes of the node take together (0: unknown)."""

    checks: list[Check]
    memory: int = 0


def check_load(wanted: Wanted, state_dir: Path, *, service: bool = False) -> Load:
    """Return what training on this node takes, from its own data and one batch of it; nothing is kept but the decoded data.

    Args:
        wanted: who the node is, and the run's settings.
        state_dir: where it will keep private state.
        service: another user will write there, so that this one need not be able to.
    """
    found = _probed(wanted)
    if isinstance(found, Check):
        return Load([found, _disk(state_dir, 0, service)])
    need = FLOWER_BYTES + found.peak_bytes
    epochs = int(wanted.run_config.get("train.local-epochs", 1))
    checks = [_data(found, str(wanted.node_config["data"])), _model(found, epochs), _memory(found, need)]
    return Load([*checks, _disk(state_dir, _VERSIONS * found.weight_bytes, service)], need)


def _probed(wanted: Wanted) -> Measured | Check:
    """Run the probe; what stopped it is a fatal check."""
    path = os.pathsep.join(filter(None, [str(APP_DIR), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "server_app.node_probe"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asdict(wanted)),
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Check("data", f"not read and tried within {_SECONDS:.0f} s", "less data, or a smaller --model", fatal=True)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        if done.returncode < 0:
            return Check("memory", f"one training step was killed (signal {-done.returncode}), most likely for memory", _LESS, fatal=True)
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Check("python", f"a training process cannot start: {last}", "pip install -r requirements-node.txt", fatal=True)
    if "failed" in answer:
        cure = _CURES.get(str(answer["failed"]), "")
        return Check(str(answer["failed"]), str(answer["reason"]), cure, fatal=True)
    fields: dict[str, Any] = answer | {name: tuple(answer[name]) for name in ("shape", "class_names", "lacking")}
    return Measured(**fields)


_LESS = "a smaller --model or --rank-ratio; in the run, a smaller train.batch-size"
_CURES = {
    "data": "--data, or the run's own settings with -c data.KEY=VALUE",
    "memory": _LESS,
    "packages": "pip install -r requirements-node-data.txt",
}


def _data(found: Measured, source: str) -> Check:
    shape = "x".join(map(str, found.shape))
    text = f"{source}: {found.train} samples of {shape} to train on, {found.test} to test on, {found.classes} classes"
    if found.train < 2:
        return Check("data", text, "a node needs two samples at least", fatal=True)
    if not found.lacking:
        return Check("data", text)
    names = [found.class_names[index] if found.class_names else str(index) for index in found.lacking]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return Check("data", f"{text}; none to train on of {shown}")


def _model(found: Measured, epochs: int) -> Check:
    seconds = found.step_seconds * math.ceil(found.train / found.batch) * epochs
    where = f", {found.gpu_bytes / 1e6:.0f} MB on the GPU" if found.gpu_bytes else ""
    step = f"a step of {found.batch} samples takes {found.step_seconds:.2g} s on {found.device}{where}"
    text = f"{found.nets}: {found.weight_bytes / 1e6:.1f} MB; {step}"
    return Check("model", f"{text}, a round's training about {max(1, round(seconds))} s")


def _memory(found: Measured, need: int) -> Check:
    free = available_memory()
    own = found.peak_bytes - found.start_bytes
    text = (
        f"{free / 1e6:.0f} MB free; a training process takes {found.peak_bytes / 1e6:.0f} MB at its peak "
        f"({own / 1e6:.0f} MB of it for data, model and step), Flower about {FLOWER_BYTES / 1e6:.0f} MB beside it"
    )
    return Check("memory", text, f"{need / 1e6:.0f} MB are needed: {_LESS}" if need > free else "")


def _disk(state_dir: Path, state_bytes: int, service: bool) -> Check:
    """Return whether private state can be written and has room."""
    existing = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    if not existing.is_dir() or not (service or os.access(existing, os.W_OK | os.X_OK)):
        return Check("disk", f"{state_dir} cannot be written by this user", "--state-dir with a folder of this user's", fatal=True)
    free = shutil.disk_usage(existing).free
    state = f", private state takes up to {state_bytes / 1e6:.0f} MB a run" if state_bytes else ""
    short = free < state_bytes + _SPARE_DISK
    return Check("disk", f"{state_dir}: {free / 1e6:.0f} MB free{state}", "--state-dir on a disk with more room" if short else "")
