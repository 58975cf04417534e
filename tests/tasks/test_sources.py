"""Decoding, caching and recognising sources."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks import DataError
from tasks.sources import channel_statistics, natural_ids, open_source
from tests.tasks.conftest import picture


def encoded(pixels: np.ndarray) -> dict:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def caches(home: Path) -> list[Path]:
    return [path for path in (home / "cache").iterdir() if path.is_dir()]


def test_embedded_holds_500_of_each_digit_mixed(configured):
    source = open_source("embedded", configured().data)
    assert source.inputs.shape == (5000, 1, 28, 28)
    assert source.inputs.dtype == np.uint8
    assert not source.inputs.flags.writeable
    assert np.bincount(source.labels).tolist() == [500] * 10
    assert len(np.unique(source.labels[:100])) == 10
    values = np.asarray(source.inputs, dtype=np.float64) / 255
    np.testing.assert_allclose([source.mean[0], source.std[0]], [values.mean(), values.std()], rtol=1e-12)
    assert source.class_names == tuple("0123456789")
    assert len(source.test_labels) == 0


def test_folder_pixels_labels_and_an_empty_class(picture_folder, configured):
    folder = picture_folder({"cat": 3, "ant": 2, "bee": 0})
    (folder / "cat" / "Thumbs.db").write_bytes(b"not a picture")
    source = open_source(str(folder), configured().data)
    assert source.class_names == ("ant", "bee", "cat")
    assert source.labels.tolist() == [0, 0, 2, 2, 2]
    assert source.num_classes == 3
    for row, path in enumerate(sorted(folder.glob("*/*.png"))):
        np.testing.assert_array_equal(source.inputs[row], np.asarray(Image.open(path)).transpose(2, 0, 1))


def test_numbered_folders_are_numbers_not_places_in_the_list(picture_folder, configured):
    source = open_source(str(picture_folder({"10": 1, "2": 1, "0": 1})), configured().data)
    assert sorted(source.labels.tolist()) == [0, 2, 10]
    assert source.num_classes == 11


def test_train_and_test_folders(picture_folder, tmp_path, configured):
    picture_folder({"a": 4, "b": 4}, name="set/train")
    picture_folder({"a": 1, "b": 2}, name="set/test")
    source = open_source(str(tmp_path / "set"), configured().data)
    assert source.labels.tolist() == [0] * 4 + [1] * 4
    assert source.test_labels.tolist() == [0, 1, 1]


def test_sizes_are_brought_to_the_most_common_and_said(picture_folder, caplog, configured):
    folder = picture_folder({"a": 3})
    picture(folder / "b" / "big.png", np.full((12, 10, 3), 77, dtype=np.uint8))
    source = open_source(str(folder), configured().data)
    assert source.input_shape == (3, 6, 5)
    assert (source.inputs[3] == 77).all()
    assert "1 of 4 pictures are not 5x6" in caplog.text


def test_grey_among_colour_becomes_rgb_and_grey_alone_stays_grey(picture_folder, tmp_path, caplog, configured):
    grey = np.arange(30, dtype=np.uint8).reshape(6, 5)
    folder = picture_folder({"a": 2})
    picture(folder / "b" / "grey.png", grey)
    source = open_source(str(folder), configured().data)
    assert source.inputs.shape == (3, 3, 6, 5)
    np.testing.assert_array_equal(source.inputs[2], np.stack([grey] * 3))
    assert "1 of 3 pictures are grey" in caplog.text
    picture(tmp_path / "only" / "a" / "0.png", grey)
    Image.fromarray(grey > 10).save(tmp_path / "only" / "a" / "1.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "only" / "a" / "2.png")
    only = open_source(str(tmp_path / "only"), configured().data)
    np.testing.assert_array_equal(only.inputs[:, 0], [grey, (grey > 10) * 255, grey])


def test_parquet_with_encoded_pictures_and_two_natural_columns(tmp_path, configured):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    columns = {"image": [encoded(p) for p in pixels], "label": [0, 1, 0, 1, 2, 2], "who": [10, 9, 9, 10, 9, 9], "set": list("bbaabb")}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    source = open_source(str(tmp_path / "x.parquet"), configured(natural_column="set, who").data)
    np.testing.assert_array_equal(source.inputs[:, 0], pixels)
    assert source.natural_names == ("a/9", "a/10", "b/9", "b/10")
    assert source.natural.tolist() == [3, 2, 0, 1, 2, 2]
    assert source.class_names == ()
    assert source.num_classes == 3


def test_csv_numbers_are_features_row_numbers_and_labels_are_not(tmp_path, configured):
    (tmp_path / "x.csv").write_text("id,a,label,b,user\n1,0.5,up,1,7\n2,,down,3,8\n3,1.5,up,5,8\n")
    source = open_source(str(tmp_path / "x.csv"), configured(natural_column="user").data)
    np.testing.assert_array_equal(source.inputs, np.array([[0.5, 1], [np.nan, 3], [1.5, 5]], dtype=np.float32))
    assert source.class_names == ("down", "up")
    assert source.labels.tolist() == [1, 0, 1]
    np.testing.assert_allclose(source.mean, [1.0, 3.0])
    np.testing.assert_allclose(source.std, [0.5, np.sqrt(8 / 3)])


def test_csv_of_picture_files(picture_folder, tmp_path, configured):
    picture_folder({"x": 2}, name="p")
    (tmp_path / "list.csv").write_text("file,label\np/x/001.png,0\np/x/000.png,1\n")
    source = open_source(str(tmp_path / "list.csv"), configured().data)
    np.testing.assert_array_equal(source.inputs[0], np.asarray(Image.open(tmp_path / "p/x/001.png")).transpose(2, 0, 1))


def test_list_column_with_a_folder_of_splits(tmp_path, configured):
    for split, rows in (("train", 5), ("test", 2)):
        (tmp_path / "set").mkdir(exist_ok=True)
        table = pa.table({"features": [[float(i), 1.0] for i in range(rows)], "label": [0] * rows, "id": list(range(rows))})
        pq.write_table(table, tmp_path / "set" / f"{split}.parquet")
    source = open_source(str(tmp_path / "set"), configured().data)
    assert source.inputs[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert source.test_inputs.shape == (2, 2)
    assert source.std[1] == 1.0  # a constant feature


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/no/such/folder", "there is no /no/such/folder"),
        ("two words", "there is no"),
        ("no_such_module:rows", "no module 'no_such_module'"),
        ("os:no_such_function", "no function 'no_such_function'"),
        ("{tmp}", "is empty"),
        ("{tmp}/flat", "no class folders"),
        ("{tmp}/x.txt", "must end in .csv or .parquet"),
        ("{tmp}/no-label.csv", "did you mean data.label-column = 'labels'"),
        ("{tmp}/broken.parquet", "cannot be read as a data set"),
        ("{tmp}/text.csv", "neither pictures nor numbers"),
        ("{tmp}/empty.csv", "no data"),
        ("{tmp}/gap.csv", "1 missing values, the first in row 1"),
        ("{tmp}/half.csv", "label 0.5 is neither a whole number nor a name"),
        ("{tmp}/inf.csv", "row 1: feature (0,) is infinite"),
    ],
)
def test_what_cannot_be_read_says_what_and_where(tmp_path, configured, text, words):
    if text != "{tmp}":
        files = {"x.txt": "x", "no-label.csv": "a,labels\n1,2\n", "broken.parquet": "PAR1", "text.csv": "words,label\nhello,1\n",
                 "empty.csv": "a,label\n", "gap.csv": "a,label\n1,0\n2,\n", "half.csv": "a,label\n1,0.5\n",
                 "inf.csv": "a,label\n1,0\ninf,1\n"}  # fmt: skip
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        picture(tmp_path / "flat" / "0.png", np.zeros((2, 2), dtype=np.uint8))
    with pytest.raises(DataError) as caught:
        open_source(text.replace("{tmp}", str(tmp_path)), configured().data)
    assert words in str(caught.value)


def test_a_name_on_the_hub_fails_at_once_without_a_network(monkeypatch, configured):
    import huggingface_hub

    def unreachable(self, name, timeout=None, **_):
        assert timeout
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(DataError, match=r"'some/name'.*cannot be reached \(no route to host\)"):
        open_source("some/name", configured().data)


@pytest.mark.parametrize(("name", "offline"), [("pics", False), ("pics/train", False), ("pics", True)])
def test_a_path_that_is_not_there_is_told_before_what_hugging_face_says_of_the_name(monkeypatch, configured, tmp_path, name, offline):
    import datasets
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def unknown(*_, **__):
        raise RepositoryNotFoundError("401 Client Error.\nmore", response=httpx.Response(401, request=httpx.Request("GET", "http://hub")))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unknown)
    monkeypatch.setattr(datasets, "load_dataset", unknown)
    with pytest.raises(DataError) as caught:
        open_source(name, configured().data)
    first, _, then = str(caught.value).partition(", so it was taken for a Hugging Face name: ")
    assert first == f"data source {name!r}: no file or folder {tmp_path / name} exists"
    assert then.startswith("pics cannot be read as a data set" if offline else f"Hugging Face has no data set {name!r}")
    assert "401 Client Error" in then


def test_a_path_that_can_be_no_name_is_told_to_be_missing_where_it_was_looked_for(monkeypatch, configured, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("./pics", "pics/train/a", "pics.csv"):
        with pytest.raises(DataError, match=f"there is no {tmp_path / name}; name 'embedded'"):
            open_source(name, configured().data)


def test_a_damaged_picture_is_named(picture_folder, cache_home, configured):
    folder = picture_folder({"a": 2})
    whole = (folder / "a" / "001.png").read_bytes()
    (folder / "a" / "001.png").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"a/001\.png: the picture cannot be decoded"):
        open_source(str(folder), configured().data)
    assert caches(cache_home) == []


@pytest.mark.parametrize("damage", ["truncate", "header", "meta", "half", "columns"])
def test_a_damaged_cache_is_built_again(picture_folder, cache_home, configured, damage):
    folder = picture_folder({"a": 3, "b": 2})
    expected = np.array(open_source(str(folder), configured().data).inputs)
    (cache,) = caches(cache_home)
    os.utime(cache / "meta.json", ns=(1, 1))  # as in another process, where nothing is mapped yet
    file = cache / ("columns.npz" if damage == "columns" else "train_inputs.npy")
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage in ("header", "columns"):
        file.write_bytes(b"\x00" * file.stat().st_size)
    elif damage == "meta":
        (cache / "meta.json").write_text("{")
    else:
        (cache / "train_labels.npy").unlink()
    np.testing.assert_array_equal(open_source(str(folder), configured().data).inputs, expected)
    assert len(caches(cache_home)) == 1


def test_a_changed_picture_makes_a_new_cache_and_an_equal_one_does_not(picture_folder, cache_home, configured):
    folder = picture_folder({"a": 2})
    first = open_source(str(folder), configured().data)
    assert open_source(str(folder), configured(alpha=0.1, partitioner="iid").data) is first
    picture(folder / "a" / "new.png", np.zeros((6, 5, 3), dtype=np.uint8))
    assert len(open_source(str(folder), configured().data).labels) == 3
    assert len(caches(cache_home)) == 2


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, picture_folder, configured):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="HETEROFLEET_HOME"):
        open_source(str(picture_folder({"a": 1})), configured().data)


def _open_in_process(source: str, queue) -> None:
    from server_app.settings import DataSettings

    opened = open_source(source, DataSettings())
    queue.put((opened.key, int(opened.labels.sum())))


def test_two_processes_decode_once(tmp_path, monkeypatch, cache_home):
    (tmp_path / "slow_module.py").write_text(
        f"import time, numpy as np\n\ndef rows():\n    time.sleep(0.3)\n    open({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
        "    return np.zeros((4, 2, 2), dtype=np.uint8), np.array([0, 1, 1, 1])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_open_in_process, args=("slow_module:rows", queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=20) for _ in workers]
    for worker in workers:
        worker.join(20)
    assert results[0] == results[1]
    assert results[0][1] == 3
    assert (tmp_path / "calls").read_text() == "x"
    assert not list((cache_home / "cache").glob("*.tmp"))


def test_a_node_that_finds_the_cache_imports_no_data_libraries(configured, labelled, virtual, cache_home, tmp_path):
    import tasks

    name = labelled([0, 1] * 10)
    settings = configured(source=name, partitioner="iid")
    tasks.load(virtual(0, 2, settings), settings)
    code = (
        "import sys, tasks\nfrom client_app.profile import NodeProfile\nfrom server_app.settings import Settings\n"
        f"settings = Settings.model_validate_json({settings.model_dump_json(by_alias=True)!r})\n"
        "task = tasks.load(NodeProfile.of({'partition-id': 0, 'num-partitions': 2}, settings), settings)\n"
        "heavy = {'datasets', 'flwr_datasets', 'pandas', 'pyarrow', 'PIL', 'mlxtend', 'flwr'} & set(sys.modules)\n"
        "assert not heavy and len(task.train), heavy"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_statistics_do_not_cancel_for_large_means():
    values = np.array([[1e9, 1.0, np.nan], [1e9 + 2, 1.0, np.nan]])
    mean, std = channel_statistics(values)
    np.testing.assert_allclose(mean, [1e9 + 1, 1, 0])
    np.testing.assert_allclose(std, [1, 1, 1])


def test_natural_ids_sort_numbers_as_numbers():
    codes, names = natural_ids([np.array([10, 9, 100, 9])])
    assert names == ["9", "10", "100"]
    assert codes.tolist() == [1, 0, 2, 0]


def test_missing_numbers_are_counted_once_when_a_source_is_read(tmp_path, configured, caplog):
    (tmp_path / "gaps.csv").write_text("a,b,label\n1,,0\n,2,1\n3,4,0\n")
    open_source(str(tmp_path / "gaps.csv"), configured().data)
    open_source(str(tmp_path / "gaps.csv"), configured().data)
    told = [record.getMessage() for record in caplog.records if "missing" in record.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("2 of 6 numbers are missing; each counts as the mean of its feature")
