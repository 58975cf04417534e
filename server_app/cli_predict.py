"""`heterofleet predict`: classes of pictures by a model that a run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server_app.cli_common import fail


def add(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(predict)


def predict(
    model: Annotated[Path, typer.Option(help="A .pt2 file that a run with export=own wrote; load only files you trust.")],
    place: Annotated[Path, typer.Option("--input", help="A folder of pictures, or one.")],
    labels: Annotated[Path | None, typer.Option(help="Class names, one a line, where the model's card has none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """Say what is in pictures: path, class and probability a line, by a model that a run exported.

    Files that cannot be read are named and skipped; exit code 1 only if none could be. Without Flower and this command:
    [bold]python -m client_app.predict[/bold], which needs torch and Pillow alone.
    """
    from client_app.predict import PredictError, run

    try:
        code = run(model.expanduser(), place.expanduser(), labels.expanduser() if labels else None, as_json=as_json)
    except PredictError as error:
        fail(str(error), 2)
    raise typer.Exit(code)
