"""`heterofleet deploy-local`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server_app.cli_common import Overrides, Stopped, catch_signals, err, explained, literal, make_folder, out

if TYPE_CHECKING:
    from server_app.deploy_run import Cost, Plan


def deploy_local(
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, help="Real nodes, each a process of its own.")] = 3,
    strategy: Annotated[str | None, typer.Option("--strategy", "-s", help="Method; `heterofleet strategies` lists them.")] = None,
    config: Overrides = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds (3).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain HTTP and no keys, to see what they cost.")] = False,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the results (runs/<time>).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")] = False,
) -> None:
    """Run a real deployment on this machine, as on many: TLS, a key for each node, each with its own data and model.

    A SuperLink and the nodes are started, the run is followed to its end, and all of them are taken down again with their keys.
    Exit code 0 only if the run completed; 130 after Ctrl-C.
    """
    with explained():
        from server_app.deploy_run import plan_deployment

        plan = plan_deployment(nodes=nodes, strategy=strategy, rounds=rounds, config=config or [], secure=not insecure, out_dir=out_dir)
        make_folder(plan.out_dir, "--out")
        for warning in plan.launch.warnings:
            err.print(f"[yellow]{literal(warning)}[/yellow]", soft_wrap=True)
        if not quiet:
            how = "plain HTTP" if insecure else "TLS and registered keys"
            out.print(f"{nodes} nodes on loopback, {how}, results in {literal(str(plan.out_dir))}", soft_wrap=True)
        _show(plan, _followed(plan, quiet))


def _followed(plan: Plan, quiet: bool) -> Cost:
    from server_app.deploy_run import deploy
    from server_app.progress import Watch

    before = catch_signals()
    try:
        with Watch(out, quiet) as watch:
            return deploy(plan, watch)
    except KeyboardInterrupt as error:
        err.print(f"stopped; everything was taken down, the logs are in {literal(str(plan.out_dir / 'logs'))}", soft_wrap=True)
        raise typer.Exit(128 + (error.args[0] if isinstance(error, Stopped) else signal.SIGINT)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(plan: Plan, cost: Cost) -> None:
    """Print the table of results, what an exchange took, and the bytes by both counts."""
    from server_app import show

    show.results(out, json.loads((plan.out_dir / "summary.json").read_text(encoding="utf-8")))
    mean = cost.seconds / max(cost.exchanges, 1)
    out.print(f"{cost.exchanges} exchanges, {mean:.1f} s each; training took {cost.seconds_train:.1f} s of the {cost.seconds:.1f} s")
    shown = show.table("", ("bytes", "our count", "flwr ls", "difference"), numbers=3)
    for name, (ours, flowers) in (("to the nodes", cost.down), ("from the nodes", cost.up)):
        shown.add_row(name, f"{ours:,}", f"{flowers:,}", f"{100 * (flowers - ours) / max(ours, 1):+.1f} %")
    out.print(shown)
    out.print(f"results: {literal(str(plan.out_dir))}", soft_wrap=True)
    out.print(f"report:  {literal(str(plan.out_dir / 'report.html'))}", soft_wrap=True)


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(deploy_local)
