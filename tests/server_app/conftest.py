"""A launcher that launches nothing."""

from __future__ import annotations

from typing import Any

import pytest

from server_app import cli, launch
from server_app.launch import Launch
from tests.server_app.run_folder import two_runs


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return the list of what was launched; a launch leaves a finished run."""
    calls: list[Launch] = []

    def simulate(wanted: Launch, on_status: Any) -> dict[str, Any]:
        calls.append(wanted)
        two_runs(wanted.out_dir)
        return {}

    monkeypatch.setattr(launch, "simulate", simulate)
    monkeypatch.setattr(cli.out, "width", 200)
    monkeypatch.setattr(cli.err, "width", 200)
    return calls
