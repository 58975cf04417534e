"""`heterofleet compare`: a case that cannot begin is refused before the first job of any."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from server_app import cli, jobs, preflight
from server_app.cases import Values, plan_comparison
from server_app.jobs import check_cases
from server_app.settings import SettingsError


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "is not 'name: key=value"),
        ("x: strategy=fedhm fedhm.model=nosuch", "case 'x': fedhm.model = 'nosuch' is no model"),
        ("x: fleet.data=/nowhere", "case 'x': .*/nowhere"),
        ("x: strategy=fedmuscle fedmuscle.public-source=/nowhere", "case 'x': .*/nowhere"),
        ("x: strategy=fedmrl fleet.models=cnn1,torchvision:nosuch", "case 'x': .*nosuch"),
    ],
)
def test_a_case_that_cannot_begin_is_refused_before_the_first_job(tmp_path, monkeypatch, case, message):
    monkeypatch.setattr(jobs, "run_jobs", lambda *arguments: pytest.fail("a job was started"))
    monkeypatch.setattr(cli.err, "width", 400)
    refused = CliRunner().invoke(cli.app, ["compare", "-n", "2", "--case", case, "--out", str(tmp_path / "none")])
    assert refused.exit_code == 2, refused.output
    assert re.search(message, refused.stderr)
    assert not (tmp_path / "none").exists()


def test_a_public_set_that_does_not_fit_the_data_of_a_node_is_refused_before_the_first_job(tmp_path):
    rows = [f"{index / 7},{index % 5},{index % 2}" for index in range(80)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,label", *rows]) + "\n", encoding="utf-8")
    case = f"x: strategy=fedmuscle fleet.models=cnn1,mlp fleet.data=embedded,{tmp_path / 'table.csv'}"
    made = plan_comparison(nodes=2, config=["fleet.models=mlp", "fedavg.model=mlp"], cases=[case])
    with pytest.raises(SettingsError, match="case 'x': public set 'embedded' has samples of shape"):
        check_cases(made, tmp_path)


def test_only_what_is_not_done_is_asked_again(tmp_path, monkeypatch):
    made = plan_comparison(nodes=2, cases=["a: strategy=fedmrl"], seeds="1,2")
    asked: list[Values] = []
    monkeypatch.setattr(preflight, "check_fleet", lambda checked, nodes: asked.append(checked.flat) or ("a warning",))
    (done,) = (job for job in made.jobs if job.strategy == "fedavg" and job.seed == 1)
    (tmp_path / done.folder).mkdir()
    (tmp_path / done.folder / "job.json").write_text('{"state": "done"}', encoding="utf-8")
    assert check_cases(made, tmp_path) == ("case 'local': a warning", "case 'a': a warning")
    assert [(config["strategy"], config["seed"]) for config in asked] == [("local", 1), ("fedmrl", 1), ("local", 2)]
