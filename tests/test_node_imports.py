"""What the node half loads: nothing of the server's, nothing for data it does not have."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import strategies
from tests.fleet_fixture import ROOT

NEVER = {"ray", "matplotlib", "seaborn", "datasets", "flwr_datasets", "pandas", "pyarrow", "sklearn", "scipy", "mlxtend", "torchvision"}


def loaded(code: str) -> set[str]:
    """Return the top-level names of all modules that `code` leaves loaded in a fresh interpreter."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def node_half() -> set[str]:
    calls = "\n".join(f"strategies.trainer_class({name!r})" for name in strategies.names())
    return loaded(f"import heterofleet_app, client_app.app, strategies\n{calls}")


def test_the_node_half_loads_no_ray_no_plots_and_no_data_libraries(node_half):
    assert {"torch", "flwr", "client_app", "strategies"} <= node_half
    assert not NEVER & node_half


def test_it_loads_the_command_lines_libraries_only_as_far_as_flower_itself_does(node_half):
    of_flower = loaded("import flwr.clientapp, torch, safetensors.torch, pydantic")
    assert not {"typer", "rich", "triton"} & (node_half - of_flower)
