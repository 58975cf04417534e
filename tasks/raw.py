"""What a reader hands to the cache: splits before decoding, labels before numbering."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tasks import DataError
from tasks.pictures import Pictures


@dataclass(frozen=True)
class SourceSpec:
    """Which samples are meant: the run config's keys that change what is decoded.

    Attributes:
        source: "embedded", a path, a Hugging Face name or `module:function`.
        image_column: column of the inputs; empty: found by itself.
        label_column: column of the labels.
        natural_columns: columns whose values (or tuples of values) name the natural nodes; may be empty.
    """

    source: str
    image_column: str
    label_column: str
    natural_columns: tuple[str, ...]


@dataclass
class RawSplit:
    """One split.

    Attributes:
        inputs: encoded pictures, or an array (N, C, H, W) uint8 or float32, or (N, F) float32.
        labels: (N,) integers, or strings.
        natural: (N,) arrays, one for each natural column; empty where the source has none.
    """

    inputs: Pictures | np.ndarray
    labels: np.ndarray
    natural: list[np.ndarray] = field(default_factory=list)


@dataclass
class RawSource:
    """A whole source.

    Attributes:
        train: everything that may go to nodes.
        test: the source's own test split, or None.
        class_names: names by label where the source says them, else None: then strings are numbered in sorted order.
        columns: names of the columns, for messages.
    """

    train: RawSplit
    test: RawSplit | None = None
    class_names: list[str] | None = None
    columns: list[str] = field(default_factory=list)


def number_labels(raw: RawSource, where: str) -> tuple[list[str], bool]:
    """Replace the labels of `raw` by int64; return the class names and whether numbers came from sorting the names.

    Names that are all whole numbers (folders "0", "1", ... "10") are the numbers themselves, not their place in the sorted list.

    Raises:
        DataError: labels that are neither whole numbers nor strings.
    """
    splits = [raw.train] + ([raw.test] if raw.test else [])
    names = raw.class_names
    text = [split.labels.dtype.kind in "UO" for split in splits]
    if any(text):
        found = sorted({str(label) for split in splits for label in split.labels.tolist()} | set(names or []))
        if all(name.isascii() and name.isdigit() for name in found):
            for split in splits:
                split.labels = split.labels.astype(np.int64)
            return ([str(number) for number in range(max(map(int, found)) + 1)] if names else []), False
        number = {name: index for index, name in enumerate(found)}
        for split in splits:
            split.labels = np.array([number[str(label)] for label in split.labels.tolist()], dtype=np.int64)
        return found, True
    for split in splits:
        whole = split.labels.astype(np.int64)
        if not np.array_equal(whole, split.labels):
            wrong = split.labels[whole != split.labels][0]
            raise DataError(f"{where}: label {wrong} is neither a whole number nor a name; labels must be 0, 1, ... or strings")
        split.labels = whole
    return names or [], False


def column_error(where: str, key: str, name: str, columns: Iterable[str]) -> DataError:
    """Return the error for a column that is not there, with the nearest one and all that are."""
    known = list(columns)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"; did you mean {key} = {near[0]!r}?" if near else ""
    return DataError(f"{where} has no column {name!r} ({key}); its columns are {', '.join(known) or 'none'}{guess}")
