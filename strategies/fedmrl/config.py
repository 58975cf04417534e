"""Settings of FedMRL. Neutral values equal the paper's method; `projector-start` says how the projector begins."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server_app.settings import NonNegative, Section


class Config(Section):
    """`fedmrl.*`.

    Attributes:
        small_model: name for `models.build` of the shared model G.
        shared_dim: d1, width of G's representation; at most the smallest d2 in the fleet.
        shared_weight, private_weight: m_G and m_F (eq. 8).
        projector_start: `random` (each node its own), `shared` (one random for all), `aligned`, `split`.
        shared_rate, private_rate, projector_rate: learning rates of G, F and P; 0 means `train.learning-rate`.
        warmup_rounds: first rounds in which only G trains, on its own representation; F and P rest.
        own_weight: weight of one more loss, of G's head on G's own representation; 0 is the paper's.
        predict: `fine` (the private head on z: the paper's mix-large) or `both` (mean of both heads' probabilities).
        weighting: `samples` (n_k / n, the paper's) or `uniform`.
    """

    small_model: str = Field("cnn5", min_length=1)
    shared_dim: int = Field(100, ge=1)
    shared_weight: NonNegative = 1.0
    private_weight: NonNegative = 1.0
    projector_start: Literal["random", "shared", "aligned", "split"] = "aligned"
    shared_rate: NonNegative = 0.0
    private_rate: NonNegative = 0.0
    projector_rate: NonNegative = 0.0
    warmup_rounds: int = Field(0, ge=0)
    own_weight: NonNegative = 0.0
    predict: Literal["fine", "both"] = "fine"
    weighting: Literal["samples", "uniform"] = "samples"
