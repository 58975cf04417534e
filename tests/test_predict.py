"""Predicting with an exported model: the right class and probability, bad files skipped, torch and Pillow alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from client_app.predict import Model, PredictError, main, pictures_in
from server_app import cli
from tests.fleet_fixture import ROOT, config, run

WEIGHT = 0.05


class Columns(nn.Module):
    """Scores of three classes: WEIGHT times the mean brightness of each third of the columns of 6x6 grey pictures."""

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return WEIGHT * raw.float().reshape(-1, 6, 3, 2).mean(dim=(1, 3))


def export(path: Path, module: nn.Module, sample: torch.Tensor) -> Path:
    dynamic = ({0: torch.export.Dim("batch", min=1, max=1024)},)
    torch.export.save(torch.export.export(module, (sample,), dynamic_shapes=dynamic), path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "own.pt2"
    path.with_suffix(".json").write_text(json.dumps({"outputs": ["left", "middle", "right"]}))
    return export(path, Columns(), torch.zeros((2, 1, 6, 6), dtype=torch.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three 6x6 pictures whose bright third is the first, second and third, one in a folder below."""
    place = tmp_path / "pictures"
    (place / "below").mkdir(parents=True)
    for index, name in enumerate(("a.png", "b.png", "below/c.png")):
        Image.fromarray(thirds(index)).save(place / name)
    return place


def thirds(bright: int) -> np.ndarray:
    pixels = np.full((6, 6), 10, dtype=np.uint8)
    pixels[:, 2 * bright : 2 * bright + 2] = 60
    return pixels


# Scores are 0.05 * (60, 10, 10), so that the bright third has e^3 / (e^3 + 2 e^0.5).
PROBABILITY = np.exp(3.0) / (np.exp(3.0) + 2 * np.exp(0.5))


def test_each_picture_gets_its_class_and_its_probability(model, folder, capsys):
    assert main(["--model", str(model), "--input", str(folder)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    paths = [str(folder / name) for name in ("a.png", "b.png", "below/c.png")]
    assert [row[:2] for row in rows] == [[path, name] for path, name in zip(paths, ("left", "middle", "right"), strict=True)]
    assert [row[2] for row in rows] == [f"{PROBABILITY:.3f}"] * 3


def test_json_lines_hold_the_same_and_the_number_of_the_class(model, folder, capsys):
    assert main(["--model", str(model), "--input", str(folder / "b.png"), "--json"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row == {"path": str(folder / "b.png"), "label": "middle", "index": 1, "probability": pytest.approx(PROBABILITY, abs=1e-6)}


def test_pictures_are_brought_to_the_models_size_and_channels(model, tmp_path):
    big = Image.fromarray(thirds(2)).resize((60, 60), Image.Resampling.NEAREST).convert("RGB")
    big.save(tmp_path / "big.png")
    (found,) = Model.load(model).predict([tmp_path / "big.png"])
    assert found.label == "right"
    assert found.probability == pytest.approx(PROBABILITY, abs=0.05)


def test_bad_files_are_named_and_skipped_and_the_others_keep_their_own_result(model, folder, capsys):
    (folder / "aa.png").write_bytes(b"no picture")
    whole = (folder / "a.png").read_bytes()
    (folder / "ab.png").write_bytes(whole[:45])  # the header and a little
    (folder / "notes.txt").write_text("x")
    assert main(["--model", str(model), "--input", str(folder)]) == 0
    shown = capsys.readouterr()
    assert [line.split()[1] for line in shown.out.splitlines()] == ["left", "middle", "right"]
    assert "aa.png: not a picture" in shown.err
    assert "ab.png: " in shown.err
    assert "1 other files are no pictures" in shown.err


def test_the_exit_code_is_one_only_if_no_picture_could_be_read(model, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    assert main(["--model", str(model), "--input", str(tmp_path), "--json"]) == 1
    assert "error" in json.loads(capsys.readouterr().out)


def test_more_pictures_than_a_batch_keep_their_order(model, tmp_path):
    files = [tmp_path / f"{index:03}.png" for index in range(70)]
    for index, file in enumerate(files):
        Image.fromarray(thirds(index % 3)).save(file)
    found = list(Model.load(model).predict(files))
    assert [(f.path, f.index) for f in found] == [(str(file), index % 3) for index, file in enumerate(files)]


def test_names_come_from_the_labels_file_else_the_card_else_they_are_numbers(model, folder, tmp_path):
    (tmp_path / "names.txt").write_text("L\nM\nR\n")
    bare = tmp_path / "bare.pt2"
    bare.write_bytes(model.read_bytes())
    label = {name: next(iter(Model.load(*given).predict([folder / "b.png"]))).label for name, given in {
        "labels": (model, tmp_path / "names.txt"), "card": (model,), "numbers": (bare,)}.items()}  # fmt: skip
    assert label == {"labels": "M", "card": "middle", "numbers": "1"}


def test_what_cannot_be_used_is_refused_by_name(model, folder, tmp_path):
    (tmp_path / "two.txt").write_text("L\nM\n")
    (tmp_path / "text.pt2").write_text("hello")
    vectors = export(tmp_path / "vectors.pt2", nn.Linear(4, 2), torch.zeros(2, 4))
    for words, message in {
        (tmp_path / "none.pt2",): "no such file",
        (tmp_path / "text.pt2",): "no model that a run with export=own wrote",
        (vectors,): r"takes float32 samples of shape \(4,\), not pictures",
        (model, tmp_path / "two.txt"): "names 2 classes, the model has 3 outputs",
        (model, tmp_path / "none.txt"): "one class name a line",
    }.items():
        with pytest.raises(PredictError, match=message):
            Model.load(*words)
    (tmp_path / "empty").mkdir()
    for place, message in {tmp_path / "empty": "holds no picture", tmp_path / "nowhere": "is not there"}.items():
        with pytest.raises(PredictError, match=message):
            pictures_in(place)


def test_the_command_does_the_same(model, folder):
    done = CliRunner().invoke(cli.app, ["predict", "--model", str(model), "--input", str(folder)])
    assert done.exit_code == 0
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["left", "middle", "right"]
    wrong = CliRunner().invoke(cli.app, ["predict", "--model", "none.pt2", "--input", str(folder)])
    assert wrong.exit_code == 2
    assert "no such file" in wrong.stderr


def test_a_model_that_a_run_exported_knows_the_pictures_it_was_trained_on_with_torch_and_pillow_alone(tmp_path):
    run(config(tmp_path, strategy="local", num_rounds=6, train__learning_rate=0.1, export="own"), tmp_path / "out")
    exported = next(iter(json.loads((tmp_path / "out/exports.json").read_text()).values()))
    path = exported["path"] if isinstance(exported, dict) else exported
    code = (
        "import sys\n"
        "from client_app.predict import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'flwr', 'typer', 'rich', 'pydantic', 'torchvision', 'safetensors', 'datasets', 'ray'} & set(sys.modules)\n"
        "sys.exit(code or sorted(heavy) or 0)"
    )
    words = ["--model", path, "--input", str(tmp_path / "pictures"), "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 120
    right = sum(Path(row["path"]).parent.name == row["label"] for row in rows)
    assert right > 108  # 90 % of three classes that differ in where they are bright
