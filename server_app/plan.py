"""The options of `heterofleet simulate` -> what to launch, checked before anything starts."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from server_app.launch import Launch
from server_app.overrides import APP_DIR, RunConfig, Scalar, merged, parse_override, read_defaults
from server_app.resume import MAY_CHANGE, check_resume, is_free, read_header, settings_to_resume
from server_app.rundata import read_object
from server_app.settings import NO_TEST, SettingsError

# Settings that may name a path, or a `module:function`, as a source of data.
_SOURCES = ("data.source", "fleet.data", "fedmuscle.public-source")


def plan(
    *,
    nodes: int | None,
    strategy: str | None,
    config: list[str],
    cpus: int,
    gpus: float,
    workers: int,
    out_dir: Path | None,
    experiment: str | None,
    resume: Path | None,
    alone: bool | None,
    resumable: bool = True,
) -> Launch:
    """Return what to launch, after every check that can be made here; nothing is written but the cache of decoded data.

    Args: those of `heterofleet simulate`, and
        resumable: whether the command that asks has `--resume`.

    Raises:
        SettingsError: naming the option or key.
        CheckpointError: the run cannot be gone on with so.
    """
    typed = dict(parse_override(text, read_defaults()) for text in config)
    folder = _folder(typed, out_dir, resume)
    header: dict[str, Any] = read_header(folder) if resume else {}
    if not resume and not is_free(folder):
        again = f"go on with it by --resume {shlex.quote(str(folder))}, or " if resumable else ""
        raise SettingsError(f"--out {folder} already holds a run; {again}name another folder")
    options = {"strategy": strategy, "experiment": experiment, "alone": alone, "resume": str(folder) if resume else None}
    extra: dict[str, Scalar] = {key: value for key, value in options.items() if value is not None}
    extra |= {key: absolute(typed[key]) for key in _SOURCES if key in typed}
    if typed.get("state-dir"):
        extra["state-dir"] = str(Path(str(typed["state-dir"])).expanduser().resolve())
    checked = merged(config, {**extra, "out-dir": str(folder)}, settings_to_resume(folder, header) if resume else None)
    before = header.get("nodes") or read_object(folder / "launch.json").get("nodes") if resume else None
    count = nodes or before or 10
    if resume:
        check_resume(folder, {**header, "nodes": before} if before else header, checked.flat, count)
    _check_resources(checked, count, cpus, gpus, workers)
    warnings: tuple[str, ...] = () if checked.settings.data.test_fraction else (NO_TEST,)
    if not resume:
        from server_app.preflight import check_fleet  # torch: seconds

        warnings += check_fleet(checked, count)
    return Launch(
        out_dir=folder,
        run_config=checked.flat,
        nodes=count,
        cpus=cpus,
        gpus=gpus,
        workers=workers,
        modules=own_modules(checked),
        warnings=warnings,
    )


def command_to_resume(launch: Launch, num_rounds: int = 0) -> str:
    """Return what goes on with a run as it was launched, or to `num_rounds`; what its folder holds is not typed again."""
    kept = settings_to_resume(launch.out_dir, read_header(launch.out_dir))
    wanted = {**launch.run_config, **({"num-rounds": num_rounds} if num_rounds else {})}
    changed = [key for key in sorted(MAY_CHANGE - {"out-dir", "resume", "experiment"}) if wanted.get(key) != kept.get(key)]
    words = [f"-c {shlex.quote(f'{key}={wanted[key]}')}" for key in changed]
    machine = (("cpus", launch.cpus, 1), ("gpus", launch.gpus, 0.0), ("workers", launch.workers, 0))
    words += [f"--{name} {value:g}" for name, value, default in machine if value != default]
    return " ".join(["heterofleet simulate --resume", shlex.quote(str(launch.out_dir)), *words])


def _folder(typed: dict[str, Scalar], out_dir: Path | None, resume: Path | None) -> Path:
    """Return the out-dir, absolute."""
    if typed.get("resume"):
        raise SettingsError(f"-c resume: type --resume {shlex.quote(str(typed['resume']))}, which takes over the settings too")
    options = {"--out": out_dir, "-c out-dir": typed.get("out-dir"), "--resume": resume}
    given = {option: Path(str(path)).expanduser().resolve() for option, path in options.items() if path}
    if len(set(given.values())) > 1:
        raise SettingsError(f"{' and '.join(given)} name different folders; keep one of them")
    return next(iter(given.values()), (Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")).resolve())


def absolute(value: Scalar) -> str:
    """Return a source, or several after commas, with each path that exists here made absolute: the nodes work in another folder."""
    return ",".join(_absolute(part.strip()) for part in str(value).split(","))


def _absolute(text: str) -> str:
    if not text or text == "embedded":
        return text
    path = Path(text).expanduser()
    return str(path.resolve()) if path.exists() else text


def own_modules(checked: RunConfig) -> Path | None:
    """Return the working directory if a `module:function` of the settings lies in it, else None.

    Only then do the nodes look there: a folder on their path can hide a package of the same name.
    """
    names = [*checked.settings.fleet.models, *(str(checked.flat[key]) for key in _SOURCES)]
    names += [value for value in checked.method.model_dump().values() if isinstance(value, str)]
    here = Path.cwd()
    for name in (part.strip() for text in names for part in text.split(",")):
        module = name.partition(":")[0].partition(".")[0]
        if ":" in name and here != APP_DIR and module.isidentifier() and ((here / f"{module}.py").is_file() or (here / module).is_dir()):
            return here
    return None


def _check_resources(checked: RunConfig, nodes: int, cpus: int, gpus: float, workers: int) -> None:
    fleet = checked.settings.fleet
    if fleet.min_nodes > nodes:
        raise SettingsError(
            f"fleet.min-nodes = {fleet.min_nodes}, but --nodes {nodes}: round 1 would never begin; lower one or raise the other"
        )
    if workers and workers < cpus:
        raise SettingsError(f"--workers {workers} is less than --cpus {cpus} of a single node")
    if gpus > 1 and not gpus.is_integer():
        raise SettingsError(f"--gpus {gpus}: a share below 1, or a whole number of GPUs")
    if gpus:
        import torch

        if not torch.cuda.is_available():
            raise SettingsError(f"--gpus {gpus:g}, but torch finds no GPU here; `heterofleet doctor` tells more")
