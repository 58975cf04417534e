"""The compose files against what Flower's commands accept, against each other, and against what `heterofleet certs` makes."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args

from client_app.profile import NodeProfile
from server_app.certs import create
from server_app.overrides import merged
from tests.docker.compose_files import FOLDER, VARIABLE, read

WHOLE = {
    "one host": ("compose.yml",),
    "server": ("compose.server.yml",),
    "node": ("compose.node.yml",),
    "node with GPU": ("compose.node.yml", "compose.gpu.yml"),
}
SCRIPTS = Path(sys.executable).parent
FILES = sorted(path.name for path in FOLDER.glob("compose*.yml"))

every_file = pytest.mark.parametrize("names", WHOLE.values(), ids=WHOLE)


@functools.cache
def flags_of(command: str) -> frozenset[str]:
    """Return the long options of one of Flower's commands, by its own help, without those it calls deprecated."""
    text = subprocess.run([SCRIPTS / command, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    options = text[text.index("\noptions:") :]
    parts = re.split(r"\n  (?=-)", options)
    return frozenset(
        flag for part in parts if "deprecated" not in part.lower() for flag in re.findall(r"--[a-z][\w-]*", part.split("  ")[0])
    )


def flags_in(command: list[str]) -> list[str]:
    return [word.split("=")[0] for word in command if word.startswith("--")]


def value_of(command: list[str], flag: str) -> str:
    for index, word in enumerate(command):
        if word.split("=")[0] == flag:
            return word.partition("=")[2] or command[index + 1]
    raise KeyError(flag)


def secrets_used(service: dict[str, Any]) -> set[str]:
    words = [*service["command"], *map(str, service["healthcheck"]["test"])]
    return {name for word in words for name in re.findall(r"/run/secrets/([\w-]+)", word)}


def test_every_compose_file_is_among_those_tested():
    assert set(FILES) == {name for names in WHOLE.values() for name in names}


@every_file
def test_flowers_commands_know_every_flag(names):
    for name, service in read(*names)["services"].items():
        (command,) = service["entrypoint"]
        unknown = set(flags_in(service["command"])) - flags_of(command)
        assert not unknown, f"{name}: {command} has no {unknown}"


def test_the_help_is_read_right():
    assert "--isolation" in flags_of("flower-supernode")
    assert "--auth-supernode-public-key" not in flags_of("flower-supernode")  # deprecated
    assert "--no-such-flag" not in flags_of("flower-superlink")


@every_file
def test_every_secret_volume_network_and_service_named_is_defined(names):
    project = read(*names)
    services, mounted = project["services"], set()
    for name, service in services.items():
        assert set(service["secrets"]) == secrets_used(service), name
        assert set(service["secrets"]) <= set(project["secrets"]), name
        assert set(service.get("depends_on", [])) <= set(services), name
        assert set(service.get("networks", [])) <= set(project.get("networks", {})), name
        mounted |= {volume.split(":")[0] for volume in service.get("volumes", [])} & set(project["volumes"])
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            assert source in project["volumes"] or target == "/app/data", f"{name}: {volume}"
    assert mounted == set(project["volumes"])
    assert {name for service in services.values() for name in service["secrets"]} == set(project["secrets"])


@every_file
def test_every_address_is_a_service_that_can_be_reached_and_listens_there(names):
    services = read(*names, SUPERLINK_HOST="elsewhere")["services"]
    for name, service in services.items():
        for flag in {"--superlink", "--runtime-api-address"} & set(flags_in(service["command"])):
            host, port = value_of(service["command"], flag).split(":")
            if host == "elsewhere":
                continue
            assert value_of(services[host]["command"], "--port") == port, name
            assert value_of(services[host]["command"], "--host") == "0.0.0.0"
            assert host in service["depends_on"]
            shared = set(service.get("networks", ["default"])) & set(services[host].get("networks", ["default"]))
            assert shared, f"{name} and {host} share no network"


@every_file
def test_only_the_superlinks_port_is_published(names):
    bound = "127.0.0.1" if names[0] == "compose.yml" else "0.0.0.0"  # on one host nobody else has to reach it
    published = {name: service["ports"] for name, service in read(*names)["services"].items() if "ports" in service}
    assert published == ({} if names[0] == "compose.node.yml" else {"superlink": [{"target": 8000, "published": "8000", "host_ip": bound}]})


@every_file
def test_tls_node_authentication_and_superexec_secrets_are_on(names):
    services = read(*names)["services"]
    secret = {}
    for name, service in services.items():
        flags, command = set(flags_in(service["command"])), service["entrypoint"][0]
        secret[name] = value_of(service["command"], "--superexec-auth-secret-file")
        if command == "flower-superlink":
            assert {"--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--enable-supernode-auth"} <= flags
        if command == "flower-supernode":
            assert {"--root-certificates", "--auth-supernode-private-key"} <= flags
        host = value_of(service["command"], "--runtime-api-address").split(":")[0] if command == "flower-superexec" else name
        assert secret.setdefault(host, secret[name]) == secret[name], f"{name} and {host} hold different secrets"
        if "--insecure" in flags:  # only on a network of its own, without a way out
            assert all(read(*names)["networks"][network]["internal"] for network in service["networks"])
            assert host.startswith("supernode")
    assert len(set(secret.values())) == sum(service["entrypoint"] != ["flower-superexec"] for service in services.values())


@every_file
def test_every_service_is_built_restarted_watched_and_without_privileges(names):
    for name, service in read(*names)["services"].items():
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["build"]["target"] == ("server" if name in {"superlink", "superexec-serverapp"} else "node")
        assert service["restart"] == "unless-stopped"
        assert service["cap_drop"] == ["ALL"]
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service.get("shm_size") == ("256mb" if "superexec" in name else None)
        if service["entrypoint"] == ["flower-superexec"]:
            assert "127.0.0.1:9099" in service["command"][-1]
            assert any(target in volume for volume in service["volumes"] for target in (":/app/state", ":/app/results"))


def test_healthchecks_are_python_that_compiles():
    for names in WHOLE.values():
        for service in read(*names)["services"].values():
            _, python, option, code = service["healthcheck"]["test"]
            assert (python, option) == ("python", "-c")
            compile(code, "healthcheck", "exec")


def test_one_host_has_three_nodes_that_the_app_accepts_with_three_models():
    services = read("compose.yml")["services"]
    settings = merged([], {}).settings
    nodes = [service for name, service in services.items() if name.startswith("supernode")]
    profiles = [NodeProfile.of(parse_config_args([value_of(node["command"], "--node-config")]), settings) for node in nodes]
    assert [(p.node_name, p.partition, p.num_partitions) for p in profiles] == [("node-1", 0, 3), ("node-2", 1, 3), ("node-3", 2, 3)]
    assert len({p.model for p in profiles}) == 3
    assert not any(p.simulated for p in profiles)
    assert {p.state_dir for p in profiles} == {"/app/state"}


def test_a_node_elsewhere_is_described_by_its_variables():
    project = read("compose.node.yml", NODE_NAME="pi-3", MODEL="cnn2", RANK_RATIO="0.5", DEVICE="cpu", SUPERLINK_HOST="fl.example")
    command = project["services"]["supernode"]["command"]
    profile = NodeProfile.of(parse_config_args([value_of(command, "--node-config")]), merged([], {}).settings)
    assert (profile.node_name, profile.model, profile.rank_ratio, profile.device) == ("pi-3", "cnn2", 0.5, "cpu")
    assert (profile.data, profile.state_dir, profile.partition) == ("/app/data", "/app/state", None)
    assert value_of(command, "--superlink") == "fl.example:8000"


def test_the_gpu_goes_to_the_training_code_of_a_node():
    services = read("compose.node.yml", "compose.gpu.yml", GPU="1")["services"]
    (device,) = services["superexec-clientapp"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["1"], "capabilities": ["gpu"]}
    assert services["superexec-clientapp"]["entrypoint"] == ["flower-superexec"]


def test_the_secrets_are_files_that_heterofleet_certs_makes(tmp_path):
    create(tmp_path / "certs", nodes=3)
    for names in WHOLE.values():
        for name, secret in read(*names)["secrets"].items():
            assert (tmp_path / secret["file"]).is_file(), f"{names[0]}: {name}"


def test_variables_are_those_that_the_deployment_page_explains():
    page = (FOLDER.parent / "docs/deploy.md").read_text(encoding="utf-8")
    used = {match[0] for name in FILES for match in VARIABLE.findall((FOLDER / name).read_text(encoding="utf-8"))}
    assert used == {name for name in used if f"`{name}`" in page}
    assert {"SUPERLINK_HOST", "NODE_NAME"} <= used


def test_a_node_needs_what_the_app_needs_but_ray_and_plots():
    def bounds(name: str) -> dict[str, str]:
        lines = (FOLDER.parent / name).read_text(encoding="utf-8").splitlines()
        pairs = (re.match(r"([a-z-]+)(?:\[\w+\])?([<>=].*)", line) for line in lines)
        return {pair[1]: pair[2] for pair in pairs if pair}

    whole, least = bounds("requirements.txt"), bounds("requirements-node.txt")
    node = least | bounds("requirements-node-data.txt")
    assert set(least) == {"flwr", "torch", "numpy", "pydantic", "safetensors", "pillow"}
    assert node.items() <= whole.items()
    assert set(whole) - set(node) == {"matplotlib", "typer", "rich"}  # flwr itself needs the last two
    assert "simulation" not in re.sub(r"#.*", "", (FOLDER.parent / "requirements-node.txt").read_text(encoding="utf-8"))


def test_the_image_gets_only_files_that_its_ignore_file_lets_in():
    copied = re.findall(r"^COPY (?:--\S+ )*(\S+) ", (FOLDER / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)
    ignore = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert ignore[0] == "*"
    assert {f"!{name}" for name in copied} == set(ignore[1:])


def lint(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = shutil.which(tool, path=str(SCRIPTS)) or shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed; requirements-dev.txt names it")
    return subprocess.run([path, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)


def test_hadolint_finds_nothing_in_the_dockerfile():
    done = lint("hadolint", "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_the_compose_files_follow_the_compose_specification():
    done = lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *FILES)
    assert done.returncode == 0, done.stdout
