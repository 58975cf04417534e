"""Classes of pictures by a model file that a node wrote with `export`. Needs torch and Pillow alone; Flower is not imported.

    python -m client_app.predict --model fused.pt2 --input pictures

Load only files you trust: torch unpickles parts of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tasks import DataError
from tasks.pictures import SUFFIXES, Pictures, decode

_BATCH = 32


class PredictError(ValueError):
    """Nothing can be predicted; the message says which file is wrong and what to name instead."""


@dataclass(frozen=True)
class Prediction:
    """The most probable class of one picture.

    Attributes:
        path: of the picture.
        label: name of the class where one is known, else its number.
        index: number of the class.
        probability: softmax of the model's outputs at `index`.
    """

    path: str
    label: str
    index: int
    probability: float


@dataclass(frozen=True)
class Unreadable:
    """A picture that was skipped, and why."""

    path: str
    error: str


@dataclass(frozen=True)
class Model:
    """An exported model.

    Attributes:
        scores: (B, C, H, W) uint8 -> (B, K), one output for each class.
        shape: (C, H, W) of a picture.
        names: of the K classes, or empty.
    """

    scores: Callable[[torch.Tensor], torch.Tensor]
    shape: tuple[int, int, int]
    names: tuple[str, ...]

    @classmethod
    def load(cls, path: Path, labels: Path | None = None) -> Model:
        """Return the model in a .pt2 file; the class names are those of `labels`, else of the card (.json) beside it.

        Args:
            path: written by `export_models`.
            labels: a text file with one class name a line, in the order of the outputs.

        Raises:
            PredictError: no such file, no exported model of pictures, or names that are not as many as its outputs.
        """
        if not path.is_file():
            raise PredictError(f"--model {path}: no such file; name a .pt2 that a run with export=own wrote, see its exports.json")
        try:
            program = _load(path)
        except Exception as error:  # a damaged archive fails in zipfile, json or torch, each in its own way
            raise PredictError(f"--model {path} is no model that a run with export=own wrote ({type(error).__name__}: {error})") from error
        sample = _input_of(program)
        if sample.dim() != 4 or sample.dtype != torch.uint8:
            dtype = str(sample.dtype).removeprefix("torch.")
            raise PredictError(f"--model {path} takes {dtype} samples of shape {tuple(sample.shape[1:])}, not pictures (uint8, C x H x W)")
        _, channels, height, width = (int(length) if index else -1 for index, length in enumerate(sample.shape))
        outputs = int(next(iter(program.graph.output_node().args[0])).meta["val"].shape[-1])
        names = _names(path, labels)
        if names and len(names) != outputs:
            source = labels or path.with_suffix(".json")
            raise PredictError(f"{source} names {len(names)} classes, the model has {outputs} outputs")
        return cls(program.module(), (channels, height, width), names)

    def predict(self, files: Sequence[Path]) -> Iterator[Prediction | Unreadable]:
        """Yield the class of each picture, in order; they are brought to the model's size and channels as in training."""
        for start in range(0, len(files), _BATCH):
            chunk = files[start : start + _BATCH]
            read = [self._read(file) for file in chunk]
            pixels = [picture for picture in read if isinstance(picture, np.ndarray)]
            shares = iter(self._shares(np.concatenate(pixels)) if pixels else ())
            for file, picture in zip(chunk, read, strict=True):
                if isinstance(picture, Unreadable):
                    yield picture
                else:
                    yield self._prediction(file, next(shares))

    def _read(self, file: Path) -> np.ndarray | Unreadable:
        """Return (1, C, H, W) uint8."""
        pixels = np.empty((1, *self.shape), dtype=np.uint8)
        try:
            decode(Pictures(1, lambda: iter([(str(file), file)])), pixels)
        except DataError as error:
            return Unreadable(str(file), str(error).removeprefix(f"{file}: "))
        return pixels

    @torch.inference_mode()
    def _shares(self, pixels: np.ndarray) -> torch.Tensor:
        return self.scores(torch.from_numpy(pixels)).float().softmax(dim=1)

    def _prediction(self, file: Path, shares: torch.Tensor) -> Prediction:
        index = int(shares.argmax())
        return Prediction(str(file), self.names[index] if self.names else str(index), index, float(shares[index]))


def _load(path: Path) -> torch.export.ExportedProgram:
    """Return the program; torch would log a traceback of a file it cannot read before it raises."""
    logging.disable(logging.WARNING)
    try:
        return torch.export.load(path)
    finally:
        logging.disable(logging.NOTSET)


def _input_of(program: torch.export.ExportedProgram) -> torch.Tensor:
    """Return the (fake) tensor that stands for the one input of an exported program."""
    (name,) = program.graph_signature.user_inputs
    return next(node.meta["val"] for node in program.graph.nodes if node.name == name)


def _names(path: Path, labels: Path | None) -> tuple[str, ...]:
    try:
        if labels:
            return tuple(line.strip() for line in labels.read_text(encoding="utf-8").splitlines() if line.strip())
        outputs = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["outputs"]
    except FileNotFoundError as error:
        if labels:
            raise PredictError(f"--labels {labels}: no such file; one class name a line") from error
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PredictError(f"{labels or path.with_suffix('.json')} cannot be read ({error}); --labels names the classes instead") from error
    return tuple(map(str, outputs)) if isinstance(outputs, list) else ()


def pictures_in(place: Path) -> tuple[list[Path], int]:
    """Return the pictures in a folder and all folders below, sorted, and how many other files were left out; or the one file.

    Raises:
        PredictError: no such place, or no picture in it.
    """
    if place.is_file():
        return [place], 0
    files = [file for file in sorted(place.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    pictures = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not pictures:
        why = "holds no picture" if place.is_dir() else "is not there"
        raise PredictError(f"--input {place} {why}; name a folder with {', '.join(sorted(SUFFIXES))} files, or one file")
    return pictures, len(files) - len(pictures)


def run(model: Path, place: Path, labels: Path | None, *, as_json: bool) -> int:
    """Print a line for each picture to stdout, and those that were skipped to stderr; return 1 if none could be read, else 0.

    Raises:
        PredictError: nothing can be predicted.
    """
    files, others = pictures_in(place)
    loaded, read = Model.load(model, labels), 0
    for found in loaded.predict(files):
        if isinstance(found, Unreadable):
            print(f"skipped {found.path}: {found.error}", file=sys.stderr)
        read += isinstance(found, Prediction)
        if as_json:
            print(json.dumps(asdict(found)))
        elif isinstance(found, Prediction):
            print(f"{found.path}  {found.label}  {found.probability:.3f}")
    if others:
        print(f"{others} other files are no pictures", file=sys.stderr)
    return 0 if read else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m client_app.predict", description="Classes of pictures by an exported model.")
    parser.add_argument("--model", type=Path, required=True, help="a .pt2 file of a run with export=own")
    parser.add_argument("--input", type=Path, required=True, help="a folder of pictures, or one")
    parser.add_argument("--labels", type=Path, help="class names, one a line, where the model's card has none")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args(arguments)
    try:
        return run(options.model, options.input, options.labels, as_json=options.json)
    except PredictError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
