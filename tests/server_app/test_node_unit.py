"""The systemd unit of a node, and what its service could not reach."""

from __future__ import annotations

import configparser
import os
import pwd
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_app import node_unit
from server_app.node_unit import unit, unreachable
from tests.server_app.test_node_start import CONFIG, node_config, start


def _read(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the sections of a unit; a key may come more than once."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in filter(None, text.splitlines()):
        if found := re.fullmatch(r"\[(\w+)\]", line):
            current = sections.setdefault(found[1], [])
        else:
            key, _, value = line.partition("=")
            current.append((key, value))
    return sections


def test_the_unit_restarts_a_node_without_privileges_and_with_its_state():
    service = _read(unit(start(), Path("/var/lib/heterofleet"), memory=800_000_000, user="fleet"))["Service"]
    one = dict(service)
    assert (one["User"], one["Restart"], one["NoNewPrivileges"], one["OOMPolicy"]) == ("fleet", "always", "yes", "continue")
    assert (one["StateDirectory"], one["StateDirectoryMode"]) == ("heterofleet", "0700")
    assert one["MemoryMax"] == "960M"  # 800e6 * 1.25 = 953.7 MiB, up to the next 64
    env = [shlex.split(value)[0] for key, value in service if key == "Environment"]
    assert "HETEROFLEET_HOME=/var/lib/heterofleet" in env
    assert "FLWR_HOME=/var/lib/heterofleet/flwr" in env
    assert "HF_HOME=/var/lib/heterofleet/huggingface" in env  # data sets are downloaded, and all else is read-only
    assert node_config(shlex.split(one["ExecStart"])) == CONFIG
    assert "ReadWritePaths" not in one
    elsewhere = dict(_read(unit(start(), Path("/mnt/disk"), memory=0, user="fleet"))["Service"])
    assert elsewhere["ReadWritePaths"] == "/mnt/disk"
    assert "MemoryMax" not in elsewhere
    assert "StateDirectory" not in elsewhere


def test_the_user_of_a_unit_is_never_root_by_default(monkeypatch):
    monkeypatch.setattr("server_app.node_unit.os.geteuid", lambda: 0)
    assert "User=heterofleet\n" in unit(start(), Path("/var/lib/heterofleet"), memory=0)
    monkeypatch.setattr("server_app.node_unit.os.geteuid", lambda: 1000)
    monkeypatch.setattr("server_app.node_unit.getpass.getuser", lambda: "ann")
    assert "User=ann\n" in unit(start(), Path("/var/lib/heterofleet"), memory=0)


def test_systemd_finds_nothing_wrong_in_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "heterofleet-node.service"
    text = unit(start(config={"data": "/srv/50% $HOME \\ x"}, uplink_mbit=0.5), Path("/var/lib/heterofleet"), memory=10**9, user="root")
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    configparser.ConfigParser(strict=False, interpolation=None).read_string(text)
    file.write_text(text.replace("Restart=always", "Restart=allways"))
    assert "allways" in subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60).stderr


def test_percent_and_dollar_are_no_variables_of_systemd():
    line = next(x for x in unit(start(config={"data": "/srv/50%$HOME"}), Path("/x"), memory=0).splitlines() if x.startswith("ExecStart="))
    assert "/srv/50%%$$HOME" in line


def test_a_folder_anywhere_below_var_lib_is_made_by_systemd():
    service = dict(_read(unit(start(), Path("/var/lib/heterofleet/pi-3"), memory=0, user="fleet"))["Service"])
    assert service["StateDirectory"] == "heterofleet/pi-3"
    assert "ReadWritePaths" not in service


@pytest.mark.parametrize(
    ("state_dir", "line"),
    [
        ("/var/lib/hetero fleet", 'StateDirectory="hetero fleet"'),
        ("/var/lib/a:b \\ 5%", 'StateDirectory="a\\:b \\\\ 5%%"'),
        ('/var/lib/the "old" one', 'StateDirectory="the \\x22old\\x22 one"'),
        ("/mnt/my disk", 'ReadWritePaths="/mnt/my disk"'),
        ('/mnt/the "old" \\ 5%', 'ReadWritePaths="/mnt/the \\"old\\" \\\\ 5%%"'),
    ],
)
def test_a_folder_with_spaces_is_one_item_of_systemds_lists(tmp_path, state_dir, line):
    text = unit(start(), Path(state_dir), memory=0, user="root")
    assert line in text.splitlines()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "heterofleet-node.service"
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # A relative item of ReadWritePaths, an absolute one of StateDirectory: systemd tells what it read.
    file.write_text(text.replace('ReadWritePaths="/', 'ReadWritePaths="').replace('StateDirectory="', 'StateDirectory="/'))
    told = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60).stderr
    assert f"absolute, ignoring: {wrong(state_dir)}" in told


def wrong(state_dir: str) -> str:
    """Return the path as the line that was made wrong has it: without its first slash, or with one in its folder's place."""
    return state_dir.removeprefix("/var/lib") if state_dir.startswith("/var/lib") else state_dir[1:]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that every user may enter, with a program and Python; the service sees the /tmp in which it lies."""
    folder = Path(tempfile.mkdtemp()).resolve()
    try:
        folder.chmod(0o755)
        if not all(path.stat().st_mode & 0o001 for path in folder.parents):
            pytest.skip("other users may not enter the folder for temporary files")
        monkeypatch.setattr(node_unit, "_PRIVATE", ())
        monkeypatch.setattr("server_app.node_start._program", lambda: folder / "bin/flower-supernode")
        for name in ("bin/flower-supernode", "bin/python", "ca.crt", "node.key", "data/a/1.png", "state/x"):
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).touch()
        for path in folder.rglob("*"):
            path.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


def missing(folder: Path, user: str, state: str = "/var/lib/heterofleet") -> list[str]:
    """Return what the unit's service cannot use, and the cures."""
    made = start(config={"data": str(folder / "data")}, ca=folder / "ca.crt", key=folder / "node.key")
    checks = unreachable(made, Path(state), user=user)
    assert all((check.name, check.fatal, bool(check.cure)) == ("unit", False, True) for check in checks)
    return [f"{check.found}; {check.cure}" for check in checks]


def test_a_service_that_reaches_everything_is_not_warned_of(machine):
    assert missing(machine, "nobody") == []


@pytest.mark.parametrize(
    ("name", "mode", "told"),
    [
        ("node.key", 0o600, "--key {0}/node.key: user nobody may not read it (mode 0600, owner {1}); sudo chown nobody {0}/node.key"),
        (
            "ca.crt",
            0o640,
            "--root-certificates {0}/ca.crt: user nobody may not read it (mode 0640, owner {1}); sudo chmod -R o+rX {0}/ca.crt",
        ),
        ("data", 0o750, "--data {0}/data: user nobody may not read it (mode 0750, owner {1}); sudo chmod -R o+rX {0}/data"),
        ("bin", 0o700, "flower-supernode {0}/bin/flower-supernode: user nobody may not enter {0}/bin (mode 0700, owner {1}); use another"),
    ],
)
def test_what_the_user_of_the_service_cannot_read_is_told_with_what_to_type(machine, name, mode, told):
    (machine / name).chmod(mode)
    (found,) = missing(machine, "nobody")
    assert found.startswith(told.format(machine, pwd.getpwuid(os.getuid()).pw_name))
    assert missing(machine, "root") == []


def test_a_state_folder_of_another_or_of_nobody_yet_is_told(machine):
    (other,) = missing(machine, "nobody", f"{machine}/state")
    assert "may not write into it (mode 0755" in other
    assert other.endswith(f"sudo chown -R nobody {machine}/state")
    (absent,) = missing(machine, "root", f"{machine}/none/state")
    assert "is not there, and the service does not start without it (ReadWritePaths)" in absent
    assert f"sudo install -d -m 700 -o root {machine}/none/state" in absent


def test_what_lies_in_tmp_is_told_whoever_runs_the_service(machine, monkeypatch):
    monkeypatch.setattr(node_unit, "_PRIVATE", (machine,))
    found = missing(machine, "root", f"{machine}/state")
    assert [line.split()[0] for line in found] == ["flower-supernode", "--root-certificates", "--data", "--key", "--state-dir"]
    assert all("of its own (PrivateTmp=yes)" in line for line in found)


def test_a_user_that_is_not_there_yet_is_told_and_may_what_all_may(machine):
    (machine / "node.key").chmod(0o600)
    absent, key = missing(machine, "nobody-yet")
    assert absent.endswith("sudo useradd --system --home-dir /var/lib/heterofleet nobody-yet")
    assert key.endswith(f"sudo chown nobody-yet {machine}/node.key")


def test_data_that_is_no_path_is_not_looked_for(machine):
    assert unreachable(start(config={"data": "ylecun/mnist"}), Path("/var/lib/heterofleet"), user="nobody") == []
