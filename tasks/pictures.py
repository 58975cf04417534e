"""Encoded pictures -> one uint8 array (N, C, H, W), all of one size and number of channels."""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks import DataError

log = logging.getLogger(__name__)

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm"})
_GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "F"})


@dataclass(frozen=True)
class Pictures:
    """Encoded pictures that can be gone through more than once.

    Attributes:
        count: how many there are.
        items: makes an iterator of (where it is, for messages; file content or path).
    """

    count: int
    items: Callable[[], Iterator[tuple[str, bytes | Path]]]


@dataclass(frozen=True)
class Survey:
    """What the headers of a set of pictures say; nothing is decoded for it."""

    sizes: Counter[tuple[int, int]]
    grey: int
    total: int

    def merged(self, other: Survey) -> Survey:
        """Return the survey of both sets together."""
        return Survey(self.sizes + other.sizes, self.grey + other.grey, self.total + other.total)

    def shape(self, name: str, channels: int = 0, side: int = 0) -> tuple[int, int, int]:
        """Return (C, H, W) that all pictures are brought to; what must be changed for it is logged under `name`.

        C is `channels`, or 1 where every picture is grey, else 3; (H, W) is `side` squared, or the most common size,
        the larger of two equally common.
        """
        (width, height), most = max(self.sizes.items(), key=lambda item: (item[1], item[0][0] * item[0][1], item[0]))
        if side:
            width, height, most = side, side, self.sizes[side, side]
        if most < self.total:
            log.warning("%s: %d of %d pictures are not %dx%d (%s) and are resized to it", name, self.total - most, self.total,
                        width, height, "data.image-size" if side else "the most common size")  # fmt: skip
        channels = channels or (1 if self.grey == self.total else 3)
        if channels == 3 and self.grey:
            log.warning("%s: %d of %d pictures are grey and are converted to RGB like the others", name, self.grey, self.total)
        return channels, height, width


def survey(pictures: Pictures) -> Survey:
    """Return the sizes and the number of grey pictures, from the headers only.

    Raises:
        DataError: a picture that cannot be read, naming it.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    grey = 0
    for where, item in pictures.items():
        with _opened(where, item) as image:
            sizes[image.size] += 1
            grey += _is_grey(image.mode)
    return Survey(sizes, grey, pictures.count)


def decode(pictures: Pictures, out: np.ndarray) -> None:
    """Fill `out` (N, C, H, W) uint8, which may be memory-mapped, in the order of `pictures`.

    Raises:
        DataError: a picture that cannot be decoded, naming it.
    """
    _, channels, height, width = out.shape
    for index, (where, item) in enumerate(pictures.items()):
        with _opened(where, item) as image:
            try:
                out[index] = _pixels(image, channels, (width, height))
            except (OSError, ValueError, SyntaxError) as error:
                raise DataError(f"{where}: the picture cannot be decoded ({error}); replace or remove it") from error


def _pixels(image, channels: int, size: tuple[int, int]) -> np.ndarray:
    """Return (C, H, W) uint8 of a PIL image; 16-bit grey keeps its upper 8 bits, transparency is dropped."""
    from PIL import Image

    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64)
        image = Image.fromarray(((deep >> 8) if deep.max(initial=0) > 255 else deep).clip(0, 255).astype(np.uint8))
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _opened(where: str, item: bytes | Path):
    from PIL import Image

    try:
        return Image.open(io.BytesIO(item) if isinstance(item, bytes) else item)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: not a picture that can be read ({error}); replace or remove it") from error


def _is_grey(mode: str) -> bool:
    return mode in _GREY_MODES or mode.startswith("I;16")
