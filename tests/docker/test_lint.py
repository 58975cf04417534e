"""The rules of dclint that matter, on the compose files; dclint itself where npm has brought it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from tests.docker.compose_files import FOLDER, read

FILES = sorted(path.name for path in FOLDER.glob("compose*.yml"))
every_file = pytest.mark.parametrize("name", FILES)


def test_dclint_finds_nothing():
    dclint = shutil.which("dclint")
    if dclint is None:
        pytest.skip("dclint is not installed; type: npm install -g dclint")
    done = subprocess.run(
        [dclint, "-c", ".dclintrc.yaml", "--max-warnings", "0", "."], cwd=FOLDER, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "")


class _Strict(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, which YAML readers take silently, the last one counting."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
    keys = [key.value for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    assert not twice, f"line {node.start_mark.line + 1}: {twice} twice"
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


@every_file
def test_no_key_stands_twice_and_the_project_has_a_name_and_no_version(name):
    project = yaml.load((FOLDER / name).read_text(encoding="utf-8"), _Strict)
    assert re.fullmatch(r"[a-z][a-z0-9-]*", project["name"])
    assert "version" not in project


@every_file
def test_ports_are_bound_to_an_interface_and_are_strings(name):
    for service in read(name)["services"].values():
        for port in service.get("ports", []):
            assert port["host_ip"]
            assert isinstance(port["published"], str)


@every_file
def test_nothing_is_given_twice_or_privileged(name):
    project = read(name)
    names = [service["container_name"] for service in project["services"].values() if "container_name" in service]
    assert len(names) == len(set(names))
    for service in project["services"].values():
        for listed in ("volumes", "secrets", "networks", "command", "cap_drop"):
            entries = list(service.get(listed, []))
            assert len(entries) == len({str(entry) for entry in entries}), listed
        assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & set(service)
        assert service.get("user", "49999") not in ("0", "root")
        assert not any("docker.sock" in str(volume) for volume in service.get("volumes", []))


def test_images_have_a_version_and_containers_do_not_run_as_root():
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, flags=re.M)
    own = {stage for _, stage in stages}
    assert all(":" in image for image, _ in stages if image not in own)
    for part in re.split(r"^FROM ", text, flags=re.M)[1:]:
        users = re.findall(r"^USER (\S+)$", part, flags=re.M)
        assert not users or users[-1] == "49999"
    assert not re.search(r"^FROM --platform", text, flags=re.M)  # amd64 or arm64, as the machine that builds


def test_the_same_file_serves_both_kinds_of_torch():
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    assert 'ARG TORCH_ARGS=""' in text
    for name in FILES:
        for service in read(name, TORCH_ARGS="--index-url https://wheels.example/cpu")["services"].values():
            assert service.get("build", {}).get("args", {}).get("TORCH_ARGS") in (None, "--index-url https://wheels.example/cpu")
    assert sum("TORCH_ARGS" in (FOLDER / name).read_text(encoding="utf-8") for name in FILES) == 3  # all but the GPU's addition
