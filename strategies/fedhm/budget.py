"""The largest rank ratio a node can afford, measured on the node itself with its own batch size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from client_app.training import channels_last, sgd
from models.cost import activation_bytes
from models.split import SplitModel
from strategies.fedhm.config import Config
from strategies.fedhm.hybrid import load_state, state_of
from strategies.fedhm.tiers import Tier
from strategies.trainer import NodeContext

_STEPS = 3
Measure = Callable[[nn.Module, NodeContext], tuple[float, float]]


def largest_affordable(model: SplitModel, context: NodeContext, measure: Measure | None = None) -> float:
    """Return the largest of fleet.rank-ratios at which one step keeps within fedhm.max-step-seconds and fedhm.max-memory-mb.

    Args:
        model: the full model on the node's device.
        context: of the node.
        measure: (hybrid, context) -> seconds of one step and MB; None: `step_cost`.

    Raises:
        ValueError: none fits, naming the node and what the smallest needs.
    """
    config = cast(Config, context.config)
    seconds, megabytes, ratio = 0.0, 0.0, 1.0
    for ratio in sorted(set(context.settings.fleet.rank_ratios), reverse=True):
        seconds, megabytes = (measure or step_cost)(Tier.of(model, ratio, config).hybrid(model), context)
        slow = 0 < config.max_step_seconds < seconds
        if not slow and not 0 < config.max_memory_mb < megabytes:
            return ratio
    raise ValueError(
        f"node {context.profile.node_name}: no ratio of fleet.rank-ratios fits: {ratio:g} needs {seconds:.3g} s a step and "
        f"{megabytes:.0f} MB, fedhm.max-step-seconds = {config.max_step_seconds:g}, fedhm.max-memory-mb = {config.max_memory_mb:g}; "
        "add a smaller ratio"
    )


def step_cost(model: nn.Module, context: NodeContext) -> tuple[float, float]:
    """Return the median seconds of a training step and the MB it holds: weights, gradients, momentum, activations.

    On the CPU memory is the sum of what is kept, without the allocator's and the kernels' own.
    """
    settings, task, device = context.settings.train, context.task, context.device
    model.to(device).train()
    start = {n: torch.full_like(t, 0.01) for n, t in state_of(model).items() if n.endswith((".ut", ".vt"))}
    load_state(model, state_of(model) | start)  # zero factors give zeros, which some kernels finish sooner
    optimizer = sgd(model.parameters(), rate=1e-9, momentum=settings.momentum, weight_decay=0.0)
    count = max(2, min(settings.batch_size, len(task.train)))
    batch = channels_last(torch.zeros(count, *task.input_shape, device=device))
    targets = torch.zeros(count, dtype=torch.int64, device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(_STEPS + 1):
        began = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model(batch), targets).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]), _megabytes(model, context, count)


def _megabytes(model: nn.Module, context: NodeContext, count: int) -> float:
    if context.device.type == "cuda":
        return torch.cuda.max_memory_allocated(context.device) / 1e6
    numbers = sum(p.numel() * p.element_size() for p in model.parameters())
    return (3 * numbers + count * activation_bytes(model, context.task.input_shape)) / 1e6
