"""Settings of FedHM. Defaults are the paper's, but for BatchNorm and one decay instead of two (see `strategies.fedhm`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from server_app.settings import NonNegative, Positive, Section

Share = Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)]


class Config(Section):
    """`fedhm.*`.

    Attributes:
        model: name for `models.build` of the full model.
        rho: how many of the first layers that could be cut stay full.
        rank_rule: `outputs` (ratio x outputs, the published figures), `full-rank` (ratio x min(M, N), the paper's text),
            `parameters` (ratio x break-even rank).
        rank_ratio: `node` (the node's own: node_config, in simulation fleet.rank-ratios), `dynamic` (each node draws one of
            fleet.rank-ratios anew each round), `auto` (the largest of fleet.rank-ratios that fits the two limits below).
        max_step_seconds, max_memory_mb: of `auto`, each measured on the node; 0: no limit.
        warmup_rounds: first rounds in which every node trains the full model.
        svd: `auto`, `exact`, `naive`.
        tolerance: of `auto`: about the relative excess over the smallest truncation error.
        floor: share of the largest singular value below which the two factors are no longer balanced, so that
            directions without energy can learn; 0: always balanced.
        aggregation: `paper`, `delta`, `delta-decay`.
        keep: of `delta-decay`: how much a node counts for what it did not see, between paper (0) and delta (1).
        delta_after: of `delta` and `delta-decay`: first rounds that average as `paper` does. They clear away what the random
            start holds beyond the small ranks, which delta would keep for good.
        missing_largest: `accept` or `history`, in rounds without a node of the largest ratio.
        weighting: `paper`, `code`, `uniform`.
        temperature: tau of the first two.
        times_samples: multiply the weights by the training samples used.
        frobenius_decay: lambda on |U V^T|^2; 0: factors get train.weight-decay like everything else.
        batch_norm: `recalibrate`, `batch`, `group`.
        masked_loss: outputs of classes that the node lacks count as 0 in its loss.
    """

    model: str = Field("cnn5", min_length=1)
    rho: int = Field(1, ge=0)
    rank_rule: Literal["outputs", "full-rank", "parameters"] = "outputs"
    rank_ratio: Literal["node", "dynamic", "auto"] = "node"
    max_step_seconds: NonNegative = 0.0
    max_memory_mb: NonNegative = 0.0
    warmup_rounds: int = Field(0, ge=0)
    svd: Literal["auto", "exact", "naive"] = "auto"
    tolerance: Share = 0.02
    floor: float = Field(0.0, ge=0.0, lt=1.0)
    aggregation: Literal["paper", "delta", "delta-decay"] = "paper"
    keep: Share = 0.9
    delta_after: int = Field(0, ge=0)
    missing_largest: Literal["accept", "history"] = "accept"
    weighting: Literal["paper", "code", "uniform"] = "paper"
    temperature: Positive = 1.0
    times_samples: bool = False
    frobenius_decay: NonNegative = 0.0001
    batch_norm: Literal["recalibrate", "batch", "group"] = "recalibrate"
    masked_loss: bool = False

    def kept(self, server_round: int) -> float:
        """Return `Merger`'s keep in a round: 0 for the paper's average, 1 for delta aggregation."""
        if server_round <= self.delta_after:
            return 0.0
        return {"paper": 0.0, "delta": 1.0, "delta-decay": self.keep}[self.aggregation]
