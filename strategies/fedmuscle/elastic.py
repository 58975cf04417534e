"""Representations that also work cut short: in width (Matryoshka prefixes) and in depth (inner layers).

Letters: B samples, D dimensions, C outputs, k a prefix size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from strategies.fedmuscle.loss import muscle_loss
from strategies.fedmuscle.temperatures import Schedule, Temperatures
from strategies.fedmuscle.transport import normalise


def checked_sizes(sizes: Sequence[int], width: int) -> tuple[int, ...]:
    """Return `sizes`, ascending.

    Raises:
        ValueError: none, duplicates, or a size outside 1..width.
    """
    if not sizes or len(set(sizes)) != len(sizes) or not all(1 <= k <= width for k in sizes):
        raise ValueError(f"prefix sizes {list(sizes)}: need different numbers from 1 to {width}")
    return tuple(sorted(sizes))


def nested_muscle_loss(
    anchor_BD: torch.Tensor,
    peers: Sequence[torch.Tensor],
    temperatures: Temperatures | Schedule | tuple[float, float],
    sizes: Sequence[int],
    *,
    evaluator: str = "auto",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return the mean over prefix sizes k of the Muscle loss of the first k dimensions, at unit length again for every k.

    Peers may be narrower than the anchor: sizes beyond the narrowest are cut to it, and count once.

    Args:
        anchor_BD: the node's own representations; need not be normalised.
        peers: M tensors (B, up to D).
        temperatures: as for `muscle_loss`.
        sizes: prefixes, in 1..D.
        evaluator: as for `muscle_loss`.
        generator: as for `muscle_loss`.

    Raises:
        ValueError: sizes or peers that do not fit.
    """
    width = anchor_BD.shape[1]
    for m, peer in enumerate(peers):
        if peer.dim() != 2 or len(peer) != len(anchor_BD) or not 1 <= peer.shape[1] <= width:
            raise ValueError(
                f"peer {m} has shape {tuple(peer.shape)}, the anchor {tuple(anchor_BD.shape)}; need equal batches and 1 to {width} columns"
            )
    common = min([width, *(peer.shape[1] for peer in peers)])
    losses = []
    for k in sorted({min(k, common) for k in checked_sizes(sizes, width)}):
        cut = [normalise(peer.detach()[:, :k])[0] for peer in peers]
        losses.append(muscle_loss(normalise(anchor_BD[:, :k])[0], cut, temperatures, evaluator=evaluator, generator=generator))
    return torch.stack(losses).mean()


def mrl_outputs(rep_BD: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs (B, C) of one head per prefix (MRL): W_k z[:k] + b_k, k taken from W_k (C, k)."""
    return [F.linear(rep_BD[:, : weight.shape[1]], weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def mrl_e_outputs(rep_BD: torch.Tensor, weight_CD: torch.Tensor, bias_C: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the outputs (B, C) of one head cut to each prefix (MRL-E): W[:, :k] z[:k] + b, in ascending order of k."""
    return [F.linear(rep_BD[:, :k], weight_CD[:, :k], bias_C) for k in checked_sizes(sizes, weight_CD.shape[1])]


def nested_head_loss(
    outputs: Sequence[torch.Tensor],
    targets: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    weights: Sequence[float] | None = None,
) -> torch.Tensor:
    """Return sum_k c_k loss(outputs_k, targets), a sum and not a mean, with c_k = 1 unless `weights` are given."""
    factors = [1.0] * len(outputs) if weights is None else weights
    return torch.stack([c * loss(output, targets) for c, output in zip(factors, outputs, strict=True)]).sum()


def layer_alignment_loss(inner_BD: torch.Tensor, last_BD: torch.Tensor, *, temperature: float = 0.3) -> torch.Tensor:
    """Return T KL(softmax(last / T) || softmax(inner / T)) over the dimensions, mean over samples (2DMSE).

    The last layer is the teacher and gets no gradient, else it would be pulled towards the worse layer.

    Raises:
        ValueError: shapes differ, or the temperature is not positive.
    """
    if inner_BD.shape != last_BD.shape or temperature <= 0:
        raise ValueError(
            f"layers of shape {tuple(inner_BD.shape)} and {tuple(last_BD.shape)} at {temperature}: need equal shapes, temperature > 0"
        )
    teacher = F.log_softmax(last_BD.detach().float() / temperature, 1)
    student = F.log_softmax(inner_BD.float() / temperature, 1)
    return temperature * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def elastic_loss(
    inner_BD: torch.Tensor,
    last_BD: torch.Tensor,
    size: int,
    loss: Callable[[torch.Tensor], torch.Tensor],
    *,
    inner_weight: float = 1.0,
    alignment_weight: float = 1.0,
    temperature: float = 0.3,
) -> torch.Tensor:
    """Return the 2DMSE loss: L(last) + L(last[:k]) + w (L(inner) + L(inner[:k])) + lambda alignment; at k = D the prefixes do not count.

    Args:
        inner_BD: representation after the sampled inner layer, through the same projector.
        last_BD: representation after the last layer.
        size: k, the sampled prefix.
        loss: (B, any width) -> 0-d; a head loss through `mrl_e_outputs`, or a Muscle loss.
        inner_weight: w, see `layer_weight`.
        alignment_weight: lambda.
        temperature: of the alignment.
    """
    (k,) = checked_sizes([size], last_BD.shape[1])
    outer, inner = loss(last_BD), loss(inner_BD)
    if k < last_BD.shape[1]:
        outer, inner = outer + loss(last_BD[:, :k]), inner + loss(inner_BD[:, :k])
    return outer + inner_weight * inner + alignment_weight * layer_alignment_loss(inner_BD, last_BD, temperature=temperature)


def layer_weight(layer: int, num_layers: int, *, every_layer: bool = False) -> float:
    """Return the weight of inner layer `layer` (0-based, < num_layers - 1); the last layer weighs 1.

    One sampled layer weighs 1 / (1 + layer) (2DMSE); where every inner layer is used, each weighs
    1 / ((1 + ln(1 + layer)) (num_layers - 1)) (ESE).

    Raises:
        ValueError: not an inner layer.
    """
    if not 0 <= layer < num_layers - 1:
        raise ValueError(f"layer {layer} of {num_layers}: inner layers are 0 to {num_layers - 2}")
    return 1.0 / ((1.0 + math.log(1.0 + layer)) * (num_layers - 1)) if every_layer else 1.0 / (1.0 + layer)


def sample_cut(num_layers: int, sizes: Sequence[int], generator: torch.Generator) -> tuple[int, int]:
    """Return one inner layer (0-based, < num_layers - 1) and one prefix size, drawn uniformly."""
    if num_layers < 2 or not sizes:
        raise ValueError(f"{num_layers} layers and sizes {list(sizes)}: need at least 2 layers and one size")
    layer = int(torch.randint(num_layers - 1, (), generator=generator))
    return layer, sizes[int(torch.randint(len(sizes), (), generator=generator))]
