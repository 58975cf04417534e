"""Node half of FedHM: the full model cut to this node's rank, trained as factors; nothing private."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import nn

from client_app.training import channels_last, clip, sgd, train_epochs
from strategies.fedhm.budget import largest_affordable
from strategies.fedhm.config import Config
from strategies.fedhm.hybrid import factor_parameters, factored_layers, frobenius_penalty, state_of
from strategies.fedhm.lowrank import recompose
from strategies.fedhm.norms import SAMPLES, calibrated, explained, with_norm
from strategies.fedhm.tiers import Tier, travelling_bytes
from strategies.local.trainer import build_model
from strategies.messages import Payload, Scalar, Tensors, Update
from strategies.trainer import NodeContext, Trainer


class NodeTrainer(Trainer):
    """Builds the hybrid from names and ranks alone, trains it as received with a fresh optimiser.

    Attributes:
        full: the full model, from which hybrids are cut; its weights are the run's random start.
        model: what was received last: the hybrid at this round's ratio.
        cut: whether any of its layers is low-rank.
    """

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self.config = cast(Config, context.config)
        self.full = with_norm(build_model(context, self.config.model, context.settings.seed, "shared"), self.config.batch_norm)
        self.model: nn.Module = self.full
        self.ratio = 1.0
        self.cut = False
        self._evaluated: nn.Module | None = None

    @property
    def model_name(self) -> str:
        if self.config.rank_ratio == "dynamic":
            return self.config.model
        whole = " (nothing cut)" if self.ratio < 1 and not self.cut else ""
        return f"{self.config.model} at {self.ratio:g}{whole}"

    def architecture(self, name: str) -> str:
        return f"{self.model_name}, factors multiplied out" if name == "dense" and self.cut else self.model_name

    def describe(self) -> dict[str, Scalar]:
        ratio = self.context.profile.rank_ratio
        if self.config.rank_ratio == "auto":
            ratio = largest_affordable(self.full, self.context)
        tier = Tier.of(self.full, ratio, self.config)
        hybrid = tier.hybrid(self.full)
        self.ratio, self.cut = ratio, bool(tier.ranks)
        uncut = f"at rank ratio {ratio:g} no layer of {self.config.model} is cut (fedhm.rho = {self.config.rho}): its nodes hold all of it"
        return {
            **({"warning": uncut} if ratio < 1 and not self.cut else {}),
            "model": self.model_name,
            "rank_ratio": ratio,
            "ranks": tier.table,
            "low_rank_layers": len(tier.ranks),
            "parameters": sum(p.numel() for p in hybrid.parameters()),
            "bytes": travelling_bytes(hybrid),
        }

    def private_state(self) -> Tensors:
        return {}

    def load_private_state(self, state: Tensors) -> None:
        """There is none."""

    def receive(self, payload: Payload) -> None:
        ratio, table = float(payload.settings["rank_ratio"]), str(payload.settings["ranks"])
        tier = Tier.of(self.full, ratio, self.config)
        if tier.table != table:
            raise ValueError(
                f"node {self.context.profile.node_name}: the ranks of {self.config.model} at ratio {ratio:g} are not the server's "
                f"({tier.table} here, {table} there); use the same versions of torch and of the model on both"
            )
        self.model = tier.hybrid(self.full, payload.tensors).to(memory_format=torch.channels_last)
        self.ratio, self.cut, self._evaluated = ratio, bool(tier.ranks), None

    def train(self, payload: Payload, generator: torch.Generator) -> Update:
        settings, task, model = self.context.settings.train, self.context.task, self.model
        decay = self.config.frobenius_decay
        optimizer = sgd(
            self._groups(settings.weight_decay),
            rate=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        absent = self._absent_classes()

        def step(batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            outputs = model(batch)
            loss = task.loss(outputs if absent is None else outputs.masked_fill(absent, 0.0), targets)
            (loss + 0.5 * decay * frobenius_penalty(model) if decay else loss).backward()
            clip([model], settings.clip_norm)
            optimizer.step()
            return loss

        self._evaluated = None
        with explained(self.config.batch_norm):
            stats = train_epochs(
                task,
                [model],
                step,
                epochs=settings.local_epochs,
                batch_size=settings.batch_size,
                device=self.context.device,
                generator=generator,
            )
        tensors = {name: tensor for name, tensor in state_of(model).items() if tensor.is_floating_point()}
        return Update(tensors, stats.samples, {"train_loss": stats.loss, "rank_ratio": self.ratio})

    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        if self._evaluated is None:
            self._evaluated = self._measured() if self.config.batch_norm == "recalibrate" else self.model
        self._evaluated.eval()
        with explained(self.config.batch_norm):
            return self._evaluated(batch)

    def exportable(self) -> dict[str, nn.Module]:
        """`model` is what the node uses; `dense` the same with each pair of factors multiplied out."""
        model = self._measured()
        return {"model": model, "dense": dense_copy(model)}

    def _groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return parameter groups in which exactly one decay acts on the factors."""
        factors = factor_parameters(self.model)
        known = {id(p) for p in factors}
        others = [p for p in self.model.parameters() if id(p) not in known]
        own = 0.0 if self.config.frobenius_decay else weight_decay
        return [{"params": others}, *([{"params": factors, "weight_decay": own}] if factors else [])]

    def _absent_classes(self) -> torch.Tensor | None:
        """Return a mask (C,) of the classes that no training sample has, or None where the loss is not masked."""
        task = self.context.task
        if not self.config.masked_loss:
            return None
        if task.kind != "classification":
            raise ValueError(f"fedhm.masked-loss is for classification, this node learns {task.kind}; set it to false")
        absent = torch.ones(task.num_outputs, dtype=torch.bool)
        absent[task.train.targets.unique()] = False
        return absent.to(self.context.device)

    def _measured(self) -> nn.Module:
        task, device = self.context.task, self.context.device
        return calibrated(self.model, task.train.inputs[:SAMPLES], lambda raw: channels_last(task.prepare(raw.to(device), False, None)))


def dense_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a hybrid with one layer for each pair of factors, for what cannot use thin layers."""
    merged = copy.deepcopy(model)
    for name, layer in factored_layers(merged).items():
        merged.set_submodule(name, recompose(layer))
    return merged
