"""Calls the `heterofleet` command inside this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from server_app import cli


def run(*arguments: str) -> Result:
    """Return what the command with these arguments did."""
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})
