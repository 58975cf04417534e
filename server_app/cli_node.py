"""`heterofleet node`: check what a node needs, then become `flower-supernode`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server_app.cli_common import Overrides, err, explained, literal

if TYPE_CHECKING:
    from server_app.node_link import Check
    from server_app.node_start import Start

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(node)


def node(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server, by a name or address in its certificate.")],
    name: Annotated[str, typer.Option(help="This node's name, for good: its private state is kept under it.")],
    data: Annotated[str, typer.Option(help="Its own data: a folder of class folders, a .csv or .parquet file, module:function.")],
    model: Annotated[str, typer.Option(help="What it runs; `heterofleet models` lists the names.")] = "cnn5",
    rank_ratio: Annotated[float, typer.Option(help="Kept rank over full rank with fedhm, above 0 and at most 1.")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    root_certificates: Annotated[Path | None, typer.Option(help="This fleet's ca.crt; by default the system's CAs.")] = None,
    key: Annotated[Path | None, typer.Option(help="The node's private key, for a server that lets in known nodes only.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain HTTP, for a trial on one machine.")] = False,
    state_dir: Annotated[Path | None, typer.Option(help="Where it keeps private state (~/.heterofleet/state).")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the SuperNode's own API on 127.0.0.1.")] = 9094,
    uplink_mbit: Annotated[float, typer.Option(min=0.0, help="Megabits a second it can send, if under 10: smaller pieces.")] = 0.0,
    config: Overrides = None,
    systemd: Annotated[bool, typer.Option("--systemd", help="Print a systemd unit instead of starting.")] = False,
    user: Annotated[str, typer.Option(help="Who runs the unit; by default you, or heterofleet where you are root.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the command, start nothing.")] = False,
) -> None:
    """Join a federation with this machine: check everything, print the `flower-supernode` command, run it.

    Findings go to stderr, the command or the unit to stdout. Exit code 2 if the node would be refused or could not train.
    Settings of the run that change what a node does, such as [bold]-c strategy=fedhm -c data.image-size=32[/bold], make the check exact.
    """
    with explained():
        from client_app.profile import home
        from server_app.node_unit import unit, unreachable

        state = (state_dir or home() / "state").expanduser().resolve()
        described: dict[str, str | float] = {"name": name, "model": model, "rank-ratio": rank_ratio, "device": device}
        start, checks, memory = _examined(
            superlink=superlink,
            config=config or [],
            described=described | {"data": _place(data), "state-dir": str(state)},
            files=(root_certificates, key),
            insecure=insecure,
            port=port,
            uplink_mbit=uplink_mbit,
            service=systemd,
        )
        if _print([*checks, *(unreachable(start, state, user=user) if systemd else ())]):
            raise typer.Exit(2)
        if systemd:
            typer.echo(unit(start, state, memory=memory, user=user), nl=False)
            return
    typer.echo(start.shown())
    if not dry_run:
        start.replace_process()


def _examined(
    *,
    superlink: str,
    config: list[str],
    described: dict[str, str | float],
    files: tuple[Path | None, Path | None],
    insecure: bool,
    port: int,
    uplink_mbit: float,
    service: bool,
) -> tuple[Start, list[Check], int]:
    """Return how to start the node, what was found, and the bytes of memory it takes.

    Raises:
        SettingsError: an option that cannot be used.
    """
    from client_app.profile import NodeProfile, ProfileError
    from server_app.node_link import Address, Check, check_ca, check_key, check_server
    from server_app.node_load import check_load
    from server_app.node_probe import Wanted
    from server_app.node_start import Start, check_port
    from server_app.overrides import merged
    from server_app.settings import SettingsError

    _refuse(described)
    ca, key = (file.expanduser().resolve() if file else None for file in files)
    address, run = Address.of(superlink), merged(config, {})
    start = Start(address, described, ca=ca, key=key, insecure=insecure, port=port, uplink_mbit=uplink_mbit)
    try:
        NodeProfile.of(described, run.settings)
    except ProfileError as error:
        raise SettingsError(str(error)) from None
    _ = start.command  # refuses what Flower cannot be told
    checks = [check_ca(ca)] if ca else []
    checks += [check_key(key, str(described["name"]))] if key else []
    if checks and checks[0].name == "CA" and checks[0].fatal:
        unasked = f"{address} was not asked: without the CA nothing that it answers could be trusted"
        checks.append(Check("server", unasked, "mend --root-certificates first"))
    else:
        checks += check_server(address, ca, insecure=insecure)
    checks.append(check_port(port))
    load = check_load(Wanted(described, run.flat), Path(str(described["state-dir"])), service=service)
    return start, checks + load.checks, load.memory


def _refuse(described: dict[str, str | float]) -> None:
    """Raise SettingsError for what an option cannot be, in the option's own name."""
    from server_app.settings import SettingsError

    if not _NAME.match(str(described["name"])):
        raise SettingsError(f"--name {described['name']!r}: type letters, digits, dots, dashes or underscores, 64 at most, such as pi-3")
    if not 0 < float(described["rank-ratio"]) <= 1:
        raise SettingsError(f"--rank-ratio {described['rank-ratio']:g}: type a number above 0 and at most 1, such as 0.25")
    if described["device"] not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"--device {described['device']}: type auto, cpu or cuda")


def _place(data: str) -> str:
    """Return a path as an absolute one, since Flower's processes may work elsewhere; other sources as they are."""
    path = Path(data).expanduser()
    return str(path.resolve()) if path.exists() else data


def _print(checks: list[Check]) -> bool:
    """Print a line for each check, with its cure; return whether one is fatal."""
    for check in checks:
        mark = "[bold red]refused[/bold red]" if check.fatal else "[yellow]mind[/yellow]" if check.cure else "[green]ok[/green]"
        cure = f"; [bold]{literal(check.cure)}[/bold]" if check.cure else ""
        err.print(f"{mark} [bold]{check.name}[/bold] {literal(check.found)}{cure}", soft_wrap=True)
    return any(check.fatal for check in checks)
