"""What the commands share: consoles, options, how errors are told and how signals stop a run."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from server_app.overrides import RunConfig

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Overrides = Annotated[list[str] | None, typer.Option("--config", "-c", metavar="KEY=VALUE", help="A run-config key; repeat it for more.")]
Nodes = Annotated[int, typer.Option("--nodes", "-n", min=1, help="Simulated nodes.")]
Shape = Annotated[str, typer.Option("--input-shape", metavar="C,H,W", help="Shape of a sample; by default that of data.source.")]
Classes = Annotated[int, typer.Option("--classes", min=0, help="Outputs of the models; by default those of data.source.")]


class Stopped(KeyboardInterrupt):
    """A signal asked for the end; args[0] is its number."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what a user can mend into one line and exit code 2 (settings, data, folders) or 1 (a run that failed)."""
    from server_app.launch import LaunchError
    from server_app.resume import CheckpointError
    from server_app.rundata import RunFolderError
    from server_app.settings import SettingsError

    try:
        yield
    except (SettingsError, RunFolderError, CheckpointError) as error:
        fail(str(error), 2)
    except LaunchError as error:
        fail(str(error), 1)


def fail(reason: str, code: int) -> NoReturn:
    """Print the reason and end with this exit code."""
    err.print(f"[bold red]heterofleet:[/bold red] {literal(reason)}", soft_wrap=True)
    raise typer.Exit(code)


def literal(text: str) -> str:
    """Return `text` so that rich prints it as it is."""
    from rich.markup import escape

    return escape(text)


def make_folder(folder: Path, option: str) -> None:
    """Make the folder if it is missing; raises SettingsError where nothing can be written into it."""
    from server_app.settings import SettingsError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(f"{option} {shlex.quote(str(folder))} cannot be written: {error.strerror}") from error


def find_own_modules() -> None:
    """Let a `module:function` of the working directory be found, after all that is installed."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def catch_signals() -> dict[signal.Signals, Any]:
    """Let SIGTERM and a closed terminal stop a run as Ctrl-C does; return the handlers before. A `nohup` stays in force."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, stop) for number in wanted}


def checked(overrides: list[str] | None) -> RunConfig:
    """Return the run config of `-c` options; raises SettingsError."""
    from server_app.overrides import merged

    return merged(overrides or [], {})


def shape_of(input_shape: str, classes: int, config: RunConfig) -> tuple[tuple[int, ...], int]:
    """Return shape and outputs as typed; what was not typed is that of the data source."""
    from server_app.settings import SettingsError

    try:
        shape = tuple(int(part) for part in input_shape.split(",")) if input_shape else ()
    except ValueError:
        shape = (0,)
    if any(part < 1 for part in shape):
        raise SettingsError(f"--input-shape {input_shape!r}: type positive numbers such as 3,32,32")
    if shape and classes:
        return shape, classes
    from tasks import DataError
    from tasks.sources import open_source

    try:
        source = open_source(config.settings.data.source, config.settings.data)
    except DataError as error:
        raise SettingsError(str(error)) from error
    return shape or tuple(source.inputs.shape[1:]), classes or config.settings.data.num_classes or source.num_classes
