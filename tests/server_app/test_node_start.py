"""The command of a node and its environment."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from server_app.node_link import Address
from server_app.node_start import Start, check_port, transfer_settings
from server_app.settings import SettingsError

CONFIG: dict[str, str | float] = {
    "name": "pi-3",
    "model": "cnn1",
    "rank-ratio": 1,
    "device": "auto",
    "data": "/srv/my pictures",
    "state-dir": "/var/lib/heterofleet",
}


def start(**changes) -> Start:
    config = CONFIG | changes.pop("config", {})
    return Start(Address("server.example", 8000), config, **changes)


def node_config(words: list[str]) -> dict:
    """Return what Flower makes of a command's `--node-config`."""
    return parse_config_args([words[words.index("--node-config") + 1]])


def test_flower_reads_back_what_the_node_says_of_itself():
    words = start(config={"rank-ratio": 0.25}).command
    assert node_config(words) == CONFIG | {"rank-ratio": 0.25}
    assert node_config(shlex.split(start().shown())) == CONFIG


@pytest.mark.parametrize("data", ["/srv/a=b c", "C:\\pictures", 'say "cheese"', "it's", "/srv/50%$HOME", "/srv/ä"])
def test_values_with_quotes_and_backslashes_reach_flower_as_they_are(data):
    assert node_config(start(config={"data": data}).command)["data"] == data


@pytest.mark.parametrize("data", ["both \" and '", "two\nlines", "back\\slash's"])
def test_a_value_that_flower_cannot_be_told_is_refused(data):
    with pytest.raises(SettingsError, match="--data"):
        _ = start(config={"data": data}).command


def test_keys_and_certificates_go_into_the_command_and_not_with_insecure(tmp_path):
    words = start(ca=tmp_path / "ca.crt", key=tmp_path / "node.key", port=9095).command
    assert words[1:] == [
        *("--superlink", "server.example:8000", "--root-certificates", str(tmp_path / "ca.crt")),
        *("--auth-supernode-private-key", str(tmp_path / "node.key"), "--port", "9095", "--node-config", words[-1]),
    ]
    assert "--insecure" in start(insecure=True).command
    for given in ("ca", "key"):
        with pytest.raises(SettingsError, match="--insecure"):
            start(insecure=True, **{given: tmp_path})


def test_the_program_is_that_of_this_environment_which_also_comes_first_on_its_path():
    made = start()
    assert made.program == Path(sys.executable).parent / "flower-supernode"
    assert made.environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_without_flower_the_way_to_get_it_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"pip install -r requirements-node\.txt"):
        start()


@pytest.mark.parametrize(
    ("mbit", "chunk"),
    [
        (0.5, 625_000),  # 0.5e6 bit/s / 8 * 10 s
        (0.01, 65_536),  # never smaller
        (8.0, 5_242_880),  # never larger than Flower's own
    ],
)
def test_a_slow_uplink_gets_pieces_of_ten_seconds_one_at_a_time(mbit, chunk):
    found = transfer_settings(mbit)
    assert found == {"FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(chunk), "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES": "1"}
    assert start(uplink_mbit=mbit).environment.items() >= found.items()
    assert start(uplink_mbit=mbit).shown().startswith(f"FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE={chunk} ")
    assert transfer_settings(0.0) == {}


def test_flower_takes_the_pieces_settings_by_these_names():
    code = "from flwr.common import constant as a; from flwr.supercore import constant as b\n"
    code += "print(a.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, b.FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES)"
    env = start(uplink_mbit=0.5).environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["625000", "1"]


def test_a_port_that_is_taken_is_fatal_and_another_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = check_port(port)
        assert check.fatal
        assert check.cure.startswith(f"--port {port + 1}")
    assert not check_port(port).fatal
