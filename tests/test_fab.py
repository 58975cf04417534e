"""What Flower ships to the nodes: `flwr build` of a clean copy of this checkout."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import strategies
from server_app.settings import Section, Settings
from tests.checkout import PACKAGES, copy_of_checkout

LIMIT = 10 * 2**20
_SCRIPTS = str(Path(sys.executable).parent)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_checkout(tmp_path_factory.mktemp("fab") / "checkout")


@pytest.fixture(scope="module")
def fab(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle that the documented command writes."""
    home = tmp_path_factory.mktemp("home")
    env = {**os.environ, "HOME": str(home), "FLWR_HOME": str(home / "flwr"), "PATH": os.pathsep.join([_SCRIPTS, os.environ["PATH"]])}
    subprocess.run(["flwr", "build"], cwd=checkout, env=env, check=True, capture_output=True, timeout=120)
    (built,) = checkout.glob("*.fab")
    return built


@pytest.fixture(scope="module")
def content(fab: Path) -> dict[str, bytes]:
    """Return path -> bytes of the bundle, but Flower's own manifest."""
    with zipfile.ZipFile(fab) as file:
        return {name: file.read(name) for name in file.namelist() if not name.startswith(".info/")}


def test_it_holds_the_code_of_both_halves_and_nothing_else(checkout: Path, content: dict[str, bytes]) -> None:
    code = {path.relative_to(checkout).as_posix() for package in PACKAGES for path in (checkout / package).rglob("*.py")}
    assert len(code) > 50
    assert {name for name in content if name.endswith(".py")} == code | {"heterofleet_app.py"}
    others = {name for name in content if not name.endswith(".py")}
    assert others <= {"pyproject.toml", "README.md", "LICENSE"}
    assert "pyproject.toml" in others
    assert all(content[name] == (checkout / name).read_bytes() for name in content if name != "pyproject.toml")


def test_it_is_far_below_flowers_limit(fab: Path) -> None:
    assert fab.stat().st_size < LIMIT / 10


def _imports(source: bytes, name: str) -> Iterator[str]:
    """Yield the dotted names that a file imports anywhere, also inside functions; `from a import b` gives both a and a.b."""
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_of_the_project_that_it_imports_is_in_it(checkout: Path, content: dict[str, bytes]) -> None:
    inside = {".".join(PurePosixPath(n).with_suffix("").parts).removesuffix(".__init__") for n in content if n.endswith(".py")}
    at_root = {path.stem for path in checkout.iterdir() if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))}
    assert {"tests", "benchmarks"} <= at_root
    followed = 0
    for name, source in content.items():
        for imported in _imports(source, name) if name.endswith(".py") else ():
            if imported.split(".")[0] in at_root:
                followed += 1
                found = imported in inside or (imported.rpartition(".")[0] in inside)  # the last part may be a name in the module
                assert found, f"{name} imports {imported}, which is not in the bundle"
    assert followed > 100


def test_it_loads_from_its_own_folder_alone(fab: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(fab) as file:
        file.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import heterofleet_app, strategies, server_app.app, client_app.app\n"
        "for name in strategies.names(): strategies.strategy_class(name), strategies.trainer_class(name)\n"
        f"ours = [m for n, m in sys.modules.items() if n.split('.')[0] in {(*PACKAGES, 'heterofleet_app')!r}]\n"
        "print(len(ours), sorted({m.__file__ for m in ours if not m.__file__.startswith(sys.argv[1])}), *strategies.names())"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    count, elsewhere, *methods = found.stdout.split()
    assert int(count) > 30
    assert elsewhere == "[]"
    assert tuple(methods) == strategies.names()


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, entry in section.model_fields.items():
        kind, key = entry.annotation, prefix + str(entry.alias)
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _keys(kind, f"{key}.")
        elif name != "method":
            yield key


def test_every_setting_has_a_scalar_default_in_it(content: dict[str, bytes]) -> None:
    app = tomllib.loads(content["pyproject.toml"].decode())["tool"]["flwr"]["app"]
    defaults = dict(_leaves(app["config"]))
    assert {key: value for key, value in defaults.items() if type(value) not in (bool, int, float, str)} == {}
    wanted = set(_keys(Settings))
    for name in strategies.names():
        wanted |= set(_keys(importlib.import_module(f"strategies.{name}.config").Config, f"{name}."))
    assert set(defaults) == wanted


def test_its_entry_names_are_assigned_in_the_entry_module(content: dict[str, bytes]) -> None:
    """Flower looks at the source, not at the loaded module: an imported or annotated name would be refused."""
    components = tomllib.loads(content["pyproject.toml"].decode())["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "heterofleet_app:server", "clientapp": "heterofleet_app:client"}
    body = ast.parse(content["heterofleet_app.py"]).body
    assigned = {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)}
    assert {"server", "client"} <= assigned
