"""`heterofleet doctor` and `certs`: this machine, and what real machines need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from server_app.cli_common import Classes, Overrides, Shape, explained, literal, out, shape_of

_MOST_DAYS = 3650  # server_app.certs.CA_DAYS, whose module takes a while to import


def add(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(doctor)
    app.command()(certs)


def doctor(config: Overrides = None, input_shape: Shape = "", classes: Classes = 0) -> None:
    """Say what this machine can carry and which SuperLink a bare `flwr run` would use."""
    from server_app.doctor import Finding, Need, costliest, examine
    from server_app.overrides import merged
    from server_app.settings import SettingsError

    with explained():
        checked = merged(config or [], {})
    settings, need, unread = checked.settings, Need("", 0), []
    shared = str(getattr(checked.method, "small_model", ""))
    try:
        shape, outputs = shape_of(input_shape, classes, checked)
        need = costliest(settings.fleet.models, shared=shared, input_shape=shape, classes=outputs, batch_size=settings.train.batch_size)
    except (SettingsError, ValueError) as error:  # the machine is examined all the same
        unread = [Finding("data, models", str(error), "workers are counted without the memory of a model")]
    findings = [*unread, *examine(need)]
    _print_findings({finding.name: (finding.value, finding.advice) for finding in findings})


def certs(
    folder: Annotated[Path, typer.Option("--out", help="Folder to make; with --renew, the one to renew in.")],
    host: Annotated[list[str] | None, typer.Option(help="DNS name by which nodes reach the server; repeat it for more.")] = None,
    ip: Annotated[list[str] | None, typer.Option(help="Address by which nodes reach it; repeat it for more.")] = None,
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, help="Nodes to make keys for.")] = 3,
    days: Annotated[int, typer.Option(min=1, max=_MOST_DAYS, help="Validity of the server's certificate; the CA's is ten years.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Only a new server certificate, for the names of the old one by default.")] = False,
) -> None:
    """Make what a fleet on real machines authenticates itself with, and print the commands to type next."""
    with explained():
        from server_app import certs as made

        folder = folder.expanduser()
        if renew:
            server = made.renew(folder, host or [], ip or [], days=days)
        else:
            server = made.create(folder, host or [], ip or [], nodes=nodes, days=days)
    out.print(f"{literal(str(server.path))}: for {', '.join(server.names)}; until {server.until:%Y-%m-%d}", soft_wrap=True)
    if renew:
        out.print("Start the SuperLink again with it; nodes need nothing new.", soft_wrap=True)
    else:
        out.print(f"\n{literal(made.next_steps(folder, server))}", soft_wrap=True)


def _print_findings(findings: Mapping[str, tuple[str, str]]) -> None:
    for name, (value, advice) in findings.items():
        out.print(f"[bold]{name:<14}[/bold] {literal(value)}", soft_wrap=True)
        if advice:
            out.print(f"{'':<14} [yellow]{literal(advice)}[/yellow]", soft_wrap=True)
