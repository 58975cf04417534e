"""No plots for runs that only these tests look at: they take longer than the rounds."""

import pytest


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr("server_app.plots.draw", lambda *arguments: [])
