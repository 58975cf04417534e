"""Settings of FedMuscle. Checked before round 1; `fedmuscle.exchange` is what decides the cost of a round."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from server_app.settings import NonNegative, Positive, Section, StrList, split_list
from strategies.fedmuscle.temperatures import FixedSchedule, LinearSchedule, Schedule

Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(split_list)]


class Config(Section):
    """`fedmuscle.*`.

    Attributes:
        exchange: `step` (T exchanges a round, peers' representations), `gradient` (T exchanges a round, one gradient), `round`
            (none beside training: representations travel with the training messages and are one round old).
        objective: `muscle`, or to compare with `pairwise`, `gramian`, `simclr` (no exchange: the same steps on two views of its own),
            `none` (no exchange: local training).
        simclr_weight: of a further loss between two random views of its own, beside any objective that exchanges; 0: none.
        steps: T, optimiser steps on public batches in a round.
        peers: M, other nodes a node is aligned with at a time.
        dim: D, width of the common space.
        temperature: `linear` (tau^(N) = tau0 N) or `fixed` (tau, tau-prev; the paper's).
        tau0: of `linear`.
        tau, tau_prev: of `fixed`.
        evaluator: of the Muscle loss.
        transport: dtype of representations on their way; gradients travel as float32.
        public_source: the public set, as `data.source`; its labels are not used.
        public_items: at most so many of them, drawn by the seed; 0: all.
        public_batch: B.
        public_views: `plain` (items as they are), `random` (every node sees its own crop, mirroring and colours of an item).
        contrastive_rate: of AdamW on public batches; its state survives the round.
        projector_rate: the projector's own; 0: ten times `contrastive_rate`, for it starts at random and no head reads it.
        lora_rank: r of LoRA in the extractor's modules that `lora_modules` names; the rest of such an extractor is frozen. 0: off.
        lora_modules: names of Linears and 1x1 convolutions, whole or their last parts; a node that has none trains all of its model.
        prefixes: sizes at which the representation shall work cut short, in the head (where the model's is wide enough) and in
            the objective; none: off.
        inner_layers: train an exit after an inner layer, drawn at each local step, too, so that the model works cut in depth.
    """

    exchange: Literal["step", "gradient", "round"] = "round"
    objective: Literal["muscle", "pairwise", "gramian", "simclr", "none"] = "muscle"
    simclr_weight: NonNegative = 0.0
    steps: int = Field(16, ge=1)
    peers: int = Field(3, ge=1)
    dim: int = Field(256, ge=2)
    temperature: Literal["linear", "fixed"] = "linear"
    tau0: Positive = 0.05
    tau: Positive = 0.2
    tau_prev: Positive = 0.15
    evaluator: Literal["auto", "naive", "exact", "mean-field", "sampled"] = "auto"
    transport: Literal["float32", "float16", "int8"] = "float32"
    public_source: str = Field("embedded", min_length=1)
    public_items: int = Field(5000, ge=0)
    public_batch: int = Field(32, ge=2)
    public_views: Literal["plain", "random"] = "plain"
    contrastive_rate: Positive = 0.0003
    projector_rate: float = Field(0.0, ge=0, allow_inf_nan=False)
    lora_rank: int = Field(0, ge=0)
    lora_modules: StrList = ()
    prefixes: Sizes = ()
    inner_layers: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Refuse what would fail in mid-run."""
        self.schedule.at(self.peers)
        if self.objective == "muscle" and self.evaluator in ("exact", "naive"):
            _check_cost(self)
        if 0 < self.public_items < self.public_batch:
            raise ValueError(f"public-batch = {self.public_batch} exceeds public-items = {self.public_items}; lower the former")
        if self.objective == "gramian" and self.peers >= self.dim:
            raise ValueError(f"the gramian objective needs peers = {self.peers} below dim = {self.dim}")
        if bool(self.lora_rank) != bool(self.lora_modules):
            raise ValueError(
                f"lora-rank = {self.lora_rank}, lora-modules = {','.join(self.lora_modules)!r}: set both or neither, as 16 and 'q,v'"
            )
        if len(set(self.prefixes)) < len(self.prefixes) or max(self.prefixes, default=1) > self.dim:
            raise ValueError(f"prefixes = {','.join(map(str, self.prefixes))}: need different numbers from 1 to dim = {self.dim}")
        if self.public_views == "plain" and (self.objective == "simclr" or self.simclr_weight):
            raise ValueError("two views of one item differ only with public-views = 'random'; set it, or leave simclr out")
        if self.simclr_weight and not self.exchanges:
            raise ValueError(f"simclr-weight is for objectives that exchange, not for {self.objective}; set it to 0")
        if self.prefixes and self.objective in ("pairwise", "gramian", "simclr"):
            raise ValueError(f"prefixes are for the muscle objective, not for {self.objective}; leave them empty")
        return self

    @property
    def exchanges(self) -> bool:
        """Whether representations travel."""
        return self.objective not in ("simclr", "none")

    @property
    def rate_of_projector(self) -> float:
        """The projector's learning rate."""
        return self.projector_rate or 10.0 * self.contrastive_rate

    @property
    def schedule(self) -> Schedule:
        """The temperatures for any number of peers."""
        return LinearSchedule(self.tau0) if self.temperature == "linear" else FixedSchedule(self.tau, self.tau_prev)


def _check_cost(config: Config) -> None:
    from strategies.fedmuscle.evaluators import check_naive  # imports torch, which reading settings must not need
    from strategies.fedmuscle.exact import check_cost

    if config.evaluator == "exact":
        check_cost(config.peers, config.public_batch)
    else:
        check_naive(config.peers, config.public_batch, config.dim, itemsize=4)
