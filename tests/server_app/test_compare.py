"""`heterofleet compare`: what is planned, that a job has the bits of any other run, resume, and every number by hand."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from server_app import cli, inprocess, jobs
from server_app.cases import FEDAVG, FINETUNED, LOCAL, Comparison, Job, plan_comparison
from server_app.compare import measure, summarise
from server_app.compare_page import mean_curve
from server_app.jobs import job_record, run_jobs, work
from server_app.settings import SettingsError
from tests import fleet_fixture
from tests.fleet_fixture import config, defaults, rows
from tests.server_app.run_folder import append, make


def typed(tmp_path: Path, **changes: Any) -> list[str]:
    """Return the fixture's settings as they are typed after -c."""
    plain, made = defaults(), config(tmp_path, **changes)
    left = {key: value for key, value in made.items() if value != plain[key] and key != "alone"}
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in left.items()]


def planned(tmp_path: Path, *cases: str, **options: Any) -> Comparison:
    changes = options.pop("changes", {})
    return plan_comparison(nodes=3, config=typed(tmp_path, **changes), cases=cases, **options)


def job_of(comparison: Comparison, name: str, seed: int = 1) -> Job:
    (case,) = (case for case in comparison.cases if case.name == name)
    (job,) = (job for job in case.variants[0].jobs if job.seed == seed)
    return job


# What is planned -------------------------------------------------------------------------------------------------


def test_the_three_baselines_are_always_there_and_one_fedavg_run_gives_two_of_them(tmp_path):
    made = planned(tmp_path, "ours: strategy=fedmrl", "paper: strategy=fedmrl fedmrl.projector-start=random", seeds="1,2")
    assert [case.name for case in made.cases] == [LOCAL, FEDAVG, FINETUNED, "ours", "paper"]
    assert len(made.jobs) == 2 * 4
    assert made.cases[1].variants == made.cases[2].variants
    assert [job.seed for job in made.jobs] == [1] * 4 + [2] * 4
    assert all(job.config["alone"] is False for job in made.jobs)


def test_fedavg_trains_the_small_model_of_fedmrl_unless_told_another():
    small = plan_comparison(config=["fedmrl.small-model=mlp"])
    assert job_of(small, FEDAVG).config["fedavg.model"] == "mlp"
    other = plan_comparison(config=["fedmrl.small-model=mlp", "fedavg.model=cnn4"])
    assert job_of(other, FEDAVG).config["fedavg.model"] == "cnn4"


def test_a_search_varies_only_what_a_case_uses_and_has_not_set(tmp_path):
    search = ["train.learning-rate=0.01,0.02", "fedmrl.shared-dim=4,8"]
    made = planned(
        tmp_path, "a: strategy=fedmrl", "b: strategy=fedmrl fedmrl.shared-dim=6", search=search, changes={"data__val_fraction": 0.2}
    )
    assert [len(case.variants) for case in made.cases] == [2, 2, 2, 4, 2]
    assert [variant.chosen for variant in made.cases[4].variants] == [{"train.learning-rate": 0.01}, {"train.learning-rate": 0.02}]


def test_a_plan_file_is_the_command_line_written_down(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        'nodes = 4\nseeds = [1, 3]\ntarget = 0.5\n[settings]\nnum-rounds = 2\ndata.partitioner = "iid"\ndata.val-fraction = 0.2\n'
        '[cases."with a space"]\nstrategy = "fedmrl"\nfedmrl.projector-start = "split"\n[search]\ntrain.learning-rate = [0.01, 0.02]\n'
    )
    by_hand = plan_comparison(
        nodes=4,
        seeds="1,3",
        target=0.5,
        config=["num-rounds=2", "data.partitioner=iid", "data.val-fraction=0.2"],
        cases=["with a space: strategy=fedmrl fedmrl.projector-start=split"],
        search=["train.learning-rate=0.01,0.02"],
    )
    assert plan_comparison(plan=file) == by_hand
    assert plan_comparison(plan=file, nodes=5, seeds="2").seeds == (2,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ["ours strategy=fedmrl"]}, "is not 'name: key=value"),
        ({"cases": ["ours: strategy=fedmlr"]}, "case 'ours': strategy = 'fedmlr' is unknown.*did you mean 'fedmrl'"),
        ({"cases": ["ours: trian.batch-size=8"]}, "did you mean 'train.batch-size'"),
        ({"cases": ["a: strategy=fedmrl", "a: strategy=local"]}, "already is a case named 'a'"),
        ({"cases": ["local: strategy=local"]}, "always there; choose another"),
        ({"cases": ["a: data.alpha=0.1"]}, "data.alpha would change the task"),
        ({"cases": ["a: seed=3"]}, "seed is not set here; see --seeds"),
        ({"seeds": "1,x"}, "type whole numbers"),
        ({"target": 90}, "type an accuracy between 0 and 1"),
        ({"search": ["train.learning-rate=0.1,0.2"]}, "set data.val-fraction"),
        ({"search": ["strategy=local,fedavg"]}, "strategy cannot be searched"),
        ({"search": ["train.learning-rate=quick"]}, "type a number"),
        ({"nodes": 1}, "fleet.min-nodes = 2, but --nodes 1"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(options, message):
    with pytest.raises(SettingsError, match=message):
        plan_comparison(**options)


# One job ---------------------------------------------------------------------------------------------------------


def test_a_job_has_the_bits_and_bytes_of_a_run_over_flowers_serialisation(tmp_path):
    job = job_of(planned(tmp_path, "ours: strategy=fedmrl"), "ours")
    work(job, tmp_path / "job")
    fleet_fixture.run(dict(job.config), tmp_path / "net")
    mine, theirs = (load_file(tmp_path / name / "shared/fedmrl.safetensors") for name in ("job", "net"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    kept = ("round", "node", "accuracy", "loss", "train_loss", "num_examples", "bytes_down", "bytes_up")
    got, wanted = ([{key: row.get(key) for key in kept} for row in rows(tmp_path / name, "node")] for name in ("job", "net"))
    assert got == wanted
    assert len(got) == 2 * 3
    record = job_record(tmp_path / "job")
    assert record["state"] == "done"
    assert record["cpu_seconds"] > 0
    assert not (tmp_path / "job/state").exists()


def test_nodes_work_when_their_reply_is_pulled_and_an_absent_one_is_an_error(tmp_path):
    grid = inprocess.simulated(config(tmp_path), 2)
    worked: list[int] = []
    grid.app = lambda message, context: worked.append(context.node_id) or inprocess.Message(inprocess.RecordDict(), reply_to=message)
    ids = list(grid.push_messages([inprocess.Message(inprocess.RecordDict(), node, "train") for node in (1000, 1001, 1002)]))
    assert worked == []
    (first,) = grid.pull_messages(ids[1:2])
    assert worked == [1001]
    assert first.metadata.reply_to_message_id == ids[1]
    _, absent = grid.pull_messages(ids)
    assert worked == [1001, 1000]
    assert absent.error.code == 5
    assert list(grid.pull_messages(ids)) == []


def test_another_flower_is_refused_with_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.supercore.task_identity", None)
    spec = importlib.util.spec_from_file_location("again", inprocess.__file__)
    with pytest.raises(ImportError, match=r"flwr 1\.\d+\.\d+ lacks a name .* pip install 'flwr>=1.42,<1.43'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_fine_tuning_is_the_next_round_with_every_node_before_its_average(tmp_path):
    job = job_of(planned(tmp_path, changes={"num_rounds": 1}), FEDAVG)
    work(job, tmp_path / "job")
    tuned = json.loads((tmp_path / "job/finetuned.json").read_text())
    fleet_fixture.run({**job.config, "num-rounds": 2}, tmp_path / "longer")
    longer = {row["node"]: row["local_accuracy"] for row in rows(tmp_path / "longer", "node") if row["round"] == 2}
    assert {row["node"]: row["local_accuracy"] for row in tuned["nodes"]} == longer
    assert tuned["personalized"]["local_accuracy_mean"] == pytest.approx(sum(longer.values()) / 3)
    assert measure(job, tmp_path / "job", "local_")["mean"] == pytest.approx(sum(longer.values()) / 3)
    assert measure(job, tmp_path / "job")["mean"] == rows(tmp_path / "job", "round")[-1]["personalized"]["accuracy_mean"]


def test_fine_tuning_counts_every_node_also_where_a_round_samples_one(tmp_path):
    changes = {"num_rounds": 2, "fleet__fraction": 0.34, "data__val_fraction": 0.2}
    job = job_of(planned(tmp_path, changes=changes), FEDAVG)
    work(job, tmp_path / "job")
    assert [row["sampled"] for row in rows(tmp_path / "job", "round")] == [1, 1]
    tuned = json.loads((tmp_path / "job/finetuned.json").read_text())
    assert [row["node"] for row in tuned["nodes"] if "local_accuracy" in row] == ["partition-0", "partition-1", "partition-2"]
    assert (tmp_path / "job/checkpoint/fedavg/round-000002.safetensors").exists()
    assert not (tmp_path / "job/checkpoint/fedavg/round-000003.safetensors").exists()
    last = [row for row in rows(tmp_path / "job", "node") if row["round"] == 2]
    assert {row["val_samples"] for row in last} == {8}
    own = rows(tmp_path / "job", "round")[-1]["personalized"]
    assert own["val_accuracy_mean"] == pytest.approx(sum(row["val_accuracy"] for row in last) / 3)
    values = [row["local_val_accuracy"] for row in tuned["nodes"]]
    assert measure(job, tmp_path / "job", "local_")["val"] == pytest.approx(sum(values) / 3)


# Many jobs -------------------------------------------------------------------------------------------------------


def test_a_failed_job_ends_no_other_a_stopped_one_goes_on_and_a_done_one_is_skipped(tmp_path, monkeypatch):
    made = planned(tmp_path, "ours: strategy=fedmrl", changes={"num_rounds": 12})
    good = job_of(made, "ours")
    bad = Job({**good.config, "fleet.models": "mlpp"}, 3)
    seen: list[int] = []

    def stop(progress: jobs.Progress) -> None:
        seen.append(int(progress.running.get(good.folder, {}).get("round") or 0))
        if seen[-1] >= 1 and bad.folder in progress.over:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([bad, good], tmp_path / "jobs", 2, stop)
    assert not multiprocessing.active_children()
    assert job_record(tmp_path / "jobs" / bad.folder)["state"] == "failed"
    assert "mlpp" in job_record(tmp_path / "jobs" / bad.folder)["reason"]
    assert job_record(tmp_path / "jobs" / good.folder)["state"] == "stopped"
    before = len(rows(tmp_path / "jobs" / good.folder, "round"))
    assert 1 <= before < 12
    work(good, tmp_path / "jobs" / good.folder)
    fleet_fixture.run(dict(good.config), tmp_path / "straight")
    mine, theirs = (load_file(path / "shared/fedmrl.safetensors") for path in (tmp_path / "jobs" / good.folder, tmp_path / "straight"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    monkeypatch.setattr(jobs._Pool, "_start", None)
    assert run_jobs([good], tmp_path / "jobs", 2).skipped == 1


def test_an_unfinished_job_of_other_code_starts_anew(tmp_path):
    job = job_of(planned(tmp_path, "ours: strategy=fedmrl"), "ours")
    folder = tmp_path / "jobs" / job.folder
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"state": "stopped", "fingerprint": "of other code"}))
    (folder / "left over").touch()
    pool = jobs._Pool([job], tmp_path / "jobs", 1, jobs.Progress(1))
    pool.context = type("Context", (), {"Process": lambda self, **kwargs: type("P", (), {"start": lambda self: None})()})()
    pool._start(job)
    assert list(folder.iterdir()) == []


# Numbers ---------------------------------------------------------------------------------------------------------


def finished(folder: Path, job: Job, *rounds: dict[str, float], state: str = "done", val: float | None = None, **record: Any) -> None:
    """Write a job's folder with these accuracies; round i takes 2 i seconds and 1000 i + 500 bytes."""
    make(folder / job.folder, {job.strategy: list(rounds)}, num_rounds=len(rounds))
    (folder / job.folder / "job.json").write_text(json.dumps({"state": state, "reason": "", "cpu_seconds": 10.0, **record}))
    if val is not None:
        lines = [json.loads(line) for line in (folder / job.folder / "metrics.jsonl").read_text().splitlines()]
        lines[-1]["personalized"]["val_accuracy_mean"] = val
        (folder / job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_number_of_the_table_by_hand(tmp_path):
    made = plan_comparison(nodes=2, seeds="1,2", target=0.6, cases=["ours: strategy=fedmrl"])
    for seed, last in ((1, 0.5), (2, 0.6)):
        finished(tmp_path, job_of(made, LOCAL, seed), {"a": 0.4, "b": 0.4}, {"a": last, "b": last})
    finished(tmp_path, job_of(made, "ours", 1), {"a": 0.3, "b": 0.5}, {"a": 0.6, "b": 0.8}, {"a": 0.5, "b": 0.7})
    finished(tmp_path, job_of(made, "ours", 2), {"a": 0.6, "b": 0.6}, {"a": 0.7, "b": 0.7}, {"a": 0.75, "b": 0.85})
    result = summarise(made, tmp_path)
    local, fedavg, _, ours = result["rows"]
    assert (result["best_baseline"], local["gain"], fedavg["mean"], fedavg["done"]) == (LOCAL, None, None, 0)
    assert fedavg["seeds"]["1"]["state"] == "waiting"
    assert (ours["done"], ours["mean"], ours["min"], ours["max"]) == (2, pytest.approx(0.7), pytest.approx(0.6), pytest.approx(0.8))
    assert ours["std"] == pytest.approx(0.02**0.5)
    assert (ours["worst"], ours["worst_min"]) == (pytest.approx(0.625), 0.5)
    assert (ours["gain"], ours["gain_std"]) == (pytest.approx(0.15), pytest.approx(0.005**0.5))
    assert ours["oracle"] == pytest.approx((0.7 + 0.8) / 2)
    assert ours["target"] == {"reached": 2, "rounds": 1.5, "bytes": (1500 + 2500 + 1500) / 2, "seconds": (2.0 + 4.0 + 2.0) / 2}
    assert local["target"] == {"reached": 1, "rounds": 2.0, "bytes": 4000.0, "seconds": 6.0}
    assert (ours["bytes"], ours["seconds"], ours["cpu_seconds"]) == (7500, 12.0, 10.0)
    assert result["cost"] == {"jobs": 6, "done": 4, "cpu_seconds": 40.0, "other_code": 0}
    assert ours["command"].startswith("heterofleet simulate --nodes 2 --strategy fedmrl --no-alone")


def test_a_search_chooses_by_validation_and_reports_test(tmp_path):
    search = ["train.learning-rate=0.01,0.02"]
    made = plan_comparison(nodes=2, config=["data.val-fraction=0.2"], search=search, cases=["ours: strategy=fedmrl"])
    (ours,) = (case for case in made.cases if case.name == "ours")
    finished(tmp_path, ours.variants[0].jobs[0], {"a": 0.9, "b": 0.9}, val=0.5)
    finished(tmp_path, ours.variants[1].jobs[0], {"a": 0.7, "b": 0.7}, val=0.6)
    row = summarise(made, tmp_path)["rows"][3]
    assert (row["chosen"], row["val"], row["mean"]) == ({"train.learning-rate": 0.02}, 0.6, pytest.approx(0.7))
    assert [tried["val"] for tried in row["searched"]] == [0.5, 0.6]
    assert "train.learning-rate=0.02" not in row["command"]
    assert "data.val-fraction=0.2" in row["command"]


def test_what_diverged_failed_or_fell_says_so(tmp_path):
    made = plan_comparison(nodes=2, cases=["a: strategy=fedmrl", "b: strategy=fedmrl train.learning-rate=0.5", "c: strategy=fedavg"])
    a, b, c = (job_of(made, name) for name in "abc")
    finished(tmp_path, a, {"a": 0.3, "b": 0.4}, state="failed", reason="round 2: 0 of 2 sampled nodes\nmore")
    lost = {"kind": "failure", "run": "fedmrl", "round": 2, "phase": "train", "reason": "the training loss is nan: training diverged"}
    append(tmp_path / a.folder, {**lost, "node": "a"}, {**lost, "node": "b"})
    finished(tmp_path, b, {"a": 0.8, "b": 0.8}, {"a": 0.1, "b": 0.1})
    finished(tmp_path, c, {"a": 0.8, "b": 0.8}, fingerprint="of other code")
    result = summarise(made, tmp_path)
    notes = {row["case"]: row["notes"] for row in result["rows"]}
    assert notes["a"] == [
        "seed 1: DIVERGED on 2 nodes, first in round 2",
        "seed 1: failed after 1 rounds: round 2: 0 of 2 sampled nodes more",
    ]
    assert notes["b"] == ["seed 1: fell from 80.0% in round 1"]
    assert notes["c"] == []
    assert result["rows"][3]["mean"] is None
    assert result["cost"]["other_code"] == 1


def test_a_curve_is_the_mean_where_all_seeds_have_a_round():
    assert mean_curve([[[1, 0.2], [2, 0.4], [3, 0.9]], [[1, 0.4], [2, 0.8]]]) == {1: pytest.approx(0.3), 2: pytest.approx(0.6)}
    assert mean_curve([]) == {}


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_leaves_a_page_that_needs_no_network(tmp_path, monkeypatch):
    def here(wanted: list[Job], out_dir: Path, workers: int, watch: Any) -> None:
        for job in wanted:
            folder = out_dir / job.folder
            finished(out_dir, job, {"a": 0.3, "b": 0.5}, {"a": 0.6, "b": 0.8})
            watch(jobs.Progress(len(wanted), over={job.folder: job_record(folder)}))

    monkeypatch.setattr(jobs, "run_jobs", here)
    monkeypatch.setattr(cli.out, "width", 200)
    arguments = ["compare", "-n", "2", "--case", "<ours>: strategy=fedmrl", "--target", "0.6", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "3 of 3 runs done, 30.0 s of CPU" in result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("<ours>") and "of" in line)
    assert line.split()[1:5] == ["1", "of", "1", "70.0%"]
    page = (tmp_path / "out/compare.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "&lt;ours&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert json.loads((tmp_path / "out/compare.json").read_text())["rows"][3]["mean"] == pytest.approx(0.7)


def test_the_command_fails_if_one_run_failed(tmp_path, monkeypatch):
    def here(wanted: list[Job], out_dir: Path, workers: int, watch: Any) -> None:
        for job in wanted:
            finished(out_dir, job, {"a": 0.6, "b": 0.8}, state="failed" if job.strategy == "fedmrl" else "done")

    monkeypatch.setattr(jobs, "run_jobs", here)
    monkeypatch.setattr(cli.out, "width", 200)
    monkeypatch.setattr(cli.err, "width", 200)
    arguments = ["compare", "-n", "2", "--out", str(tmp_path / "out"), "--quiet"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    result = CliRunner().invoke(cli.app, [*arguments, "--case", "ours: strategy=fedmrl"])
    assert (result.exit_code, "1 of 3 runs failed" in result.stderr) == (1, True), result.output
    assert (tmp_path / "out/compare.html").is_file()
