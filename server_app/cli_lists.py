"""`heterofleet strategies`, `models` and `partition`: what there is to choose from, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer

from server_app.cli_common import Classes, Nodes, Overrides, Shape, checked, err, explained, fail, literal, out, shape_of


def add(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(strategies)
    app.command()(models)
    app.command()(partition)


def strategies(name: Annotated[str | None, typer.Argument(help="Only this method.")] = None) -> None:
    """List the methods and every setting with its default and meaning."""
    import strategies as methods
    from server_app import show
    from server_app.overrides import read_comments, read_defaults
    from server_app.settings import nearest

    with explained():
        defaults, comments, names = read_defaults(), read_comments(), methods.names()
    if name is not None and name not in names:
        fail(f"no strategy {name!r}{nearest(name, names)}; there are {', '.join(names)}", 2)
    for method in names if name is None else (name,):
        own = {key: value for key, value in defaults.items() if key.startswith(f"{method}.")}
        out.print(f"[bold]{method}[/bold]  {literal(show.method_line(method))}")
        if own:
            show.settings(out, "", own, comments)
        else:
            out.print("no settings of its own\n")
    common = {key: value for key, value in defaults.items() if key.split(".")[0] not in names or "." not in key}
    show.settings(out, "settings of every method (-c key=value)", common, comments)


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

    with explained():
        shape, outputs = shape_of(input_shape, classes, checked(config))
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
            err.print(f"{literal(name)}: {literal(str(error))}", soft_wrap=True)
            continue
        shown.add_row(
            name, f"{cost.parameters:,}", show.count(cost.macs), str(cost.feature_dim), f"{cost.activation_bytes / 1e6:.2f} MB a sample"
        )
    out.print(shown)
    if failed and names:
        raise typer.Exit(2)


def partition(nodes: Nodes = 10, config: Overrides = None) -> None:
    """Print how many samples of each class each simulated node would get, before anything runs."""
    from server_app import show
    from server_app.overrides import merged
    from server_app.settings import SettingsError

    with explained():
        settings = merged(config or [], {}).settings
        from tasks import DataError
        from tasks.partitions import class_table
        from tasks.sources import open_source

        try:
            counts = class_table(settings, nodes)
            names = open_source(settings.data.source, settings.data).class_names
        except DataError as error:
            raise SettingsError(str(error)) from error
    width = counts.shape[1]
    title = f"{settings.data.source}, {settings.data.partitioner}, {nodes} nodes: samples of each class"
    heads = names if len(names) == width else map(str, range(width))
    shown = show.table(title, ("node", "model", "all", *map(literal, heads)), numbers=width + 1)
    kinds = settings.fleet.models
    for index, row in enumerate(counts.tolist()):
        shown.add_row(f"partition-{index}", kinds[index % len(kinds)], str(sum(row)), *(str(value) if value else "·" for value in row))
    shown.add_section()
    shown.add_row("sum", "", str(int(counts.sum())), *map(str, counts.sum(axis=0).tolist()), style="bold")
    out.print(shown)
