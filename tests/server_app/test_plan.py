"""What `heterofleet simulate` makes of what was typed, and what the other commands say before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models import ModelError, build
from server_app import cli, launch, link
from server_app.launch import Launch
from server_app.plan import absolute
from tests.fleet_fixture import pictures
from tests.server_app.commands import run

SMALL = ("--nodes", "2", "--no-alone", "-c", "fleet.models=mlp", "-c", "fedmrl.small-model=mlp", "-c", "fedmrl.shared-dim=8")


def test_paths_that_exist_here_are_made_absolute(launched: list[Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "pics", 40)
    result = run("simulate", *SMALL, "-c", "data.source=pics", "-c", "fleet.data=pics, ./pics", "-c", "state-dir=kept", "--out", "my run")
    assert result.exit_code == 0, result.output
    config = launched[0].run_config
    assert (config["data.source"], config["state-dir"]) == (str(tmp_path / "pics"), str(tmp_path / "kept"))
    assert config["fleet.data"] == f"{tmp_path / 'pics'},{tmp_path / 'pics'}"
    again = run("simulate", *SMALL, "--out", "my run")
    assert f"--resume '{tmp_path / 'my run'}'" in again.stderr


@pytest.mark.parametrize("name", ["embedded", "", "ylecun/mnist", "module:function", "/absolute/missing"])
def test_sources_that_are_no_path_here_stay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "embedded").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute(name) == name


def test_out_dir_as_a_setting_is_the_out_dir(launched: list[Launch], tmp_path: Path) -> None:
    assert run("simulate", *SMALL, "-c", f"out-dir={tmp_path / 'here'}").exit_code == 0
    assert launched[0].out_dir == tmp_path / "here"


def test_an_out_dir_that_cannot_be_written_is_one_line(launched: list[Launch], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    result = run("simulate", *SMALL, "--out", str(tmp_path / "file" / "run"))
    assert (result.exit_code, launched) == (2, [])
    assert "cannot be written: Not a directory" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_own_modules_of_this_folder_are_found_here_and_by_the_nodes(
    launched: list[Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_nets.py").write_text("from models.vision import mlp as net\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    own = ("-c", "fleet.models=my_nets:net,mlp")
    assert run("simulate", *SMALL, "--out", "one", *own).exit_code == 0
    assert run("simulate", *SMALL, "--out", "two").exit_code == 0
    assert [wanted.modules for wanted in launched] == [tmp_path, None]
    monkeypatch.setenv("PYTHONPATH", "/before")
    assert link.environment(tmp_path, "token", tmp_path)["PYTHONPATH"] == f"/before:{tmp_path}"
    assert link.environment(tmp_path, "token")["PYTHONPATH"] == "/before"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def net(shape, outputs, dim):\n    return unheard_of\n", r"own_bug:net' failed: NameError: .* \(.*own_bug.py:2\)"),
        ("def net(:\n", r"SyntaxError: .* \(.*own_bug.py:1\)"),
        (
            "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return self.absent(x)\n"
            "def net(shape, outputs, dim):\n    return Net()\n",
            r"own_bug:net' failed: AttributeError: .* \(.*own_bug.py:4\)",
        ),
    ],
)
def test_a_bug_in_a_users_model_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str) -> None:
    (tmp_path / "own_bug.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_bug", raising=False)
    with pytest.raises(ModelError, match=words):
        build("own_bug:net", input_shape=(1, 8, 8), num_outputs=3)


def test_no_test_samples_are_warned_of(launched: list[Launch], tmp_path: Path) -> None:
    result = run("simulate", *SMALL, "-c", "data.test-fraction=0", "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert "data.test-fraction = 0: a node without a test split of its own is not evaluated" in result.stderr


def test_a_ratio_that_cuts_nothing_is_warned_of_once_also_with_quiet(launched: list[Launch], tmp_path: Path) -> None:
    small = ("--nodes", "4", "--strategy", "fedhm", "--no-alone", "-c", "fleet.rank-ratios=1.0,0.5", "-c", "fleet.models=mlp")
    result = run("simulate", *small, "-q", "-c", "fedhm.rho=99", "--out", str(tmp_path / "run"))
    assert (result.exit_code, result.stderr.count("at rank ratio 0.5 no layer of cnn5 is cut (fedhm.rho = 99)")) == (0, 1), result.output
    assert "no layer" not in run("simulate", *small, "--out", str(tmp_path / "other")).stderr


@pytest.mark.parametrize(("begun", "words"), [(False, "nothing was done yet"), (True, "--resume '")])
def test_a_stop_says_what_can_be_typed_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, words: str) -> None:
    def stopped(wanted: Launch, on_status: Any) -> dict[str, Any]:
        if begun:
            (wanted.out_dir / "run.json").write_text(json.dumps({"run_config": wanted.run_config}), encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "simulate", stopped)
    monkeypatch.setattr(cli.err, "width", 200)
    result = run("simulate", *SMALL, "--out", str(tmp_path / "a run"))
    assert (result.exit_code, words in result.stderr) == (130, True), result.output


def test_partition_shows_the_names_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.out, "width", 200)
    pictures(tmp_path / "pics", 40)
    result = run("partition", "--nodes", "2", "-c", f"data.source={tmp_path / 'pics'}", "-c", "data.partitioner=iid")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in ("class-0", "class-1", "class-2"))


def test_doctor_goes_on_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cli.out, "width", 200)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert all(word in result.stdout for word in ("Python", "memory", "data, models", "is not a folder"))
