"""Where samples come from: decoded once into a memory-mapped cache that all processes of a machine share.

A cache is a folder `<home()>/cache/<hash>/`, named after what the source's content depends on:
`train_inputs.npy`, `train_labels.npy`, the same for `test` where the source has its own test split,
`columns.npz` (natural ids) and `meta.json`. It is built beside its place and renamed into it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks import DataError
from tasks.cache import cache_root, digest, locked, unwritable
from tasks.pictures import Pictures, Survey, decode, survey
from tasks.raw import RawSource, RawSplit, SourceSpec, number_labels
from tasks.readers import Reader, reader_for

if TYPE_CHECKING:
    from server_app.settings import DataSettings

log = logging.getLogger(__name__)

_FORMAT = 1
_CHUNK = 4096


@dataclass(frozen=True)
class Source:
    """A decoded source; its arrays are memory-mapped, read-only, and shared by all nodes of a process.

    Attributes:
        key: the cache's name; equal keys mean equal content.
        name: the source as the run config or the node names it.
        inputs, labels: the train split: (N, *input_shape) uint8 or float32, and (N,) int64.
        test_inputs, test_labels: the source's own test split; of no samples where it has none.
        natural: (N,) int64, index into `natural_names` of each sample; empty without natural columns.
        natural_names: sorted natural ids.
        num_classes: named classes, or the largest label plus one.
        class_names: names by label, or empty.
        sorted_names: True where labels were numbered by sorting the names that occur in this source.
        mean, std: over the train split, one for each channel or feature; pictures count from 0 to 1. A constant one has std 1.
        columns: the source's columns, for messages.
    """

    key: str
    name: str
    inputs: np.ndarray
    labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    natural: np.ndarray
    natural_names: tuple[str, ...]
    num_classes: int
    class_names: tuple[str, ...]
    sorted_names: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    columns: tuple[str, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of pictures, (F,) of vectors."""
        return self.inputs.shape[1:]


class _BrokenCacheError(Exception):
    """A cache folder is absent or not what its meta.json says."""


def open_source(source: str, data: DataSettings) -> Source:
    """Return the decoded source, from the cache or after filling it; other processes wait instead of decoding too.

    Args:
        source: "embedded", a folder of class folders, a .csv or .parquet file, a Hugging Face name or folder, `module:function`.
        data: which columns.

    Raises:
        DataError: nothing to read, a file that cannot be read, or a cache folder that cannot be written.
    """
    natural = tuple(name.strip() for name in data.natural_column.split(",") if name.strip())
    spec = SourceSpec(source, data.image_column, data.label_column, natural)
    try:
        reader = reader_for(spec)
    except OSError as error:
        raise DataError(f"data source {source!r} cannot be read: {error}") from error
    wanted = (data.image_channels, data.image_size)
    key = digest([_FORMAT, reader.identity, *(wanted if any(wanted) else ())])
    folder = cache_root() / key
    try:
        return _open(folder, source)
    except _BrokenCacheError:
        pass
    with locked(folder):
        try:
            return _open(folder, source)
        except _BrokenCacheError as broken:
            if folder.exists():
                log.warning("%s: the cache %s is rebuilt (%s)", source, folder, broken)
        _build(folder, reader, source, wanted)
    try:
        return _open(folder, source)
    except _BrokenCacheError as broken:
        raise DataError(f"{source}: the cache {folder} is broken right after it was written ({broken}); check the disk") from broken


def _open(folder: Path, name: str) -> Source:
    try:
        status = (folder / "meta.json").stat()
    except OSError as error:
        raise _BrokenCacheError("no meta.json") from error
    return _map(folder, name, status.st_mtime_ns, status.st_ino)


@functools.lru_cache(maxsize=16)
def _map(folder: Path, name: str, mtime_ns: int, inode: int) -> Source:
    """Return the cache in `folder`, mapped once a process; the last two arguments tell a rebuilt cache from the mapped one."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for file, size in meta["files"].items():
            if (folder / file).stat().st_size != size:
                raise _BrokenCacheError(f"{file} has not {size} bytes")
        arrays = {file: np.load(folder / file, mmap_mode="r") for file in meta["files"] if file.endswith(".npy")}
        with np.load(folder / "columns.npz") as columns:
            natural, natural_names = columns["natural"], tuple(columns["names"].tolist())
        if len(arrays["train_inputs.npy"]) != len(arrays["train_labels.npy"]):
            raise _BrokenCacheError("inputs and labels differ in number")
        return Source(
            key=folder.name,
            name=name,
            inputs=arrays["train_inputs.npy"],
            labels=arrays["train_labels.npy"],
            test_inputs=arrays.get("test_inputs.npy", arrays["train_inputs.npy"][:0]),
            test_labels=arrays.get("test_labels.npy", arrays["train_labels.npy"][:0]),
            natural=natural,
            natural_names=natural_names,
            num_classes=meta["num_classes"],
            class_names=tuple(meta["class_names"]),
            sorted_names=meta["sorted_names"],
            mean=tuple(meta["mean"]),
            std=tuple(meta["std"]),
            columns=tuple(meta["columns"]),
        )
    # A damaged npz is a BadZipFile or zlib.error, a damaged npy a ValueError or SyntaxError.
    except _BrokenCacheError:
        raise
    except Exception as error:
        raise _BrokenCacheError(f"{type(error).__name__}: {error}") from error


def _build(folder: Path, reader: Reader, name: str, wanted: tuple[int, int]) -> None:
    """Fill `folder`; the caller holds its lock. `wanted`: channels and pixels a side of pictures, 0 as they are."""
    started = time.monotonic()
    scratch = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, mode=0o700)  # decoded samples are as private as their source
        raw = reader.read(scratch / "reader")
        meta = _write(scratch, raw, name, wanted)
        shutil.rmtree(scratch / "reader", ignore_errors=True)
        files = {file.name: file.stat().st_size for file in sorted(scratch.iterdir())}
        (scratch / "meta.json").write_text(json.dumps(meta | {"files": files}, indent=1), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    except OSError as error:
        raise unwritable(error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log.info("%s: decoded into %s in %.1f s", name, folder, time.monotonic() - started)


def _write(scratch: Path, raw: RawSource, name: str, wanted: tuple[int, int]) -> dict[str, Any]:
    """Write the arrays of `raw`; return what meta.json says of them."""
    names, sorted_names = number_labels(raw, name)
    splits = {"train": raw.train} | ({"test": raw.test} if raw.test else {})
    if not len(raw.train.labels):
        raise DataError(f"{name} has no samples to train on")
    shape = _common_shape(splits, name, wanted)
    for split, part in splits.items():
        np.save(scratch / f"{split}_labels.npy", part.labels)
        _write_inputs(scratch / f"{split}_inputs.npy", part, shape, f"{name}, {split}")
    mean, std = channel_statistics(np.load(scratch / "train_inputs.npy", mmap_mode="r"))
    natural, natural_names = natural_ids(raw.train.natural)
    np.savez(scratch / "columns.npz", natural=natural, names=np.array(natural_names, dtype=str))
    return {
        "shape": list(shape),
        "num_classes": len(names) or int(max(part.labels.max(initial=0) for part in splits.values())) + 1,
        "class_names": names,
        "sorted_names": sorted_names,
        "mean": mean.tolist(),
        "std": std.tolist(),
        "columns": raw.columns,
    }


def _common_shape(splits: dict[str, RawSplit], name: str, wanted: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of one sample in all splits."""
    train = splits["train"].inputs
    if not isinstance(train, Pictures):
        if any(wanted):
            raise DataError(f"{name} gives arrays of shape {train.shape[1:]}; data.image-size and -channels are for picture files")
        for split, part in splits.items():
            if isinstance(part.inputs, Pictures) or part.inputs.shape[1:] != train.shape[1:]:
                found = "pictures" if isinstance(part.inputs, Pictures) else part.inputs.shape[1:]
                raise DataError(f"{name}: a sample of {split} is {found}, one of train has shape {train.shape[1:]}")
        return train.shape[1:]
    surveys = [survey(part.inputs) for part in splits.values() if isinstance(part.inputs, Pictures)]
    if len(surveys) < len(splits):
        raise DataError(f"{name}: train holds pictures, test does not")
    return functools.reduce(Survey.merged, surveys).shape(name, *wanted)


def _write_inputs(path: Path, part: RawSplit, shape: tuple[int, ...], where: str) -> None:
    """Write the inputs (N, *shape) of one split.

    Raises:
        DataError: not enough room on the disk, or a value that is infinite.
    """
    if not isinstance(part.inputs, Pictures):
        infinite = np.argwhere(np.isinf(part.inputs)) if part.inputs.dtype.kind == "f" else np.empty((0, 2), dtype=int)
        if len(infinite):
            raise DataError(f"{where}, row {infinite[0][0]}: feature {tuple(infinite[0][1:].tolist())} is infinite")
        if gaps := int(np.count_nonzero(np.isnan(part.inputs))) if part.inputs.dtype.kind == "f" else 0:
            log.warning("%s: %d of %d numbers are missing; each counts as the mean of its feature", where, gaps, part.inputs.size)
        np.save(path, part.inputs)
        return
    needed, free = len(part.labels) * int(np.prod(shape)), shutil.disk_usage(path.parent).free
    if needed > free:
        raise DataError(
            f"{where}: {len(part.labels)} pictures of {shape[2]}x{shape[1]} pixels need {needed >> 20} MiB of cache and {free >> 20} MiB "
            "are free; make the pictures smaller, or set HETEROFLEET_HOME to another disk"
        )
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(len(part.labels), *shape))
    decode(part.inputs, out)
    out.flush()


def channel_statistics(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation (float64) of each channel of (N, C, H, W), or of each feature of (N, F).

    uint8 counts from 0 to 1; NaN is left out; where all values are equal or missing, the deviation is 1.
    Two passes over chunks: sums of squares alone would cancel for large means.
    """
    scale = 255.0 if inputs.dtype == np.uint8 else 1.0
    axes = (0, *range(2, inputs.ndim))
    chunks = [slice(start, start + _CHUNK) for start in range(0, len(inputs), _CHUNK)]

    def summed(centre: np.ndarray, power: int) -> tuple[np.ndarray, np.ndarray]:
        total, count = np.zeros(inputs.shape[1]), np.zeros(inputs.shape[1])
        wide = centre.reshape(-1, *[1] * (inputs.ndim - 2))
        for chunk in chunks:
            values = inputs[chunk].astype(np.float64) / scale - wide
            total += np.nansum(values**power, axis=axes)
            count += np.sum(~np.isnan(values), axis=axes)
        return total, np.maximum(count, 1)

    total, count = summed(np.zeros(inputs.shape[1]), 1)
    mean = total / count
    squares, count = summed(mean, 2)
    std = np.sqrt(squares / count)
    return mean, np.where(std > 1e-8 * np.maximum(np.abs(mean), 1.0), std, 1.0)


def natural_ids(columns: list[np.ndarray]) -> tuple[np.ndarray, list[str]]:
    """Return (index of each sample's natural id, sorted names); several columns make ids such as "Greek/3".

    Numbers sort as numbers, strings as strings.
    """
    if not columns:
        return np.empty(0, dtype=np.int64), []
    parts = [np.unique(column, return_inverse=True) for column in columns]
    table = np.stack([codes.reshape(-1) for _, codes in parts], axis=1)
    rows, natural = np.unique(table, axis=0, return_inverse=True)
    names = ["/".join(str(values[code]) for (values, _), code in zip(parts, row, strict=True)) for row in rows]
    return natural.reshape(-1).astype(np.int64), names
