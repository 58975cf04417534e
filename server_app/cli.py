"""The `heterofleet` command. Heavy modules are imported where they are used, so that help comes at once."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server_app import cli_compare, cli_deploy, cli_lists, cli_machine, cli_node, cli_predict
from server_app.cli_common import Overrides, Stopped, catch_signals, err, explained, find_own_modules, literal, make_folder, out

if TYPE_CHECKING:
    from server_app.launch import Launch

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.callback()
def _root() -> None:
    """One federation of different models on Flower.

    Start with [bold]heterofleet simulate[/bold]; every run leaves a report.html in its folder.
    """
    find_own_modules()


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
    with explained():
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
        if resume and _is_complete(launch):
            return
        make_folder(launch.out_dir, "--out")
        for warning in launch.warnings:
            err.print(f"[yellow]{literal(warning)}[/yellow]", soft_wrap=True)
        if not quiet:
            out.print(f"{launch.nodes} nodes, results in {literal(str(launch.out_dir))}", soft_wrap=True)
        _follow(launch, quiet)


def _is_complete(launch: Launch) -> bool:
    """Return whether the run that is to go on has nothing left to do; say so and how it can go on, and print its results."""
    from server_app.plan import command_to_resume
    from server_app.resume import is_complete

    rounds = int(launch.run_config["num-rounds"])
    if not is_complete(launch.out_dir, rounds):
        return False
    again = command_to_resume(launch, 2 * rounds)
    err.print(f"complete: round {rounds} of {rounds} is done; for more, type for example: {literal(again)}", soft_wrap=True)
    _print_results(launch.out_dir)
    return True


def _follow(launch: Launch, quiet: bool) -> None:
    from server_app.launch import LaunchError, simulate
    from server_app.plan import command_to_resume
    from server_app.progress import Watch

    before = catch_signals()
    try:
        with Watch(out, quiet) as watch:
            simulate(launch, watch)
    except KeyboardInterrupt as error:
        _so_far(launch.out_dir)
        number = error.args[0] if isinstance(error, Stopped) else signal.SIGINT
        begun = (launch.out_dir / "run.json").is_file()
        again = f"go on with: {command_to_resume(launch)}" if begun else "nothing was done yet, the same command starts anew"
        err.print(f"stopped; {literal(again)}", soft_wrap=True)
        raise typer.Exit(128 + number) from None
    except LaunchError:
        _so_far(launch.out_dir)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _print_results(launch.out_dir)


def _so_far(folder: Path) -> None:
    """Write the report of a run that did not end, if it got as far as a round."""
    from server_app.report import write_report

    if (folder / "metrics.jsonl").is_file():
        err.print(f"results so far: {literal(str(write_report(folder)))}", soft_wrap=True)


def _print_results(folder: Path) -> None:
    """Print the table of `summary.json` and where everything is, in that order."""
    from server_app import show
    from server_app.report import write_report

    if not (folder / "summary.json").is_file():
        write_report(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    show.results(out, summary)
    if (folder / "exports.json").is_file():
        out.print(f"models:  {literal(str(folder / 'exports.json'))} lists the exported files", soft_wrap=True)
    out.print(f"results: {literal(str(folder))}", soft_wrap=True)
    out.print(f"report:  {literal(str(folder / 'report.html'))}", soft_wrap=True)


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder; it need not be over.")],
    against: Annotated[Path | None, typer.Option(help="Another run's folder, to show beside it.")] = None,
) -> None:
    """Write summary.json, plots and report.html of a run again, and print its table."""
    from server_app import show
    from server_app.report import compare, summarise, write_report
    from server_app.rundata import read_run

    with explained():
        folder = run.expanduser().resolve()
        other = against.expanduser().resolve() if against else None
        write_report(folder, other)
        _print_results(folder)
        if other:
            rows = compare(summarise(read_run(folder)), summarise(read_run(other)))
            show.comparison(out, rows, folder.name, other.name)


def main() -> None:
    """Run the command line."""
    app()


# The order of `heterofleet --help`.
app.command()(simulate)
cli_compare.add(app)
cli_deploy.add(app)
app.command()(report)
cli_lists.add(app)
cli_machine.add(app)
cli_node.add(app)
cli_predict.add(app)

if __name__ == "__main__":
    main()
