"""A node held to 1 core and 1 GB finishes FedHM rounds, one behind a slow line too, and what a node's packages take is counted."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.edge_node import Group, installed_bytes
from tests.fleet_fixture import ROOT


def test_packages_are_counted_with_what_they_need_and_once(tmp_path):
    (tmp_path / "requirements.txt").write_text("# none of them twice\ntyper>=0.1  # a comment\nclick\nno-such-package-here\n")
    found = installed_bytes(tmp_path / "requirements.txt")
    assert {"typer", "click"} <= set(found)
    assert "no-such-package-here" not in found
    own = importlib.metadata.distribution("click").files or []
    assert found["click"] == sum(Path(str(file.locate())).stat().st_size for file in own if Path(str(file.locate())).is_file())
    assert not {"torch", "ray"} & set(found)


def test_a_group_holds_a_process_and_all_it_starts():
    group = Group.of(64 * 2**20)
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    try:
        code = "import os, subprocess, sys; sys.stdin.readline(); subprocess.run([sys.executable, '-c', 'x = bytes(2**20) * 200'])"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
            group.add(process.pid)
            process.communicate(b"\n", timeout=60)
        assert group.killed() == 1
        assert 60 * 2**20 < group.peak() <= 64 * 2**20
    finally:
        group.folder.rmdir()


def benchmark(name: str, *words: str) -> str:
    """Return what a benchmark prints; it must end well."""
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / name, *words], env=os.environ, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_of_one_core_and_one_gigabyte_finishes_a_fedhm_round_at_its_ratio():
    shown = benchmark("edge_node.py", "--model", "cnn5", "--rank-ratio", "0.25", "--rounds", "1")
    assert "cnn5 at rank ratio 0.25, 1 core and 1024 MB" in shown
    assert "every round finished" in shown
    peak = re.search(r"peak of the cgroup: (\d+) MB; processes killed for memory: 0", shown)
    assert peak is None or int(peak[1]) < 1024


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_round_gets_through_a_slow_line():
    shown = benchmark("slow_link.py", "--mbit", "1", "--model", "mlp")
    row = next(line.split() for line in shown.splitlines() if re.match(r" *1 +[\d.]+ ", line))  # not "1 Mbit/s up"
    down, up, ideal, seconds = map(float, row[1:5])
    assert ideal == pytest.approx(8 * (down + up), abs=0.2)  # MB at 1 Mbit/s
    assert seconds >= ideal
    for way, least in (("up", up), ("down", down)):
        passed = re.search(rf"([\d.]+) MB {way} in all: ([\d.]+) s at that rate, the line was busy for ([\d.]+) s", shown)
        assert passed
        assert float(passed[1]) >= least
        assert float(passed[3]) >= 0.8 * float(passed[2])
