"""The commands of the compose files as processes, with the files of `heterofleet certs`: who gets in, who does not, and a whole run."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
import urllib.error
from collections.abc import Iterator

import pytest

from server_app.certs import create
from tests.docker.compose_files import read
from tests.docker.fleet_processes import Fleet
from tests.fleet_fixture import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NODES = (1, 2, 3)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Fleet]:
    """A SuperLink with TLS and node authentication, as in compose.yml, that knows no node."""
    folder = tmp_path_factory.mktemp("fleet")
    create(folder / "certs", nodes=len(NODES))
    create(folder / "foreign", nodes=1)
    made = Fleet(folder)
    with made.running("compose.yml", "superlink") as superlink:
        superlink.eventually(lambda: made.healthy("superlink:8000", folder / "certs/ca.crt"))
        yield made


def test_both_superlinks_are_started_alike():
    assert read("compose.yml")["services"]["superlink"]["command"] == read("compose.server.yml")["services"]["superlink"]["command"]


def test_the_superlink_answers_those_who_hold_its_ca_and_no_one_who_distrusts_it(fleet):
    assert fleet.health("superlink:8000", fleet.folder / "certs/ca.crt") == 200
    for ca in (fleet.folder / "foreign/ca.crt", None):
        with pytest.raises(urllib.error.URLError) as refused:
            fleet.health("superlink:8000", ca)
        assert isinstance(refused.value.reason, ssl.SSLCertVerificationError)
    assert not fleet.healthy("superlink:8000", None, "http")


def test_a_node_that_is_unknown_ends_and_says_why(fleet):
    host, port = fleet.address("superlink:8000").split(":")
    node = {"SUPERLINK_HOST": host, "SUPERLINK_PORT": port, "NODE_NAME": "pi-1", "CERTS_DIR": "certs/node-1"}
    with fleet.running("compose.node.yml", "supernode", **node) as supernode:
        assert supernode.process.wait(timeout=60) == 1
    log = supernode.log.read_text()
    assert "Exit Code: 305" in log
    assert "[code: 2004] Failed to activate SuperNode" in log


def test_three_registered_nodes_with_three_models_finish_a_run(fleet):
    for k in NODES:
        fleet.flwr("supernode", "register", str(fleet.folder / f"certs/node-{k}/node.pub"), "fleet", "--name", f"node-{k}")
    results = fleet.folder / "results"
    small = "num-rounds=1 alone=false data.partitioner='iid' data.samples-per-node=60 fleet.min-nodes=3"
    with contextlib.ExitStack() as stack:
        for service in read("compose.yml")["services"]:
            if service != "superlink":
                stack.enter_context(fleet.running("compose.yml", service))
        fleet.flwr("run", str(ROOT), "fleet", "--run-config", f"{small} out-dir='{results}'")
        status, deadline = "", time.monotonic() + 900
        while not status.startswith("finished") and time.monotonic() < deadline:
            time.sleep(3)
            status = json.loads(fleet.flwr("ls", "fleet", "--format", "json"))["runs"][0]["status"]
        assert fleet.healthy("supernode-1:9094", None, "http")  # what the container's health check asks
    assert status == "finished:completed"
    rows = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    assert {row["node"] for row in rows if "node" in row} == {f"node-{k}" for k in NODES}
