"""The public set: pictures that every node holds, indexed alike, without labels, brought to each node's input shape.

Letters: B batch, C channels, H height, W width, N items.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from tasks import DataError
from tasks.sources import Source, open_source
from tasks.splits import rng_for

if TYPE_CHECKING:
    from server_app.settings import DataSettings

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601: weights of red, green and blue in grey


@dataclass(frozen=True)
class PublicSet:
    """Unlabeled items in one order.

    Attributes:
        inputs: (N, *shape) as the source has them: uint8 pictures, or float32 vectors.
        manifest: `set_digest` of `inputs`; two nodes with the same one hold the same set.
        input_shape: what `batch` returns a sample as.
        name: the source, for messages.
    """

    inputs: torch.Tensor
    manifest: str
    input_shape: tuple[int, ...]
    name: str

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices_B: torch.Tensor) -> torch.Tensor:
        """Return the items (B, *input_shape) in the raw range of the source: uint8, or float32 where they were resized."""
        return fitted(self.inputs[indices_B], self.input_shape)


def load_public(name: str, data: DataSettings, *, items: int, seed: int, input_shape: tuple[int, ...]) -> PublicSet:
    """Return the public set of source `name`: `items` of its train split, the same on every machine with the same source.

    Args:
        name: as `data.source`.
        data: which columns.
        items: at most so many; 0: all.
        seed: of the run; decides which items.
        input_shape: of the node's own samples.

    Raises:
        DataError: the source cannot be read, or its samples cannot be brought to `input_shape`.
    """
    source = open_source(name, data)
    check_fit(source, input_shape)
    inputs, manifest = _held(source.key, name, data, items, seed)
    return PublicSet(inputs, manifest, tuple(input_shape), name)


def check_fit(source: Source, input_shape: tuple[int, ...]) -> None:
    """Raise DataError unless `fitted` can bring the source's samples to `input_shape`."""
    have = source.input_shape
    if have == tuple(input_shape) and len(have) != 3:
        return
    if len(have) == 3 == len(input_shape) and {have[0], input_shape[0]} <= {1, 3} and source.inputs.dtype == np.uint8:
        return
    raise DataError(
        f"public set {source.name!r} has samples of shape {have} ({source.inputs.dtype}), this node's have {tuple(input_shape)}; pictures "
        "of 1 or 3 channels fit any pictures of 1 or 3 channels, vectors only vectors of their length: choose another public source"
    )


def fitted(batch: torch.Tensor, input_shape: tuple[int, ...]) -> torch.Tensor:
    """Return pictures (B, C, H, W) in the size and channels of `input_shape`; unchanged where they have them already.

    Bilinear with antialiasing; grey from colours by BT.601, colours from grey by repetition.
    """
    if tuple(batch.shape[1:]) == tuple(input_shape):
        return batch
    picture = batch.float()
    if (picture.shape[1], input_shape[0]) == (3, 1):
        picture = (picture * torch.tensor(_LUMA, device=batch.device).reshape(1, 3, 1, 1)).sum(1, keepdim=True)
    if picture.shape[2:] != tuple(input_shape[1:]):
        picture = F.interpolate(picture, size=tuple(input_shape[1:]), mode="bilinear", antialias=True, align_corners=False)
    return picture.expand(-1, input_shape[0], -1, -1)


@functools.lru_cache(maxsize=4)
def _held(key: str, name: str, data: DataSettings, items: int, seed: int) -> tuple[torch.Tensor, str]:
    """Return the chosen items and their manifest, once a process; `key` tells two contents of one name apart."""
    source = open_source(name, data)
    count = len(source.labels)
    chosen = np.arange(count)
    if 0 < items < count:
        chosen = np.sort(rng_for(seed, "public").permutation(count)[:items])
    inputs = torch.from_numpy(np.ascontiguousarray(source.inputs[chosen]))
    return inputs, set_digest(inputs)


def set_digest(inputs: torch.Tensor) -> str:
    """Return the SHA-256 of a set's shape, dtype and bytes, whatever the machine's byte order: equal ones hold the same set."""
    array = np.ascontiguousarray(inputs.detach().cpu().numpy())
    little = array.dtype.newbyteorder("<")
    digest = hashlib.sha256(f"{little.str} {array.shape}".encode())
    digest.update(array.astype(little, copy=False).data)
    return digest.hexdigest()
