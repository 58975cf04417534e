"""Representations on their way between nodes: unit rows, narrower numbers, and what is refused on arrival.

Letters: B samples of the public batch, D dimensions.
"""

from __future__ import annotations

import torch

TRANSPORTS = ("float32", "float16", "int8")
NORM_TOLERANCE = 0.05
_SMALLEST = 1e-8


def normalise(rep_BD: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the rows at unit length, at least float32 also under autocast, and how many were zero.

    A zero row (all units dead) stays zero and gets no gradient: divided by a small constant instead, it would
    get one of 1e12.
    """
    with torch.autocast(rep_BD.device.type, enabled=False):
        rep = rep_BD if rep_BD.dtype == torch.float64 else rep_BD.float()
        # Lengths of tiny or huge rows would under- or overflow when squared.
        peak_B1 = rep.detach().abs().amax(1, keepdim=True)
        zero_B1 = peak_B1 < _SMALLEST
        scaled = torch.where(zero_B1, torch.zeros_like(rep), rep / peak_B1.clamp_min(_SMALLEST))
        squares_B1 = scaled.square().sum(1, keepdim=True)
        unit = scaled / torch.where(zero_B1, torch.ones_like(squares_B1), squares_B1).sqrt()
    return unit, int(zero_B1.sum())


def encode_rows(rep_BD: torch.Tensor, transport: str) -> torch.Tensor:
    """Return the tensor to send, (B, D) of the named dtype.

    For int8 each row has its own scale, its largest magnitude / 127. It is not sent: rows have unit length, and that
    restores it.

    Args:
        rep_BD: unit rows.
        transport: "float32", "float16" or "int8"; about 0.03 % and 1 % of gradient error for the last two.

    Raises:
        ValueError: unknown transport, NaN or infinity.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport {transport!r} is unknown; choose one of {', '.join(TRANSPORTS)}")
    rep = rep_BD.detach().float()
    if not torch.isfinite(rep).all():
        raise ValueError("representations to send hold NaN or infinity")
    if transport == "float32":
        return rep
    if transport == "float16":
        return rep.half()
    scale_B1 = rep.abs().amax(1, keepdim=True) / 127.0
    return (rep / torch.where(scale_B1 > 0, scale_B1, torch.ones_like(scale_B1))).round().to(torch.int8)


def decode_rows(rows_BD: torch.Tensor, *, shape: tuple[int, int], sender: str) -> torch.Tensor:
    """Return what `encode_rows` was given, checked and at unit length again, float32 (B, D).

    Args:
        rows_BD: as received.
        shape: (B, D) of the batch and the projector.
        sender: node name, for the message.

    Raises:
        ValueError: naming the sender: another shape or dtype, NaN, infinity, zero rows, or rows whose length is not 1
            (whoever sends large rows takes over everyone's loss).
    """
    if rows_BD.dtype not in (torch.float32, torch.float16, torch.int8):
        raise ValueError(f"node {sender!r} sent representations as {rows_BD.dtype}; known are {', '.join(TRANSPORTS)}")
    if tuple(rows_BD.shape) != tuple(shape):
        raise ValueError(f"node {sender!r} sent representations of shape {tuple(rows_BD.shape)}, expected {tuple(shape)}")
    rep_BD = rows_BD.float()
    if rows_BD.dtype == torch.int8:
        rep_BD, _ = normalise(rep_BD)
    check_rows(rep_BD, sender=sender)
    return normalise(rep_BD)[0]


def check_rows(rep_BD: torch.Tensor, *, sender: str) -> None:
    """Refuse rows that are not of length 1.

    Raises:
        ValueError: naming the sender, the first bad row and its length.
    """
    norms_B = rep_BD.double().norm(dim=1)
    # Written so that NaN counts as bad.
    bad = (~((norms_B - 1.0).abs() <= NORM_TOLERANCE)).nonzero().flatten()
    if len(bad):
        first = int(bad[0])
        raise ValueError(
            f"node {sender!r} sent {len(bad)} rows that are not of length 1; row {first} has length {float(norms_B[first]):.4g}"
        )
