"""`heterofleet compare`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server_app.cli_common import Overrides, Stopped, catch_signals, err, explained, fail, literal, make_folder, out

if TYPE_CHECKING:
    from server_app.cases import Comparison


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(compare)


def compare(
    nodes: Annotated[int | None, typer.Option("--nodes", "-n", min=1, help="Simulated nodes (10).")] = None,
    seeds: Annotated[
        str,
        typer.Option(
            metavar="S,S,...", help="The seeds themselves, each with its own split and start: 1,2,3 is three runs a case, 3 is one (1)."
        ),
    ] = "",
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
    on after a stop. Exit code 2 for what is refused before anything starts, 1 if a run failed; the others are shown all the same.
    """
    with explained():
        from server_app.cases import plan_comparison
        from server_app.jobs import check_cases

        made = plan_comparison(
            plan=plan, nodes=nodes, seeds=seeds, target=target, config=config or [], cases=case or [], search=search or []
        )
        folder = (out_dir or Path("runs") / "compare").expanduser().resolve()
        warnings = check_cases(made, folder / "jobs")
        make_folder(folder, "--out")
        for warning in warnings:
            err.print(f"[yellow]{literal(warning)}[/yellow]", soft_wrap=True)
        _run_comparison(made, folder, jobs or os.cpu_count() or 1, quiet)


def _run_comparison(made: Comparison, folder: Path, workers: int, quiet: bool) -> None:
    from server_app import compare_show
    from server_app.compare import write_comparison
    from server_app.jobs import run_jobs

    if not quiet:
        out.print(f"{len(made.jobs)} runs, results in {literal(str(folder))}", soft_wrap=True)
    before = catch_signals()
    try:
        with compare_show.JobWatch(out, made, quiet) as watch:
            run_jobs(made.jobs, folder / "jobs", workers, watch)
    except KeyboardInterrupt as error:
        number = error.args[0] if isinstance(error, Stopped) else signal.SIGINT
        write_comparison(made, folder)
        err.print(f"stopped; the same command goes on. Results so far: {literal(str(folder / 'compare.html'))}", soft_wrap=True)
        raise typer.Exit(128 + number) from None
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
    result = write_comparison(made, folder)
    compare_show.results(out, result)
    out.print(f"report: {literal(str(folder / 'compare.html'))}", soft_wrap=True)
    cost = result["cost"]
    if failed := cost["jobs"] - cost["done"]:
        fail(f"{failed} of {cost['jobs']} runs failed; the reasons are above, and the same command tries them again", 1)
