"""The Muscle loss of one anchor node against its peers, for autograd.

    L(z_i) = -log [ f_i(i, ..., i) / sum_j f_i(j) ],  j in {1..B}^M, the positive tuple included,
    log f_i(j) = sum_m z_i . z_{j_m}^m / tau^(N) - gamma sum_{m<m'} z_{j_m}^m . z_{j_m'}^m'

Only the anchor gets a gradient. Rows are meant to be unit length (`transport.normalise`): otherwise the peer
term is unbounded. Letters: B samples of the public batch, D dimensions, M peers, N = M + 1 models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from strategies.fedmuscle import evaluators
from strategies.fedmuscle.evaluators import Evaluation
from strategies.fedmuscle.exact import exact, feasible
from strategies.fedmuscle.temperatures import Schedule, Temperatures, resolve

EVALUATORS = ("auto", "naive", "exact", "mean-field", "sampled")


def muscle_loss(
    anchor_BD: torch.Tensor,
    peers: Sequence[torch.Tensor],
    temperatures: Temperatures | Schedule | tuple[float, float],
    *,
    evaluator: str = "auto",
    samples: int = 256,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return the mean Muscle loss over the batch, 0-d, differentiable once by the anchor. Arguments as for `evaluate`."""
    evaluation = evaluate(anchor_BD, peers, temperatures, evaluator=evaluator, samples=samples, generator=generator)
    return attach(anchor_BD, evaluation.loss, evaluation.gradient)


def evaluate(
    anchor_BD: torch.Tensor,
    peers: Sequence[torch.Tensor],
    temperatures: Temperatures | Schedule | tuple[float, float],
    *,
    evaluator: str = "auto",
    samples: int = 256,
    generator: torch.Generator | None = None,
) -> Evaluation:
    """Return value, gradient and how they were obtained. Half precision is computed in float32, also under autocast.

    Args:
        anchor_BD: the node's own unit rows.
        peers: M tensors of the anchor's shape, dtype and device; row i of each is the same public item.
            None at all: the loss is 0, as of a single empty tuple.
        temperatures: a schedule, or the pair (tau^(N), tau^(N-1)).
        evaluator: "auto" takes "exact" while it is cheap (`exact.feasible`), else "mean-field".
        samples: tuples per anchor of "sampled".
        generator: randomness of "sampled", which requires it.

    Raises:
        ValueError: unknown evaluator, shapes, dtypes or temperatures that do not fit, too large for the evaluator.
        FloatingPointError: NaN or infinity in the input, or temperatures out of range.
    """
    if evaluator not in EVALUATORS:
        raise ValueError(f"evaluator {evaluator!r} is unknown; choose one of {', '.join(EVALUATORS)}")
    _check(anchor_BD, peers)
    if not peers:
        return Evaluation(torch.zeros((), dtype=_working(anchor_BD), device=anchor_BD.device), torch.zeros_like(anchor_BD), evaluator)
    M, B = len(peers), len(anchor_BD)
    pair = resolve(temperatures, M)
    if evaluator == "auto":
        evaluator = "exact" if feasible(M, B) else "mean-field"
    with torch.no_grad(), torch.autocast(anchor_BD.device.type, enabled=False):
        anchor = anchor_BD.detach().to(_working(anchor_BD))
        stacked_MBD = torch.stack([peer.detach() for peer in peers]).to(anchor.dtype)
        result = _run(evaluator, anchor, stacked_MBD, pair, samples, generator)
        if not math.isfinite(float(result.loss + result.gradient.sum())):
            raise FloatingPointError(_culprit(anchor, stacked_MBD, pair))
    return result


def attach(anchor_BD: torch.Tensor, loss: torch.Tensor, gradient_BD: torch.Tensor) -> torch.Tensor:
    """Return `loss` as a function of the anchor whose gradient is `gradient_BD`, which may have been computed elsewhere.

    Raises:
        ValueError: the gradient has another shape than the anchor, or is not finite.
    """
    if gradient_BD.shape != anchor_BD.shape:
        raise ValueError(f"gradient of shape {tuple(gradient_BD.shape)} for an anchor of shape {tuple(anchor_BD.shape)}")
    if not torch.isfinite(gradient_BD).all():
        raise ValueError("the gradient holds NaN or infinity; drop this exchange")
    return _Attached.apply(anchor_BD, loss, gradient_BD.to(anchor_BD.dtype))


def shared_information(loss: float, num_peers: int, batch: int) -> float | None:
    """Return the bound M log B - L in nats on what anchor and peers share (theorem 1), or None where it says nothing (<= 0)."""
    bound = num_peers * math.log(batch) - loss
    return bound if bound > 0 else None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor_BD: torch.Tensor, loss: torch.Tensor, gradient_BD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient_BD)
        return loss.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_BD,) = ctx.saved_tensors
        return upstream.to(gradient_BD.dtype) * gradient_BD, None, None


def _working(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _run(
    evaluator: str, anchor: torch.Tensor, stacked_MBD: torch.Tensor, pair: Temperatures, samples: int, generator: torch.Generator | None
) -> Evaluation:
    if evaluator == "exact":
        return exact(anchor, stacked_MBD, pair)
    if evaluator == "naive":
        return evaluators.naive(anchor, stacked_MBD, pair)
    if evaluator == "mean-field":
        return evaluators.mean_field(anchor, stacked_MBD, pair)
    if generator is None or samples < 1:
        raise ValueError(f"the sampled evaluator needs a torch.Generator and at least 1 sample; got {generator} and {samples}")
    return evaluators.sampled(anchor, stacked_MBD, pair, samples=samples, generator=generator)


def _check(anchor_BD: torch.Tensor, peers: Sequence[torch.Tensor]) -> None:
    if anchor_BD.dim() != 2 or 0 in anchor_BD.shape or not anchor_BD.is_floating_point():
        raise ValueError(f"anchor of shape {tuple(anchor_BD.shape)} and dtype {anchor_BD.dtype}: need (B, D), floating, neither empty")
    for m, peer in enumerate(peers):
        if peer.shape != anchor_BD.shape:
            raise ValueError(f"peer {m} has shape {tuple(peer.shape)}, the anchor {tuple(anchor_BD.shape)}; they must be equal")
        if peer.dtype != anchor_BD.dtype or peer.device != anchor_BD.device:
            raise ValueError(
                f"peer {m} is {peer.dtype} on {peer.device}, the anchor {anchor_BD.dtype} on {anchor_BD.device}; use peer.to(anchor)"
            )


def _culprit(anchor: torch.Tensor, stacked_MBD: torch.Tensor, pair: Temperatures) -> str:
    if not torch.isfinite(anchor).all():
        return "the anchor's representations hold NaN or infinity"
    bad = [m for m, peer in enumerate(stacked_MBD) if not torch.isfinite(peer).all()]
    if bad:
        return f"representations of peer {bad[0]} hold NaN or infinity; reject them on arrival"
    return f"the Muscle loss left the range of {anchor.dtype} at tau = {pair.tau}, gamma = {pair.gamma:.4g}; are all rows unit length?"
