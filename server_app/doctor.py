"""What this machine can carry, and which SuperLink a bare `flwr run` would talk to."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from client_app.profile import home
from server_app.link import healthy
from server_app.overrides import APP_DIR

PACKAGES = ("flwr", "ray", "torch", "torchvision", "flwr-datasets", "numpy", "safetensors")
# Resident memory of a worker before it holds a model: Python, Ray, Flower and torch; and of a CUDA context.
WORKER_BYTES, CONTEXT_BYTES = 450_000_000, 500_000_000
_LOCAL_PORT = 39091


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it (empty: nothing)."""

    name: str
    value: str
    advice: str = ""


@dataclass(frozen=True)
class Need:
    """What training the costliest model of the fleet takes.

    Attributes:
        model: its name.
        bytes: weights, gradients and momentum of it (and of a shared small model beside it), and one batch's activations.
    """

    model: str
    bytes: int


def examine(need: Need) -> list[Finding]:
    """Return all findings about this machine, given what a node needs; a `need` without a model's name: unknown."""
    return [*_versions(), *_machine(need), *_flower(), _disk()]


def costliest(model_names: Iterable[str], *, shared: str, input_shape: tuple[int, ...], classes: int, batch_size: int) -> Need:
    """Return the model that takes most memory in training, with that of `shared` beside it.

    Args:
        model_names: the fleet's models.
        shared: a small model that every node trains beside its own, or an empty string.
        input_shape: (C, H, W) of a sample.
        classes: outputs of the models.
        batch_size: samples of a training step.

    Raises:
        ModelError: one cannot be built.
    """
    from models.cost import summary

    def training_bytes(name: str) -> int:
        cost = summary(name, input_shape, classes)
        return 12 * cost.parameters + batch_size * cost.activation_bytes

    beside = training_bytes(shared) if shared else 0
    return max((Need(name, training_bytes(name) + beside) for name in dict.fromkeys(model_names)), key=lambda need: need.bytes)


def _versions() -> list[Finding]:
    found = [Finding("Python", f"{platform.python_version()} in {sys.prefix}")]
    parts, missing = [], []
    for name in PACKAGES:
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    advice = f"missing: {', '.join(missing)}; pip install -r requirements.txt" if missing else ""
    return [*found, Finding("packages", ", ".join(parts), advice)]


def available_memory() -> int:
    """Return the bytes that new processes can use: the kernel's estimate, and no more than a container's limit leaves."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


def _machine(need: Need) -> list[Finding]:
    import torch

    cores, memory = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, available_memory()
    workers = workers_for(need.bytes, memory, cores)
    findings = [
        Finding("CPU", f"{cores} cores, {platform.machine()}"),
        Finding("memory", f"{memory / 1e9:.1f} GB available"),
    ]
    if need.model:
        text = f"{need.model}: {need.bytes / 1e6:.0f} MB in training, besides {WORKER_BYTES / 1e6:.0f} MB of each worker"
        findings.append(Finding("largest model", text))
    if workers < 1:
        return [*findings, Finding("advice", "too little memory for one node", "smaller fleet.models or train.batch-size")]
    if not torch.cuda.is_available():
        text = f"heterofleet simulate --cpus 1 --workers {workers}"
        return [
            *findings,
            Finding("GPU", "none that torch can use"),
            Finding("advice", text, f"{workers} nodes at work at once, one thread each"),
        ]
    properties = torch.cuda.get_device_properties(0)
    count, share = torch.cuda.device_count(), gpu_share(need.bytes, properties.total_memory)
    at_once = min(workers, math.floor(count / share))
    gpu = Finding("GPU", f"{count} x {properties.name}, {properties.total_memory / 1e9:.0f} GB each")
    text = f"heterofleet simulate --cpus 1 --gpus {share:g} --workers {workers}"
    return [*findings, gpu, Finding("advice", text, f"{at_once} nodes at work at once; without --gpus nodes cannot see the GPU")]


def workers_for(model_bytes: int, memory: int, cores: int) -> int:
    """Return how many workers fit into 80% of the free memory, at most one a core."""
    return min(cores, int(0.8 * memory) // (WORKER_BYTES + model_bytes))


def gpu_share(model_bytes: int, gpu_bytes: int) -> float:
    """Return the share of a GPU for one node: 1/k with k nodes in 90% of its memory, k at most 20.

    Flower takes the share as a soft one: nothing stops a node that uses more.
    """
    fitting = int(0.9 * gpu_bytes) // (CONTEXT_BYTES + model_bytes)
    return math.ceil(100 / min(max(fitting, 1), 20)) / 100


def _flower() -> list[Finding]:
    """Return which SuperLink a bare `flwr run` would use, and whether it would run this checkout's code."""
    config = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser() / "config.toml"
    name, address = _default_connection(config)
    if not address.startswith(":local"):
        value = f"connection {name!r} of {config}: {address}"
        return [Finding("flwr run", value, "a remote SuperLink: its nodes run this app with their own packages")]
    port = int(os.environ.get("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", _LOCAL_PORT))
    if not healthy(port):
        return [Finding("flwr run", f"would start a SuperLink of its own on port {port}")]
    owner = _listener(port)
    if owner is None:
        return [
            Finding(
                "flwr run", f"a SuperLink answers on port {port}; whose it is cannot be seen", "heterofleet simulate uses a private one"
            )
        ]
    pid, folder, python = owner
    differences = []
    if folder.resolve() != APP_DIR:
        differences.append(f"it works in {folder}, not in {APP_DIR}")
    if python.parent.parent.resolve() != Path(sys.prefix).resolve():
        differences.append(f"it runs {python}, not this environment's Python")
    if not differences:
        return [Finding("flwr run", f"the SuperLink of this checkout, process {pid} on port {port}")]
    advice = f"it would run other code than this: stop it with `kill {pid}`, or use heterofleet simulate"
    return [Finding("flwr run", f"a foreign SuperLink, process {pid} on port {port}: {'; '.join(differences)}", advice)]


def _default_connection(config: Path) -> tuple[str, str]:
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8")).get("superlink", {})
    except (OSError, tomllib.TOMLDecodeError):
        return "local", ":local:"
    name = str(table.get("default", "local"))
    entry = table.get(name)
    return name, str(entry.get("address", ":local:")) if isinstance(entry, dict) else ":local:"


def _listener(port: int) -> tuple[int, Path, Path] | None:
    """Return (pid, working directory, Python) of the process that listens on a TCP port, where /proc tells."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            if any(os.readlink(entry) in inodes for entry in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().split(b"\0")
                return int(process.name), Path(os.readlink(process / "cwd")), Path(os.fsdecode(command[0]))
        except OSError:
            continue
    return None


def _disk() -> Finding:
    folder = home()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    advice = "little room for private state; set HETEROFLEET_HOME or state-dir to another disk" if free < 2e9 else ""
    if not existing.is_dir():
        advice = f"{existing} is not a folder; set HETEROFLEET_HOME to one"
    elif not os.access(existing, os.W_OK):
        advice = f"{existing} is not writable; set HETEROFLEET_HOME to a folder that is"
    return Finding("state", f"{folder}, {free / 1e9:.1f} GB free", advice)
