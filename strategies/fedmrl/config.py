"""Settings of FedMRL. The defaults are those that won in benchmarks/RESULTS.md; `preset = "paper"` is the paper's method."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from server_app.settings import NonNegative, Section

# What `preset = "paper"` puts in the place of a default.
PAPER: dict[str, Any] = {"projector_start": "random", "own_weight": 0.0, "masked_loss": False, "predict": "fine"}


def expanded(config: dict[str, Any], typed: set[str]) -> dict[str, Any]:
    """Return a flat run config with `preset = "paper"` written out, where it is known which keys somebody typed.

    The record of a run then shows what was used, and what was typed beside the preset counts, even where it equals a default.
    """
    if config.get("fedmrl.preset") != "paper":
        return config
    keys = {f"fedmrl.{name.replace('_', '-')}": value for name, value in PAPER.items()}
    return {**config, **{key: value for key, value in keys.items() if key not in typed}, "fedmrl.preset": "ours"}


class Config(Section):
    """`fedmrl.*`.

    Attributes:
        preset: `ours`, or `paper`: every setting left at its default takes the value that is neutral to the paper.
        small_model: name for `models.build` of the shared model G.
        shared_dim: d1, width of G's representation; at most the smallest d2 in the fleet.
        shared_weight, private_weight: m_G and m_F (eq. 8).
        projector_start: `random` (each node its own; the paper), `shared` (one random for all), `aligned`, `split`.
        shared_rate, private_rate, projector_rate: learning rates of G, F and P; 0 means `train.learning-rate`.
        warmup_rounds: first rounds in which only G trains, on its own representation; F and P rest. Neutral: 0.
        own_weight: weight of one more loss, of G's head on G's own representation. Neutral: 0.
        masked_loss: the shared head's losses and predictions leave out classes that no training sample of the node has
            (restricted softmax, Li and Zhan, KDD 2021), so that nodes do not unlearn each other's classes. Neutral: false.
        predict: `fine` (the private head on z: the paper's mix-large), `both` (mean of the probabilities of both heads), `all`
            (that, with the shared head on G's own representation as a third). Neutral: `fine`.
        normalize: scale both representations to a root mean square of 1. Neutral: false.
        weighting: `samples` (n_k / n, the paper's) or `uniform`.
    """

    preset: Literal["ours", "paper"] = "ours"
    small_model: str = Field("cnn5", min_length=1)
    shared_dim: int = Field(100, ge=1)
    shared_weight: NonNegative = 1.0
    private_weight: NonNegative = 1.0
    projector_start: Literal["random", "shared", "aligned", "split"] = "aligned"
    shared_rate: NonNegative = 0.0
    private_rate: NonNegative = 0.0
    projector_rate: NonNegative = 0.0
    warmup_rounds: int = Field(0, ge=0)
    own_weight: NonNegative = 1.0
    masked_loss: bool = True
    predict: Literal["fine", "both", "all"] = "all"
    normalize: bool = False
    weighting: Literal["samples", "uniform"] = "samples"

    @model_validator(mode="after")
    def _as_the_paper(self) -> Self:
        """Flower hands over every key, so a value typed that equals the default cannot be told from one not typed."""
        if self.preset != "paper":
            return self
        left = {key: value for key, value in PAPER.items() if getattr(self, key) == type(self).model_fields[key].default}
        return self.model_copy(update=left)
