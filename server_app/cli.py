"""The `heterofleet` command. Heavy modules are imported where they are used, so that help comes at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from server_app.cases import Comparison
    from server_app.launch import Launch
    from server_app.overrides import RunConfig

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Overrides = Annotated[list[str] | None, typer.Option("--config", "-c", metavar="KEY=VALUE", help="A run-config key; repeat it for more.")]
Nodes = Annotated[int, typer.Option("--nodes", "-n", min=1, help="Simulated nodes.")]
Shape = Annotated[str, typer.Option("--input-shape", metavar="C,H,W", help="Shape of a sample; by default that of data.source.")]
Classes = Annotated[int, typer.Option("--classes", min=0, help="Outputs of the models; by default those of data.source.")]


class _Stopped(KeyboardInterrupt):
    """A signal asked for the end; args[0] is its number."""


def main() -> None:
    """Run the command line."""
    app()


@app.callback()
def _root() -> None:
    """One federation of different models on Flower.

    Start with [bold]heterofleet simulate[/bold]; every run leaves a report.html in its folder.
    """


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn what a user can mend into one line and exit code 2 (settings, data, folders) or 1 (a run that failed)."""
    from server_app.launch import LaunchError
    from server_app.rundata import RunFolderError
    from server_app.settings import SettingsError

    try:
        yield
    except (SettingsError, RunFolderError) as error:
        _fail(str(error), 2)
    except LaunchError as error:
        _fail(str(error), 1)


def _fail(reason: str, code: int) -> None:
    err.print(f"[bold red]heterofleet:[/bold red] {_literal(reason)}", soft_wrap=True)
    raise typer.Exit(code)


def _literal(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@app.command()
def simulate(
    nodes: Annotated[int | None, typer.Option("--nodes", "-n", min=1, help="Simulated nodes (10; when resuming, as before).")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", "-s", help="Method; `heterofleet strategies` lists them.")] = None,
    config: Overrides = None,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs of one node at work.")] = 1,
    gpus: Annotated[float, typer.Option(min=0.0, help="Share of a GPU of one node at work; 0 trains on the CPU.")] = 0.0,
    workers: Annotated[int, typer.Option(min=0, help="CPUs to use in all; 0: every core.")] = 0,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the results (runs/<time>).")] = None,
    experiment: Annotated[str | None, typer.Option(help="Name under which nodes keep private state.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of an earlier run to go on with.")] = None,
    alone: Annotated[bool | None, typer.Option("--alone/--no-alone", help="Also train every node alone, to compare with.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")] = False,
) -> None:
    """Run a federation on this machine and print how each node did, alone and together.

    Exit code 0 only if the run completed; 130 after Ctrl-C, which stops the run and everything it started.
    """
    with _explained():
        from server_app.plan import plan

        launch = plan(
            nodes=nodes,
            strategy=strategy,
            config=config or [],
            cpus=cpus,
            gpus=gpus,
            workers=workers,
            out_dir=out_dir,
            experiment=experiment,
            resume=resume,
            alone=alone,
        )
        if not quiet:
            out.print(f"{launch.nodes} nodes, results in {_literal(str(launch.out_dir))}", soft_wrap=True)
        _follow(launch, quiet)


def _follow(launch: Launch, quiet: bool) -> None:
    from server_app.launch import LaunchError, simulate
    from server_app.progress import Watch

    launch.out_dir.mkdir(parents=True, exist_ok=True)
    before = _catch_signals()
    try:
        with Watch(out, quiet) as watch:
            simulate(launch, watch)
    except KeyboardInterrupt as error:
        _so_far(launch.out_dir)
        number = error.args[0] if isinstance(error, _Stopped) else signal.SIGINT
        err.print(f"stopped; go on with: heterofleet simulate --resume {_literal(str(launch.out_dir))}", soft_wrap=True)
        raise typer.Exit(128 + number) from None
    except LaunchError:
        _so_far(launch.out_dir)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _print_results(launch.out_dir)


def _catch_signals() -> dict[signal.Signals, Any]:
    """Let SIGTERM and a closed terminal stop a run as Ctrl-C does; return the handlers before. A `nohup` stays in force."""

    def stop(number: int, frame: object) -> None:
        raise _Stopped(number)

    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, stop) for number in wanted}


def _so_far(folder: Path) -> None:
    """Write the report of a run that did not end, if it got as far as a round."""
    from server_app.report import write_report

    if (folder / "metrics.jsonl").is_file():
        err.print(f"results so far: {_literal(str(write_report(folder)))}", soft_wrap=True)


def _print_results(folder: Path) -> None:
    """Print the table of `summary.json` and where everything is, in that order."""
    from server_app import show
    from server_app.report import write_report

    if not (folder / "summary.json").is_file():
        write_report(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    show.results(out, summary)
    if (folder / "exports.json").is_file():
        out.print(f"models:  {_literal(str(folder / 'exports.json'))} lists the exported files", soft_wrap=True)
    out.print(f"results: {_literal(str(folder))}", soft_wrap=True)
    out.print(f"report:  {_literal(str(folder / 'report.html'))}", soft_wrap=True)


@app.command()
def compare(
    nodes: Annotated[int | None, typer.Option("--nodes", "-n", min=1, help="Simulated nodes (10).")] = None,
    seeds: Annotated[str, typer.Option(metavar="S,S,...", help="Run seeds; each draws its own split and start (1).")] = "",
    config: Overrides = None,
    case: Annotated[list[str] | None, typer.Option(metavar="'NAME: KEY=VALUE ...'", help="A row; repeat it for more.")] = None,
    search: Annotated[
        list[str] | None, typer.Option(metavar="KEY=V,V,...", help="Values each case chooses from by validation accuracy.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="TOML file with nodes, seeds, target, settings, cases, search.")] = None,
    target: Annotated[float | None, typer.Option(help="Accuracy to count rounds, bytes and seconds to, such as 0.9.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the results; runs that are done there are kept.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="Runs at once; 0: one a core.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")] = False,
) -> None:
    """Compare strategies and settings over seeds on one task: is joining worth it, and with what?

    Nodes alone, FedAvg on the small model, and that fine-tuned on each node are always in it. Type the same command again to go
    on after a stop. Exit code 1 only if no run was done.
    """
    with _explained():
        from server_app.cases import plan_comparison

        made = plan_comparison(
            plan=plan, nodes=nodes, seeds=seeds, target=target, config=config or [], cases=case or [], search=search or []
        )
        folder = (out_dir or Path("runs") / "compare").expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        _run_comparison(made, folder, jobs or os.cpu_count() or 1, quiet)


def _run_comparison(made: Comparison, folder: Path, workers: int, quiet: bool) -> None:
    from server_app import compare_show
    from server_app.compare import write_comparison
    from server_app.jobs import run_jobs

    if not quiet:
        out.print(f"{len(made.jobs)} runs, results in {_literal(str(folder))}", soft_wrap=True)
    before = _catch_signals()
    try:
        with compare_show.JobWatch(out, made, quiet) as watch:
            run_jobs(made.jobs, folder / "jobs", workers, watch)
    except KeyboardInterrupt as error:
        number = error.args[0] if isinstance(error, _Stopped) else signal.SIGINT
        write_comparison(made, folder)
        err.print(f"stopped; the same command goes on. Results so far: {_literal(str(folder / 'compare.html'))}", soft_wrap=True)
        raise typer.Exit(128 + number) from None
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
    result = write_comparison(made, folder)
    compare_show.results(out, result)
    out.print(f"report: {_literal(str(folder / 'compare.html'))}", soft_wrap=True)
    if not result["cost"]["done"]:
        _fail("no run was done; the reasons are above", 1)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder; it need not be over.")],
    against: Annotated[Path | None, typer.Option(help="Another run's folder, to show beside it.")] = None,
) -> None:
    """Write summary.json, plots and report.html of a run again, and print its table."""
    from server_app import show
    from server_app.report import compare, summarise, write_report
    from server_app.rundata import read_run

    with _explained():
        folder = run.expanduser().resolve()
        other = against.expanduser().resolve() if against else None
        write_report(folder, other)
        _print_results(folder)
        if other:
            rows = compare(summarise(read_run(folder)), summarise(read_run(other)))
            show.comparison(out, rows, folder.name, other.name)


@app.command()
def strategies(name: Annotated[str | None, typer.Argument(help="Only this method.")] = None) -> None:
    """List the methods and every setting with its default and meaning."""
    import strategies as methods
    from server_app import show
    from server_app.overrides import read_comments, read_defaults
    from server_app.settings import nearest

    with _explained():
        defaults, comments, names = read_defaults(), read_comments(), methods.names()
    if name is not None and name not in names:
        _fail(f"no strategy {name!r}{nearest(name, names)}; there are {', '.join(names)}", 2)
    for method in names if name is None else (name,):
        own = {key: value for key, value in defaults.items() if key.startswith(f"{method}.")}
        out.print(f"[bold]{method}[/bold]  {_literal(show.method_line(method))}")
        if own:
            show.settings(out, "", own, comments)
        else:
            out.print("no settings of its own\n")
    common = {key: value for key, value in defaults.items() if key.split(".")[0] not in names or "." not in key}
    show.settings(out, "settings of every method (-c key=value)", common, comments)


@app.command()
def models(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names; torchvision:<name> and module:function too. Default: all built in.")
    ] = None,
    input_shape: Shape = "",
    classes: Classes = 0,
    rank_ratio: Annotated[
        list[float] | None, typer.Option("--rank-ratio", min=0.0, max=1.0, help="Also cut to it, as fedhm does; repeat it for more.")
    ] = None,
    config: Overrides = None,
) -> None:
    """List the models with what they cost: parameters, forward multiply-accumulates, memory of a sample in training."""
    import models as architectures
    from models.cost import summary
    from server_app import show

    with _explained():
        shape, outputs = _shape_of(input_shape, classes, _checked(config))
        if rank_ratio:
            from server_app.tiers import print_tiers

            print_tiers(out, names or [], shape, outputs, rank_ratio, config or [])
            return
    shown = show.table(
        f"for samples of shape {shape} and {outputs} outputs", ("model", "parameters", "forward MACs", "width", "activations"), numbers=4
    )
    failed = False
    for name in names or architectures.names():
        try:
            cost = summary(name, shape, outputs)
        except architectures.ModelError as error:
            failed = True
            err.print(f"{_literal(name)}: {_literal(str(error))}", soft_wrap=True)
            continue
        shown.add_row(
            name, f"{cost.parameters:,}", show.count(cost.macs), str(cost.feature_dim), f"{cost.activation_bytes / 1e6:.2f} MB a sample"
        )
    out.print(shown)
    if failed and names:
        raise typer.Exit(2)


def _checked(overrides: list[str] | None) -> RunConfig:
    from server_app.overrides import merged

    return merged(overrides or [], {})


def _shape_of(input_shape: str, classes: int, config: RunConfig) -> tuple[tuple[int, ...], int]:
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


@app.command()
def partition(nodes: Nodes = 10, config: Overrides = None) -> None:
    """Print how many samples of each class each simulated node would get, before anything runs."""
    from server_app import show
    from server_app.overrides import merged
    from server_app.settings import SettingsError

    with _explained():
        settings = merged(config or [], {}).settings
        from tasks import DataError
        from tasks.partitions import class_table

        try:
            counts = class_table(settings, nodes)
        except DataError as error:
            raise SettingsError(str(error)) from error
    width = counts.shape[1]
    title = f"{settings.data.source}, {settings.data.partitioner}, {nodes} nodes: samples of each class"
    shown = show.table(title, ("node", "model", "all", *map(str, range(width))), numbers=width + 1)
    kinds = settings.fleet.models
    for index, row in enumerate(counts.tolist()):
        shown.add_row(f"partition-{index}", kinds[index % len(kinds)], str(sum(row)), *(str(value) if value else "·" for value in row))
    shown.add_section()
    shown.add_row("sum", "", str(int(counts.sum())), *map(str, counts.sum(axis=0).tolist()), style="bold")
    out.print(shown)


@app.command()
def doctor(config: Overrides = None, input_shape: Shape = "", classes: Classes = 0) -> None:
    """Say what this machine can carry and which SuperLink a bare `flwr run` would use."""
    from server_app.doctor import examine
    from server_app.overrides import merged

    with _explained():
        checked = merged(config or [], {})
        shape, outputs = _shape_of(input_shape, classes, checked)
    settings = checked.settings
    shared = str(getattr(checked.method, "small_model", ""))
    findings = examine(settings.fleet.models, shared=shared, input_shape=shape, classes=outputs, batch_size=settings.train.batch_size)
    _print_findings({finding.name: (finding.value, finding.advice) for finding in findings})


@app.command()
def certs(
    folder: Annotated[Path, typer.Option("--out", help="Folder to make; with --renew, the one to renew in.")],
    host: Annotated[list[str] | None, typer.Option(help="DNS name by which nodes reach the server; repeat it for more.")] = None,
    ip: Annotated[list[str] | None, typer.Option(help="Address by which nodes reach it; repeat it for more.")] = None,
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, help="Nodes to make keys for.")] = 3,
    days: Annotated[int, typer.Option(min=1, help="Validity of the server's certificate.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Only a new server certificate, for the names of the old one by default.")] = False,
) -> None:
    """Make what a fleet on real machines authenticates itself with, and print the commands to type next."""
    with _explained():
        from server_app import certs as made

        folder = folder.expanduser()
        if renew:
            server = made.renew(folder, host or [], ip or [], days=days)
        else:
            server = made.create(folder, host or [], ip or [], nodes=nodes, days=days)
    out.print(f"{_literal(str(server.path))}: for {', '.join(server.names)}; until {server.until:%Y-%m-%d}", soft_wrap=True)
    if renew:
        out.print("Start the SuperLink again with it; nodes need nothing new.", soft_wrap=True)
    else:
        out.print(f"\n{_literal(made.next_steps(folder, server))}", soft_wrap=True)


def _print_findings(findings: Mapping[str, tuple[str, str]]) -> None:
    for name, (value, advice) in findings.items():
        out.print(f"[bold]{name:<14}[/bold] {_literal(value)}", soft_wrap=True)
        if advice:
            out.print(f"{'':<14} [yellow]{_literal(advice)}[/yellow]", soft_wrap=True)


if __name__ == "__main__":
    main()
