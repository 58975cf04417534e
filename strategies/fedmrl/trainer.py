"""Node half of FedMRL: the node's own model F, the shared small model G, and the node's projector P between them."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

import models
from client_app.training import clip, sgd, train_epochs
from strategies.fedmrl.config import Config
from strategies.fedmrl.matryoshka import log_mean, matryoshka_loss, slices, splice, start_projector
from strategies.fedmrl.normalize import normalized
from strategies.local.trainer import build_model
from strategies.messages import Payload, Scalar, Tensors, Update
from strategies.seeds import seeded
from strategies.trainer import NodeContext, Trainer, load_exactly

_NEVER = -1e4  # an output that no softmax sees, and still finite in every dtype


class Fused(nn.Module):
    """G, F and P as one model. `forward` is the paper's mix-large: (B, *input_shape) -> (B, C).

    Attributes:
        shared: G, `SplitModel` with feature_dim d1; its tensors travel.
        private: F, the node's own `SplitModel` with feature_dim d2; never leaves.
        projector: P, Linear(d1 + d2, d2), no activation after it; never leaves.
        absent: (C,) bool, classes that the SHARED head must not answer with on this node.
    """

    absent: torch.Tensor

    def __init__(self, shared: models.SplitModel, private: models.SplitModel) -> None:
        super().__init__()
        d1, d2 = shared.feature_dim, private.feature_dim
        if d1 > d2:
            raise ValueError(f"fedmrl.shared-dim = {d1} exceeds the representation of this node's model ({d2}); set it to {d2} or less")
        self.shared, self.private = shared, private
        self.projector = nn.Linear(d1 + d2, d2)
        self.register_buffer("absent", torch.zeros(shared.num_outputs, dtype=torch.bool), persistent=False)

    def fuse(self, batch: torch.Tensor, rep_BG: torch.Tensor | None = None) -> torch.Tensor:
        """Return z = P(r_G o r_F), (B, d2): one forward of each extractor (eq. 2 to 5); `rep_BG` is r_G where it is there."""
        return self.projector(splice(self.shared.features(batch) if rep_BG is None else rep_BG, self.private.features(batch)))

    def both(self, batch: torch.Tensor, rep_BG: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of the shared head on the coarse slice and of the private head on the fine one (eq. 7)."""
        coarse, fine = slices(self.fuse(batch, rep_BG), self.shared.feature_dim)
        return self.own(coarse), self.private.classify(fine)

    def own(self, rep_BG: torch.Tensor) -> torch.Tensor:
        """Return the shared head's outputs on `rep_BG`, those of `absent` classes out of reach."""
        return self.shared.classify(rep_BG).masked_fill(self.absent, _NEVER)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.private.classify(self.fuse(batch))


class MixSmall(nn.Module):
    """The paper's mix-small: the shared head on the coarse slice of the fused representation."""

    def __init__(self, fused: Fused) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.fused.both(batch)[0]


class SmallAlone(nn.Module):
    """The paper's single-small: the shared model by itself, without its answers for `absent` classes."""

    absent: torch.Tensor

    def __init__(self, shared: models.SplitModel, absent: torch.Tensor) -> None:
        super().__init__()
        self.shared = shared
        self.register_buffer("absent", absent, persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.shared(batch).masked_fill(self.absent, _NEVER)


class MixBoth(MixSmall):
    """Both heads together: the logarithm of the mean of their probabilities."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return log_mean(*self.fused.both(batch))


class MixAll(MixSmall):
    """Both heads on the fused representation and the shared head on G's own."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        rep = self.fused.shared.features(batch)
        return log_mean(*self.fused.both(batch, rep), self.fused.own(rep))


_PREDICTORS = {"both": MixBoth, "all": MixAll}


class NodeTrainer(Trainer):
    """Trains G, F and P together; uploads G only.

    A node whose F and P have not been trained yet (warm-up, or never sampled) predicts with G alone.
    """

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self.config = cast(Config, context.config)
        private = build_model(context, context.profile.model, context.seed, "private")
        shared = build_model(context, self.config.small_model, context.settings.seed, "shared", feature_dim=self.config.shared_dim)
        start = self.config.projector_start
        if self.config.normalize:
            private, shared = normalized(private), normalized(shared)
        with seeded(context.seed if start == "random" else context.settings.seed, "projector", private.feature_dim):
            self.fused = Fused(shared, private)
        with torch.no_grad():
            weight, bias = start_projector(self.fused.projector.weight, self.fused.projector.bias, start)
            self.fused.projector.weight.copy_(weight)
            self.fused.projector.bias.copy_(bias)
        if self.config.masked_loss and context.task.kind == "classification":
            self.fused.absent.fill_(True)[context.task.train.targets.unique()] = False
        self.fused.to(context.device)
        self._warmup = False
        self._rounds = torch.zeros((), dtype=torch.int64)  # in which F and P were trained

    def describe(self) -> dict[str, Scalar]:
        fused = self.fused
        return {
            "parameters": sum(p.numel() for p in fused.private.parameters()),
            "parameters_fused": sum(p.numel() for p in fused.parameters()),
            "feature_dim": fused.private.feature_dim,
        }

    def private_state(self) -> Tensors:
        return {"rounds": self._rounds} | {n: t for n, t in self.fused.state_dict().items() if not n.startswith("shared.")}

    def load_private_state(self, state: Tensors) -> None:
        own = dict(state)
        self._rounds = own.pop("rounds")
        load_exactly(self.fused, {**{f"shared.{n}": t for n, t in self.fused.shared.state_dict().items()}, **own})

    def receive(self, payload: Payload) -> None:
        load_exactly(self.fused.shared, payload.tensors)
        self._warmup = bool(payload.settings.get("warmup", False))

    def train(self, payload: Payload, generator: torch.Generator) -> Update:
        context, config, fused = self.context, self.config, self.fused
        settings, task, warmup = context.settings.train, context.task, self._warmup
        nets = [fused.shared, fused.private, fused.projector]
        rates = [rate or settings.learning_rate for rate in (config.shared_rate, config.private_rate, config.projector_rate)]
        groups: list[dict[str, object]] = [{"params": list(n.parameters()), "lr": r} for n, r in zip(nets, rates, strict=True)]
        optimizer = sgd(groups, rate=settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay)

        def step(batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = task.loss(fused.own(fused.shared.features(batch)), targets) if warmup else self._loss(batch, targets)
            loss.backward()
            clip(nets, settings.clip_norm)
            optimizer.step()
            return loss

        stats = train_epochs(
            task, [fused], step, epochs=settings.local_epochs, batch_size=settings.batch_size, device=context.device, generator=generator
        )
        self._rounds = self._rounds + (not warmup)
        return Update(fused.shared.state_dict(), stats.samples, {"train_loss": stats.loss})

    def _loss(self, batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return equation 8's loss, and with `own-weight` that of G on its own representation."""
        config, task = self.config, self.context.task
        rep = self.fused.shared.features(batch)
        coarse, fine = self.fused.both(batch, rep)
        loss = matryoshka_loss(coarse, fine, targets, task.loss, shared_weight=config.shared_weight, private_weight=config.private_weight)
        if config.own_weight:
            loss = loss + config.own_weight * task.loss(self.fused.own(rep), targets)
        return loss

    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        self.fused.eval()
        return next(iter(self.exportable().values()))(batch)

    def exportable(self) -> dict[str, nn.Module]:
        fused = _PREDICTORS[self.config.predict](self.fused) if self.config.predict != "fine" else self.fused
        whole: dict[str, nn.Module] = {"fused": fused, "mix-small": MixSmall(self.fused), "single-large": self.fused.private}
        alone: dict[str, nn.Module] = {"single-small": SmallAlone(self.fused.shared, self.fused.absent)}
        return whole | alone if int(self._rounds) else alone | whole
