"""Shards of a data source as files, one a node: what nodes on machines of their own would have."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from client_app.profile import NodeProfile
from server_app.settings import Settings, SettingsError
from tasks import DataError
from tasks.partitions import partition_indices
from tasks.sources import Source, open_source


def write_shards(settings: Settings, simulated: Sequence[NodeProfile], paths: Sequence[Path]) -> int:
    """Write the share that each simulated node would have as a parquet file, and return the classes of the whole federation.

    The common test set stays with the server.

    Raises:
        SettingsError: a source cannot be read, divided or written as a table.
    """
    classes = settings.data.num_classes
    for profile, path in zip(simulated, paths, strict=True):
        try:
            source = open_source(profile.data or settings.data.source, settings.data)
            part = partition_indices(source, settings, profile.num_partitions or 1)[profile.partition or 0]
        except DataError as error:
            raise SettingsError(str(error)) from error
        if len(source.input_shape) == 3 and source.inputs.dtype != np.uint8:
            raise SettingsError(
                f"{source.name} holds arrays of shape {source.input_shape}; a deployment on one machine writes each node's share as "
                "pictures or vectors, so choose a source of those"
            )
        _write(source, part, settings, path)
        classes = classes or source.num_classes
    return classes


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
