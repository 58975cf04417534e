"""One training step of a node in a process of its own, as Flower would start one: `python -m server_app.node_probe`.

Reads a `Wanted` as JSON from stdin and writes a `Measured`, or `{"failed": what, "reason": text}`, as JSON to stdout.
It is a process of its own so that the command that asks stays small on machines with little memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from client_app.profile import NodeProfile
    from server_app.settings import Section, Settings
    from tasks import Task


@dataclass(frozen=True)
class Wanted:
    """What to measure: the node's config as Flower would hand it over, and the run config."""

    node_config: dict[str, str | float]
    run_config: dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Measured:
    """What a training process of this node holds and does.

    Attributes:
        shape: of a sample.
        train, test: samples; what validation takes is in neither.
        classes: outputs of the model.
        class_names: may be empty.
        lacking: numbers of the classes without a training sample.
        nets: what is trained, such as "cnn1 and cnn5".
        device: "cpu" or "cuda".
        weight_bytes: of all nets.
        start_bytes, peak_bytes: resident memory with all imports, and after two steps.
        gpu_bytes: at most held on the GPU.
        batch: samples of a step.
        step_seconds: of the second step.
        cache_bytes: of the decoded data on disk.
    """

    shape: tuple[int, ...]
    train: int
    test: int
    classes: int
    class_names: tuple[str, ...]
    lacking: tuple[int, ...]
    nets: str
    device: str
    weight_bytes: int
    start_bytes: int
    peak_bytes: int
    gpu_bytes: int
    batch: int
    step_seconds: float
    cache_bytes: int


def measure(wanted: Wanted) -> Measured:
    """Return what was measured.

    Raises:
        DataError: the node's data cannot be used.
        ModelError: a model cannot be built.
        ValueError: cuda is asked for and there is none.
    """
    import torch

    import client_app.app  # noqa: F401  (what a training process imports)
    import strategies
    import tasks
    from client_app.profile import NodeProfile

    settings, method = strategies.settings_of(wanted.run_config)
    strategies.trainer_class(settings.strategy)
    profile = NodeProfile.of(wanted.node_config, settings)
    torch.set_num_threads(settings.train.threads)
    start = peak_resident()
    task = tasks.load(profile, settings)
    device = _device(profile.device)
    nets = _nets(profile, settings, method, task)
    seconds = _step(nets, task, settings, device)
    present = set(task.train.targets.unique().tolist())
    return Measured(
        shape=tuple(task.input_shape),
        train=len(task.train),
        test=len(task.test),
        classes=task.num_outputs,
        class_names=task.class_names,
        lacking=tuple(sorted(set(range(task.num_outputs)) - present)),
        nets=" and ".join(name for name, _ in nets),
        device=str(device),
        weight_bytes=sum(t.numel() * t.element_size() for _, net in nets for t in net.state_dict().values()),
        start_bytes=start,
        peak_bytes=peak_resident(),
        gpu_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        batch=min(settings.train.batch_size, len(task.train)),
        step_seconds=seconds,
        cache_bytes=_cache_bytes(profile, settings),
    )


def peak_resident() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    try:
        # Not ru_maxrss, which a new process takes over from the one that started it.
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def _device(wanted: str) -> torch.device:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU; type --device cpu, or install torch with CUDA")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _nets(profile: NodeProfile, settings: Settings, method: Section, task: Task) -> list[tuple[str, Any]]:
    """Return what the run's strategy trains on this node: its own model or the method's, cut to its ratio, a small one beside it."""
    import models

    own = str(getattr(method, "model", "") or profile.model)
    names = [own, *filter(None, [str(getattr(method, "small_model", ""))])]
    nets: list[tuple[str, Any]] = [(name, models.build(name, input_shape=task.input_shape, num_outputs=task.num_outputs)) for name in names]
    if settings.strategy == "fedhm" and profile.rank_ratio < 1:
        from strategies.fedhm.config import Config
        from strategies.fedhm.tiers import Tier

        if isinstance(method, Config):
            full = nets[0][1]
            nets[0] = f"{own} at {profile.rank_ratio:g}", Tier.of(full, profile.rank_ratio, method).hybrid(full)
    return nets


def _step(nets: list[tuple[str, Any]], task: Task, settings: Settings, device: torch.device) -> float:
    """Take two training steps of all nets on real samples; return the seconds of the second."""
    import torch

    from client_app.training import channels_last, sgd

    train, seconds = settings.train, 0.0
    modules = [net.to(device).train() for _, net in nets]
    parameters = [parameter for net in modules for parameter in net.parameters()]
    optimizer = sgd(parameters, rate=1e-9, momentum=train.momentum, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(min(train.batch_size, len(task.train)))
    for _ in range(2):
        began = time.perf_counter()
        optimizer.zero_grad()
        batch = channels_last(task.prepare(task.train.inputs[index].to(device), True, generator))
        targets = task.train.targets[index].to(device)
        torch.stack([task.loss(net(batch), targets) for net in modules]).sum().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return seconds


def _cache_bytes(profile: NodeProfile, settings: Settings) -> int:
    from tasks.cache import cache_root
    from tasks.sources import open_source

    folder = cache_root() / open_source(profile.data or settings.data.source, settings.data).key
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    """Answer on stdout; what is printed meanwhile goes to stderr."""
    answer, sys.stdout = sys.stdout, sys.stderr
    from models.registry import ModelError
    from server_app.settings import SettingsError
    from tasks import DataError

    what = "model"
    try:
        found: dict[str, Any] = asdict(measure(Wanted(**json.load(sys.stdin))))
    except (DataError, SettingsError, ModelError, ValueError) as error:
        kinds = {DataError: "data", SettingsError: "settings", ModelError: "model"}
        what = next((name for kind, name in kinds.items() if isinstance(error, kind)), "device")
        found = {"failed": what, "reason": str(error)}
    except ImportError as error:
        found = {"failed": "packages", "reason": str(error)}
    except MemoryError as error:
        found = {"failed": "memory", "reason": str(error) or "not enough"}
    json.dump(found, answer)


if __name__ == "__main__":
    main()
