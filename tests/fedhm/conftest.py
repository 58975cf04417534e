"""Runs without drawing their report: that takes two thirds of a small run's time and is tested elsewhere."""

import pytest


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    monkeypatch.setattr("server_app.app.write_report", lambda out_dir: out_dir / "report.html")
