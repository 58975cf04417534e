"""What crosses between the halves, as plain dataclasses, and its encoding into Flower records.

Flower serialises numpy arrays only, so bfloat16 travels as its bit pattern in int16. A tensor
whose wire dtype differs from the sender's is listed beside the record and comes back as sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

Scalar = int | float | str | bool
Tensors = dict[str, torch.Tensor]

_WIRE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ARRAYS, _DTYPES = "arrays", "dtypes"


class TransportError(ValueError):
    """A tensor does not fit the transport's dtype; the message names it."""


@dataclass
class Payload:
    """What goes out to one node. The same object for several nodes is sent as one record.

    Attributes:
        tensors: shared tensors by name.
        settings: scalars of the method for this node and round.
        parts: further tensors by the part's name, for what some nodes get and others don't: the same dict in several
            payloads is sent as one record.
    """

    tensors: Tensors = field(default_factory=dict)
    settings: dict[str, Scalar] = field(default_factory=dict)
    parts: dict[str, Tensors] = field(default_factory=dict)


@dataclass
class Update:
    """What one node sends back.

    Attributes:
        tensors: shared tensors by name; never a private one.
        num_examples: training samples used, > 0; the node's weight unless the method says otherwise.
        metrics: scalars measured on the node.
    """

    tensors: Tensors = field(default_factory=dict)
    num_examples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def encode(tensors: Mapping[str, torch.Tensor], dtype: str = "float32") -> RecordDict:
    """Return the records that carry `tensors`; floating tensors wider than `dtype` are narrowed to it.

    Args:
        tensors: name -> tensor of any device and layout; 0-d tensors keep their shape.
        dtype: "float32", "float16" or "bfloat16".

    Raises:
        TransportError: a finite value is beyond `dtype`.
    """
    wire: Tensors = {}
    restore: dict[str, str] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu")
        sent = value.dtype
        if value.is_floating_point() and torch.finfo(value.dtype).bits > torch.finfo(_WIRE[dtype]).bits:
            value = _narrowed(name, value, _WIRE[dtype])
        if value.dtype != sent or value.dtype == torch.bfloat16:
            restore[name] = f"{str(sent).removeprefix('torch.')}:{str(value.dtype).removeprefix('torch.')}"
        wire[name] = (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).contiguous()
    return RecordDict({_ARRAYS: ArrayRecord(wire), _DTYPES: ConfigRecord(dict(restore))})


def largest_of(tensor: torch.Tensor) -> float:
    """Return the largest absolute value, nan where one is, without the copy that abs() makes."""
    return max(map(abs, map(float, tensor.aminmax())))


def _narrowed(name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow, most = value.to(dtype), torch.finfo(dtype).max
    if value.numel() and (largest := largest_of(value)) > most and math.isfinite(largest):
        raise TransportError(
            f"{name} holds {largest:.3g}, more than {str(dtype).removeprefix('torch.')} carries ({most:g}); "
            'set transport.dtype = "bfloat16" or "float32", or lower train.learning-rate if it did not start as large'
        )
    return narrow


def attach_part(content: RecordDict, part: str, encoded: RecordDict) -> None:
    """Put the records of `encoded` into `content` as a part; they are not copied, so that messages can share them."""
    for key in (_ARRAYS, _DTYPES):
        content[f"{key}.{part}"] = encoded[key]


class Outbox:
    """Encodes what goes out; the same payload or part is encoded once, and one record then, which Flower stores once.

    Args:
        dtype: as in `encode`.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._encoded: dict[int, tuple[object, RecordDict]] = {}  # id -> what was encoded (kept, or the id could come again), records

    def content(self, payload: Payload) -> RecordDict:
        """Return a new content that carries the payload's tensors and parts."""
        content = RecordDict(dict(self._records(payload.tensors)))
        for name, tensors in payload.parts.items():
            attach_part(content, name, self._records(tensors))
        return content

    def clear(self) -> None:
        """Let go of what was encoded."""
        self._encoded.clear()

    def _records(self, tensors: Tensors) -> RecordDict:
        if id(tensors) not in self._encoded:
            self._encoded[id(tensors)] = (tensors, encode(tensors, self._dtype))
        return self._encoded[id(tensors)][1]


def decode_parts(content: RecordDict) -> dict[str, Tensors]:
    """Return the tensors of each part of a message by the part's name; raises ValueError as `decode`."""
    prefix = f"{_ARRAYS}."
    return {key.removeprefix(prefix): decode(content, f".{key.removeprefix(prefix)}") for key in content if key.startswith(prefix)}


def decode(content: RecordDict, suffix: str = "", *, take: bool = False) -> Tensors:
    """Return the tensors of a message, in the dtypes in which they were handed to `encode`.

    Args:
        content: what arrived.
        suffix: of the records' keys; parts have one, see `decode_parts`.
        take: take each array out of `content` as it is read, so that bytes and tensors are never both whole in memory.

    Raises:
        ValueError: the message was not made by `encode`.
    """
    record, restore = content.get(_ARRAYS + suffix), content.get(_DTYPES + suffix)
    if not isinstance(record, ArrayRecord) or not isinstance(restore, ConfigRecord):
        raise ValueError("the message carries no tensors: the sender runs another version of this app")
    tensors: Tensors = dict(record.to_torch_state_dict(keep_input=not take))
    for name, pair in restore.items():
        sent, _, wire = str(pair).partition(":")
        dtype = getattr(torch, sent, None)
        if name not in tensors or not isinstance(dtype, torch.dtype):
            raise ValueError(f"the message restores {name} to {sent}, which it cannot")
        value = tensors[name]
        if wire == "bfloat16":
            value = value.view(torch.bfloat16)
        tensors[name] = value.to(dtype)
    return tensors


def wire_bytes(content: RecordDict) -> int:
    """Return the bytes of all records as serialised (arrays with their numpy headers)."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) + len(name) for name, array in record.items())
        else:
            total += record.count_bytes()
    return total
