"""The report on run folders made by hand: every number below was worked out from `run_folder.two_runs`."""

from __future__ import annotations

import base64
import json
import math
import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from server_app import page, plots, show
from server_app.report import compare, summarise, write_report
from server_app.rundata import RunFolderError, models_of, read_run
from tests.server_app.run_folder import append, make, two_runs


class _Page(HTMLParser):
    """Collects every tag with its attributes, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def _summary(folder: Path) -> dict[str, Any]:
    return summarise(read_run(folder))


def test_nodes_alone_and_together(tmp_path: Path) -> None:
    rows = _summary(two_runs(tmp_path))["nodes"]
    assert [row["node"] for row in rows] == ["partition-0", "partition-2", "partition-10"]
    assert [row["model"] for row in rows] == ["cnn2", "cnn1", "cnn1"]
    assert [row["alone"] for row in rows] == [0.5, 0.6, 0.7]
    assert [row["together"] for row in rows] == [0.75, 0.6, 0.65]
    assert [row["gain"] for row in rows] == pytest.approx([0.25, 0.0, -0.05], abs=1e-12)
    assert [row["samples"] for row in rows] == [40, 40, 40]


def test_totals_models_and_runs(tmp_path: Path) -> None:
    summary = _summary(two_runs(tmp_path))
    totals = summary["totals"]
    assert (totals["better"], totals["worse"], totals["same"]) == (1, 1, 1)
    assert totals["alone"] == pytest.approx(0.6, abs=1e-12)
    assert totals["together"] == pytest.approx(2.0 / 3.0, abs=1e-12)
    assert totals["gain"] == pytest.approx(0.2 / 3.0, abs=1e-12)
    assert totals["delta_percent"] == pytest.approx((50.0 + 0.0 - 100.0 / 14.0) / 3.0, abs=1e-9)
    # two runs of two rounds: 1000 + 2000 down and 500 + 500 up, 2 + 4 seconds each
    assert (totals["bytes_down"], totals["bytes_up"], totals["seconds"], totals["samples"]) == (6000, 2000, 12.0, 120)
    cnn1, cnn2 = summary["models"]
    assert (cnn1["model"], cnn1["nodes"], cnn2["model"], cnn2["nodes"]) == ("cnn1", 2, "cnn2", 1)
    assert cnn1["gain"] == pytest.approx(-0.025, abs=1e-12)
    fedmrl = summary["runs"]["fedmrl"]
    assert (fedmrl["worst"], fedmrl["worst_node"], fedmrl["round"], fedmrl["seconds_per_round"]) == (0.6, "partition-2", 2, 4.0)
    assert summary["main_run"] == "fedmrl"
    assert summary["settings"] == {"strategy": "fedmrl", "seed": 3}


def test_unfinished_run_is_compared_after_as_many_rounds(tmp_path: Path) -> None:
    local = [{"a": 0.3}, {"a": 0.5}, {"a": 0.9}]
    make(tmp_path, {"local": local, "fedmrl": [{"a": 0.4}, {"a": 0.6}]}, num_rounds=3, state="running")
    summary = _summary(tmp_path)
    assert (summary["nodes"][0]["alone"], summary["nodes"][0]["together"], summary["nodes"][0]["round"]) == (0.5, 0.6, 2)
    assert summary["state"] == "running"


def test_all_rounds_done_counts_as_completed_before_the_status_says_so(tmp_path: Path) -> None:
    assert _summary(two_runs(tmp_path, state="running"))["state"] == "completed"
    assert _summary(two_runs(tmp_path / "b", state="failed", reason="no quorum"))["state"] == "failed"


def test_without_local_there_is_only_together(tmp_path: Path) -> None:
    summary = _summary(make(tmp_path, {"fedavg": [{"a": 0.25, "b": 0.75}]}, num_rounds=1))
    assert [(row["alone"], row["together"], row["gain"]) for row in summary["nodes"]] == [(None, 0.25, None), (None, 0.75, None)]
    assert (summary["totals"]["alone"], summary["totals"]["better"], summary["totals"]["same"]) == (None, 0, 0)


def test_torn_line_repeated_round_and_not_a_number(tmp_path: Path) -> None:
    two_runs(tmp_path)
    row = {"kind": "node", "run": "fedmrl", "round": 2, "node": "partition-0", "model": "cnn2", "num_examples": 40}
    append(tmp_path, {**row, "accuracy": 0.1})  # the round was run again
    append(tmp_path, {**row, "node": "partition-2", "accuracy": math.nan})
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "node", "run": "fedm')
    summary = _summary(tmp_path)
    assert [node["together"] for node in summary["nodes"]] == [0.1, 0.5, 0.65]
    assert summary["skipped_lines"] == 1
    json.loads(json.dumps(summary, allow_nan=False))


def test_means_are_over_nodes_that_have_both_numbers_and_say_so(tmp_path: Path) -> None:
    make(tmp_path, {"local": [{"a": 0.5, "b": 0.7, "c": 0.9}], "fedmrl": [{"a": 0.6, "b": 0.5}]}, num_rounds=1)
    summary = _summary(tmp_path)
    totals = summary["totals"]
    # not (0.5 + 0.7 + 0.9) / 3 = 0.7 alone against 0.55 together
    assert (totals["alone"], totals["together"], totals["gain"]) == pytest.approx((0.6, 0.55, -0.05), abs=1e-12)
    assert (totals["nodes"], totals["compared"]) == (3, 2)
    assert summary["models"][0]["alone"] == pytest.approx(0.6, abs=1e-12)
    assert page.remarks(summary) == ["The means are over 2 nodes; 1 was left out, it has no result both alone and together."]
    assert page.remarks(_summary(two_runs(tmp_path / "all"))) == []


@pytest.mark.parametrize(("gain", "text"), [(-0.0004, "+0.0"), (0.0, "+0.0"), (-0.0006, "-0.1"), (0.01, "+1.0"), (None, "–")])
def test_no_gain_has_no_minus(gain: float | None, text: str) -> None:
    assert page.points(gain) == text


def test_a_node_with_another_model_together_shows_both(tmp_path: Path) -> None:
    make(tmp_path, {"local": [{"a": 0.5, "b": 0.5, "c": 0.5}], "fedavg": [{"a": 0.6, "b": 0.5, "c": 0.7}]}, num_rounds=1)
    lines = []
    for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "node":
            row["model"] = "cnn5" if row["run"] == "fedavg" or row["node"] == "c" else "cnn1"
        lines.append(json.dumps(row))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    summary = _summary(tmp_path)
    assert [models_of(row) for row in summary["nodes"]] == ["cnn1 / cnn5", "cnn1 / cnn5", "cnn5"]
    assert [(models_of(row), row["nodes"], row["gain"]) for row in summary["models"]] == [
        ("cnn5", 1, pytest.approx(0.2)), ("cnn1 / cnn5", 2, pytest.approx(0.05))
    ]  # fmt: skip
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "model alone / together" in text
    assert "cnn1 / cnn5" in text
    assert "the gain is that of the other model and of joining" in text


def test_a_node_that_failed_last_shows_the_samples_it_had(tmp_path: Path) -> None:
    two_runs(tmp_path)
    append(tmp_path, {"kind": "node", "run": "fedmrl", "round": 3, "node": "partition-2", "model": "cnn1", "accuracy": 0.6})
    assert [row["samples"] for row in _summary(tmp_path)["nodes"]] == [40, 40, 40]


def test_the_report_lists_settings_of_what_ran(tmp_path: Path) -> None:
    two_runs(tmp_path)
    config = {"strategy": "fedmrl", "seed": 3, "train.momentum": 0.9, "fedmrl.shared-dim": 7, "fedhm.rho": 1, "fedavg.model": "mlp"}
    (tmp_path / "run.json").write_text(json.dumps({"run_config": config}), encoding="utf-8")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert [key in text for key in config] == [True, True, True, True, False, False]


def test_failures_are_grouped(tmp_path: Path) -> None:
    two_runs(tmp_path)
    failure = {"kind": "failure", "run": "fedmrl", "node": "partition-2", "phase": "train", "reason": "labels 10 lie outside 0..9"}
    append(tmp_path, {**failure, "round": 1}, {**failure, "round": 2}, {**failure, "round": 2, "phase": "evaluate"})
    first, second = _summary(tmp_path)["failures"]
    assert (first["count"], first["first_round"], first["last_round"], first["phase"]) == (2, 1, 2, "train")
    assert (second["count"], second["phase"]) == (1, "evaluate")
    append(tmp_path, *({**failure, "run": run, "round": 1, "phase": "describe", "reason": "no\n- details"} for run in ("local", "fedmrl")))
    assert show.failure_lines(_summary(tmp_path)["failures"]) == [
        "node partition-2 failed to train (fedmrl, 2 times): labels 10 lie outside 0..9",
        "node partition-2 failed to evaluate (fedmrl): labels 10 lie outside 0..9",
        "node partition-2 refused (local, fedmrl): no",
    ]


def test_report_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    two_runs(tmp_path)
    append(
        tmp_path, {"kind": "failure", "run": "fedmrl", "round": 1, "node": "n<1>", "phase": "train", "reason": "<script>alert(1)</script>"}
    )
    target = write_report(tmp_path)
    assert target == tmp_path / "report.html"
    source = target.read_text(encoding="utf-8")
    page = _Page(source)
    names = [tag for tag, _ in page.tags]
    assert "script" not in names
    assert "<script>alert(1)</script>" in page.text
    assert not re.search(r"https?://|url\(|@import", source)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 4
    for image in images:
        kind, _, data = str(image["src"]).partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG\r\n\x1a\n")
        assert len(str(image["alt"])) > 30
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["accuracy.png", "bytes.png", "models.png", "nodes.png"]
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["totals"]["nodes"] == 3


def test_report_before_the_first_round(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "failed", "reason": "no node joined"}', encoding="utf-8")
    page = _Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "no node joined" in page.text
    assert "No node has been evaluated yet." in page.text


def test_many_nodes_are_dots_not_bars(tmp_path: Path) -> None:
    nodes = {f"partition-{index}": 0.5 + 0.004 * index for index in range(60)}
    data = read_run(make(tmp_path, {"local": [dict.fromkeys(nodes, 0.6)], "fedmrl": [nodes]}, num_rounds=1))
    image = next(image for image in plots.draw(data, summarise(data)) if image.name == "nodes")
    # above 0.6: indices 26 to 59, since 0.5 + 0.004 * 25 is 0.6 itself
    assert "34 of 60 nodes lie above" in image.alt


def test_against_another_run(tmp_path: Path) -> None:
    mine, other = two_runs(tmp_path / "mine"), make(tmp_path / "other", {"fedavg": [{"partition-0": 0.5, "new": 0.1}]}, num_rounds=1)
    rows = {row["node"]: row for row in compare(_summary(mine), _summary(other))}
    assert rows["partition-0"]["difference"] == pytest.approx(0.25, abs=1e-12)
    assert (rows["new"]["mine"], rows["new"]["other"], rows["partition-2"]["other"]) == (None, 0.1, None)
    assert "Against the other run" in write_report(mine, other).read_text(encoding="utf-8")


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=re.escape(str(tmp_path))):
        write_report(tmp_path)


def test_plots_where_home_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "absent"))
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    data = read_run(two_runs(tmp_path / "run"))
    assert len(plots.draw(data, summarise(data))) == 4
    import os

    assert Path(os.environ["MPLCONFIGDIR"]).parent == tmp_path
    monkeypatch.delenv("MPLCONFIGDIR")
