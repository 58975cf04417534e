"""Shards of a data source as files, one a node: what nodes on machines of their own would have."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from server_app.settings import Settings, SettingsError
from tasks import DataError
from tasks.partitions import partition_indices
from tasks.sources import Source, open_source


def write_shards(settings: Settings, paths: list[Path]) -> int:
    """Write the partitions of `data.source` as parquet files, one a path, and return the classes of the whole source.

    The split is the one `heterofleet simulate` makes for as many nodes; the common test set stays with the server.

    Raises:
        SettingsError: the source cannot be read, split or written as a table.
    """
    try:
        source = open_source(settings.data.source, settings.data)
        parts = partition_indices(source, settings, len(paths))
    except DataError as error:
        raise SettingsError(str(error)) from error
    if len(source.input_shape) == 3 and source.inputs.dtype != np.uint8:
        raise SettingsError(
            f"data.source = {settings.data.source!r} holds arrays of shape {source.input_shape}; a deployment on one machine writes each "
            "node's share as pictures or vectors, so choose a source of those"
        )
    for path, positions in zip(paths, parts, strict=True):
        _write(source, positions, settings, path)
    return settings.data.num_classes or source.num_classes


def _write(source: Source, positions: np.ndarray, settings: Settings, path: Path) -> None:
    """Write the samples at `positions` with the columns that the run config names, readable by the owner only."""
    import datasets

    pictures = len(source.input_shape) == 3
    inputs, label = settings.data.image_column or ("image" if pictures else "features"), settings.data.label_column
    chosen = np.asarray(source.inputs[positions])
    number = datasets.Value("int64")
    names = list(source.class_names)
    features = datasets.Features(
        {
            inputs: datasets.Image() if pictures else datasets.List(datasets.Value("float32")),
            label: datasets.ClassLabel(names=names) if names else number,
        }
    )
    values: Any = [{"bytes": _png(pixels), "path": None} for pixels in chosen] if pictures else chosen.tolist()
    table = datasets.Dataset.from_dict({inputs: values, label: np.asarray(source.labels)[positions].tolist()}, features=features)
    datasets.disable_progress_bars()
    path.touch(mode=0o600)
    table.to_parquet(str(path))


def _png(pixels_CHW: np.ndarray) -> bytes:
    """Return a picture (C, H, W) of 1 or 3 channels, uint8, as a PNG file."""
    from PIL import Image

    layout = pixels_CHW[0] if len(pixels_CHW) == 1 else pixels_CHW.transpose(1, 2, 0)
    stream = io.BytesIO()
    Image.fromarray(layout).save(stream, format="PNG")
    return stream.getvalue()
