"""What the documentation tells people to type works as it stands."""

import re
import sys

import pytest

import strategies
from tests.fleet_fixture import ROOT, config, rows, run


@pytest.fixture
def fedprox(tmp_path, monkeypatch):
    """The method that docs/adding-a-method.md adds, installed beside the others."""
    text = (ROOT / "docs/adding-a-method.md").read_text(encoding="utf-8")
    files = re.findall(r"`strategies/(fedprox/\w+\.py)`\n\n```python\n(.*?)```", text, flags=re.S)
    assert [name for name, _ in files] == ["fedprox/config.py", "fedprox/strategy.py", "fedprox/trainer.py"]
    folder = tmp_path / "methods"
    (folder / "fedprox").mkdir(parents=True)
    for name, code in [*files, ("fedprox/__init__.py", '"""FedProx."""\n')]:
        (folder / name).write_text(code, encoding="utf-8")
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(folder)])
    known = strategies.names()
    monkeypatch.setattr(strategies, "names", lambda: (*known, "fedprox"))
    yield
    for name in [n for n in sys.modules if n.startswith("strategies.fedprox")]:
        del sys.modules[name]


def test_the_example_method_runs_and_its_term_holds_the_model_back(tmp_path, fedprox):
    moved = {}
    for mu in (0.0, 10.0):
        settings = config(tmp_path, strategy="fedprox", num_rounds=1, train__local_epochs=5)
        run({**settings, "fedprox.model": "mlp", "fedprox.mu": mu}, tmp_path / str(mu))
        moved[mu] = rows(tmp_path / str(mu), "round")[0]["method"]["shared_change"]
    assert 0 < moved[10.0] < 0.7 * moved[0.0]


def test_every_command_of_the_readme_that_needs_no_network_or_machine_is_known():
    from typer.testing import CliRunner

    from server_app.cli import app

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"heterofleet (\w[\w-]*)", text))
    listed = CliRunner().invoke(app, ["--help"]).output
    assert commands
    assert all(command in listed for command in commands)


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
