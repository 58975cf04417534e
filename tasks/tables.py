"""Parquet, CSV and Hugging Face data sets -> raw splits, through the `datasets` library."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tasks import DataError
from tasks.pictures import SUFFIXES, Pictures
from tasks.raw import RawSource, RawSplit, SourceSpec, column_error

log = logging.getLogger(__name__)

_TEST_SPLITS = ("test", "validation", "valid", "dev")
# Row numbers give the class away where a table is sorted by class.
_ROW_NUMBERS = frozenset({"id", "index", "Unnamed: 0", "__index_level_0__"})
_HUB_SECONDS = 10.0


def read_table(kind: str, where: str, spec: SourceSpec, scratch: Path) -> RawSource:
    """Return the raw splits of a table.

    The train split is `train`, else the only one; the test split is `test`, else `validation`; others are left out.

    Args:
        kind: "csv", "parquet", "folder" or "hub".
        where: path or Hugging Face name.
        spec: which columns.
        scratch: a folder that is removed afterwards.

    Raises:
        DataError: it cannot be read, or a column is missing or cannot be used.
    """
    splits = _splits(kind, where, scratch)
    train_name = "train" if "train" in splits else next(iter(splits))
    test_name = next((name for name in _TEST_SPLITS if name in splits and name != train_name), None)
    for name in splits.keys() - {train_name, test_name}:
        log.warning("%s: split %r is left out; train is %r, test is %r", where, name, train_name, test_name)
    table = splits[train_name]
    column = _input_column(table, where, spec)
    base = Path(where) if kind == "folder" else Path(where).parent
    train = _raw_split(table, f"{where}, {train_name}", column, spec, base)
    test = _raw_split(splits[test_name], f"{where}, {test_name}", column, spec, base) if test_name else None
    label = table.features[spec.label_column]
    names = list(label.names) if type(label).__name__ == "ClassLabel" else None
    return RawSource(train, test, class_names=names, columns=list(table.column_names))


def _splits(kind: str, where: str, scratch: Path) -> dict[str, Any]:
    """Return the data sets by split name."""
    import datasets

    datasets.disable_progress_bars()
    try:
        if kind in ("csv", "parquet"):
            found = datasets.load_dataset(kind, data_files={"train": where}, cache_dir=str(scratch))
        elif kind == "hub":
            _reach_hub(where)
            found = datasets.load_dataset(where)
        elif any((Path(where) / name).exists() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(where)
        else:
            found = datasets.load_dataset(where, cache_dir=str(scratch))
    except DataError:
        raise
    except Exception as error:  # the library's builders raise whatever their parsers do
        cause = error.__cause__ or error
        taken = _taken_for_a_name(where) if kind == "hub" else ""
        raise DataError(f"{taken}{where} cannot be read as a data set: {type(cause).__name__}: {str(cause).strip()[:300]}") from error
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if not any(len(split) for split in splits.values()):
        raise DataError(f"{where} has no rows")
    return splits


def _reach_hub(name: str) -> None:
    """Return where the hub has `name`, or is switched off on purpose; the library itself would retry for minutes."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=_HUB_SECONDS)
    except HfHubHTTPError as error:
        told = f"Hugging Face has no data set {name!r} for this user ({_first_line(error)}); check path and name, or log in"
        raise DataError(_taken_for_a_name(name) + told) from error
    except Exception as error:  # httpx or requests errors, by the version of the library
        raise DataError(
            f"{_taken_for_a_name(name)}the Hugging Face hub cannot be reached ({_first_line(error)}); "
            "name a local file or folder, or set HF_HUB_OFFLINE=1 where the data set was downloaded before"
        ) from error


def _taken_for_a_name(source: str) -> str:
    """Return what to say first where a source could have been meant as a path."""
    return f"data source {source!r}: no file or folder {Path(source).absolute()} exists, so it was taken for a Hugging Face name: "


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _input_column(table: Any, where: str, spec: SourceSpec) -> str:
    """Return the column of pictures or of vectors, or "" where every numeric column is a feature."""
    if spec.label_column not in table.features:
        raise column_error(where, "data.label-column", spec.label_column, table.column_names)
    if spec.image_column:
        if spec.image_column not in table.features:
            raise column_error(where, "data.image-column", spec.image_column, table.column_names)
        return spec.image_column
    others = [name for name in table.column_names if name != spec.label_column and name not in spec.natural_columns]
    for test in (_is_encoded, _is_vector):
        found = [name for name in others if test(table, name)]
        if len(found) > 1 and "image" in found:
            return "image"
        if len(found) > 1:
            raise DataError(f"{where}: columns {', '.join(found)} could all be the inputs; choose one with data.image-column")
        if found:
            return found[0]
    return ""


def _is_encoded(table: Any, name: str) -> bool:
    """Say whether a column holds pictures: the Image feature, {'bytes', 'path'}, raw bytes, or names of picture files."""
    feature = table.features[name]
    if type(feature).__name__ == "Image" or (isinstance(feature, dict) and {"bytes", "path"} <= set(feature)):
        return True
    if getattr(feature, "dtype", None) in ("binary", "large_binary"):
        return True
    if getattr(feature, "dtype", None) not in ("string", "large_string") or not len(table):
        return False
    return Path(str(table[0][name])).suffix.lower() in SUFFIXES


def _is_vector(table: Any, name: str) -> bool:
    inner = getattr(table.features[name], "feature", None)
    return _is_number(inner)


def _is_number(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint", "float", "bool")) and type(feature).__name__ != "ClassLabel"


def _raw_split(table: Any, where: str, column: str, spec: SourceSpec, base: Path) -> RawSplit:
    for name in (spec.label_column, column):
        if name and name not in table.features:
            raise column_error(where, "data.label-column" if name == spec.label_column else "data.image-column", name, table.column_names)
    labels = _values(table, spec.label_column, where)
    # A missing natural column matters only to the natural partitioner, which then says so.
    present = [name for name in spec.natural_columns if name in table.features]
    natural = [_values(table, name, where) for name in present] if len(present) == len(spec.natural_columns) else []
    if column and _is_encoded(table, column):
        return RawSplit(Pictures(len(table), functools.partial(_encoded, table, column, where, base)), labels, natural)
    return RawSplit(_vectors(table, column, where) if column else _numeric_columns(table, where, spec), labels, natural)


def _values(table: Any, name: str, where: str) -> np.ndarray:
    """Return a column of integers or strings, (N,)."""
    listed = [value for batch in table.with_format("arrow").iter(batch_size=4096) for value in batch[name].to_pylist()]
    gaps = [row for row, value in enumerate(listed) if value is None or value != value]
    if gaps:
        raise DataError(f"{where}: column {name!r} has {len(gaps)} missing values, the first in row {gaps[0]}; fill or remove them")
    values = np.array(listed)
    if values.dtype.kind not in "iubfU" or values.ndim != 1:
        raise DataError(f"{where}: column {name!r} holds values that are neither numbers nor strings")
    return values.astype(np.int64) if values.dtype.kind == "b" else values


def _encoded(table: Any, column: str, where: str, base: Path) -> Iterator[tuple[str, bytes | Path]]:
    """Yield the pictures of a table as they are stored; names of files are relative to `base`."""
    row = 0
    for batch in table.with_format("arrow").iter(batch_size=1024):
        for value in batch[column].to_pylist():
            item = value if not isinstance(value, dict) else (value.get("bytes") or value.get("path"))
            if item is None:
                raise DataError(f"{where}, row {row}: column {column!r} has no picture")
            yield f"{where}, row {row}", item if isinstance(item, bytes) else base / item
            row += 1


def _vectors(table: Any, column: str, where: str) -> np.ndarray:
    """Return a column of equally long lists as (N, F) float32; missing numbers are NaN."""
    rows = [row for batch in table.with_format("arrow").iter(batch_size=4096) for row in batch[column].to_pylist()]
    lengths = {len(row) if row is not None else 0 for row in rows}
    if len(lengths) != 1 or 0 in lengths:
        raise DataError(
            f"{where}: column {column!r} holds lists of {', '.join(map(str, sorted(lengths)))} numbers; all must be equally long"
        )
    return np.array(rows, dtype=np.float32)


def _numeric_columns(table: Any, where: str, spec: SourceSpec) -> np.ndarray:
    """Return all numeric columns but labels, natural ids and row numbers as (N, F) float32, in the table's order."""
    left_out = {spec.label_column, *spec.natural_columns, *_ROW_NUMBERS}
    names = [name for name in table.column_names if name not in left_out and _is_number(table.features[name])]
    if not names:
        raise DataError(f"{where} has neither pictures nor numbers to learn from; its columns are {', '.join(table.column_names)}")
    log.info("%s: %d numeric columns are the features: %s", where, len(names), ", ".join(names[:20]))
    whole = table.with_format("pandas")[:]
    return whole[names].to_numpy(dtype=np.float32, na_value=np.nan)
