"""Node half of FedMuscle: the node's own model on its own task, and its representations among its peers'."""

from __future__ import annotations

from copy import deepcopy
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from client_app.training import TrainStats, channels_last
from models import SplitModel
from strategies.fedmuscle.adam import Adam
from strategies.fedmuscle.config import Config
from strategies.fedmuscle.depth import Exits
from strategies.fedmuscle.elastic import elastic_loss, layer_weight, mrl_e_outputs, nested_head_loss, sample_cut
from strategies.fedmuscle.exchange import Batches, alignment_loss, checked_gradient, pack, unit_rows
from strategies.fedmuscle.lora import add_lora, folded
from strategies.fedmuscle.loss import attach
from strategies.fedmuscle.objectives import simclr_loss
from strategies.fedmuscle.public import public_indices
from strategies.fedmuscle.transport import normalise
from strategies.fedmuscle.truncate import truncated
from strategies.fedmuscle.views import random_view
from strategies.local import trainer as local
from strategies.messages import Payload, Scalar, Tensors, Update
from strategies.seeds import generator as generator_of
from strategies.seeds import seeded
from strategies.trainer import NodeContext, load_exactly
from tasks.public import PublicSet, load_public


class NodeTrainer(local.NodeTrainer):
    """Phase (a): local training of the whole model. Phase (b): steps on public batches of extractor and projector only.

    Phase (b) leaves the head behind, so evaluation and export use the model as it was after (a). With `exchange = round`,
    (b) against last round's peers comes before (a), and that is the model itself; with the others, (b) comes after (a) and a
    copy is kept. A round's evaluation has seen the same phases either way.

    Attributes:
        model: the node's own.
        projector: Linear(feature_dim, D): representation -> common space; the head does not read it.
        evaluated: what `predict` uses.
        adam: of phase (b).
    """

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self.config = cast(Config, context.config)
        with seeded(context.seed, "projector"):
            self.projector = nn.Linear(self.model.feature_dim, self.config.dim).to(context.device)
        self._extend()
        self.evaluated = self.model if self.config.exchange == "round" else deepcopy(self.model)
        named = [*self.model.extractor.named_parameters(prefix="extractor"), *self.projector.named_parameters(prefix="projector")]
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        decay, rates = context.settings.train.weight_decay, {"projector": self.config.rate_of_projector}
        self.adam = Adam(named, rate=self.config.contrastive_rate, weight_decay=decay, rates=rates)
        self._public: PublicSet | None = None

    @property
    def public(self) -> PublicSet:
        """The public set in this node's input shape; read at first use."""
        if self._public is None:
            settings, config = self.context.settings, self.config
            shape = self.context.task.input_shape
            found = load_public(config.public_source, settings.data, items=config.public_items, seed=settings.seed, input_shape=shape)
            if len(found) < config.public_batch:
                raise ValueError(
                    f"node {self.context.profile.node_name}: the public set {found.name!r} has {len(found)} items, "
                    f"fedmuscle.public-batch = {config.public_batch}"
                )
            self._public = found
        return self._public

    def describe(self) -> dict[str, Scalar]:
        facts: dict[str, Scalar] = {**super().describe(), "feature_dim": self.model.feature_dim, "lora_modules": self._adapted}
        if self.config.objective == "none":
            return facts
        public = self.public
        if self.config.public_views == "random" and len(public.input_shape) != 3:
            raise ValueError(
                f"fedmuscle.public-views = 'random' is for pictures, the public set {public.name!r} has samples of shape "
                f"{public.input_shape}; set it to 'plain' (which leaves out simclr)"
            )
        return {**facts, "public_manifest": public.manifest, "public_items": len(public)}

    def private_state(self) -> Tensors:
        parts = {"model": self.model, "projector": self.projector}
        parts |= {} if self.evaluated is self.model else {"evaluated": self.evaluated}
        state = {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}
        return {**state, **{f"adam.{name}": tensor for name, tensor in self.adam.state().items()}}

    def load_private_state(self, state: Tensors) -> None:
        load_exactly(self.model, _below("model", state))
        load_exactly(self.projector, _below("projector", state))
        if self.evaluated is not self.model:
            load_exactly(self.evaluated, _below("evaluated", state))
        self.adam.load(_below("adam", state))

    def fit(self, generator: torch.Generator) -> TrainStats:
        # Of its own, so that the order of the samples is that of a run without inner layers.
        self._cuts = generator_of(generator.initial_seed(), "cuts")
        return super().fit(generator)

    def loss(self, batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._exits is not None:
            return self._loss_of_a_cut(self._exits, batch, targets)
        if not self.config.prefixes:
            return super().loss(batch, targets)
        head = cast(nn.Linear, self.model.head)
        bias = torch.zeros_like(head.weight[:, 0]) if head.bias is None else head.bias
        outputs = mrl_e_outputs(self.model.features(batch), head.weight, bias, self._head_sizes())
        return nested_head_loss(outputs, targets, self.context.task.loss) / len(outputs)  # a mean, as train.learning-rate is for one loss

    def train(self, payload: Payload, generator: torch.Generator) -> Update:
        now = int(payload.settings["now"])
        metrics = self._catch_up(payload, generator) if payload.parts else {}
        if self.config.objective == "simclr" and now > 1:  # as often as nodes that exchange
            metrics = self._contrast_views(now - 1)
        stats = self.fit(generator)
        if self.evaluated is not self.model:
            load_exactly(self.evaluated, self.model.state_dict())
        upload = self._upload(now) if self.config.exchanges else {}
        return Update(upload, stats.samples, {"train_loss": stats.loss, **metrics})

    def exchange(self, payload: Payload, generator: torch.Generator) -> Update:
        batches = self._batches(payload)
        (index_B,) = batches.indices
        rep_BD = self._represent(index_B, batches.server_round, batches.step)
        if self.config.exchange == "gradient":
            gradient_BD = checked_gradient(payload, (len(index_B), self.config.dim)).to(rep_BD.device)
            loss = attach(rep_BD, torch.tensor(float(payload.settings["loss"]), device=rep_BD.device), gradient_BD)
            met = int(payload.settings["peers"])
        else:
            peers = [rows_SBD[0] for rows_SBD in self._peers(payload, batches)]
            loss, met = alignment_loss(self.config, rep_BD, peers, generator), len(peers)
        self.adam.step(self._with_simclr(loss, rep_BD, index_B, batches.server_round, batches.step))
        following = batches.step + 1
        upload = self._upload(batches.server_round, following) if following < self.config.steps else {}
        return Update(upload, len(index_B), {"contrastive_loss": float(loss.detach()), "peers": float(met)})

    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        self.evaluated.eval()
        return self.evaluated(batch)

    def exportable(self) -> dict[str, nn.Module]:
        """Return the model, and cut: `dims-k` to prefixes of the representation, `layers-n` to first layers, and to both."""
        whole = self._without_extras()
        found: dict[str, nn.Module] = {"model": whole}
        found |= {f"dims-{k}": truncated(whole, k) for k in self._narrower()}
        if self._exits is not None:
            for layer in range(self._exits.num_layers - 1, 0, -1):
                cut = cast(Exits, self.evaluated.exits).cut(whole, layer)
                found[f"layers-{layer}"] = cut
                found |= {f"layers-{layer}-dims-{k}": truncated(cut, k) for k in self._narrower()}
        return found

    @property
    def _exits(self) -> Exits | None:
        return cast(Exits, self.model.exits) if self.config.inner_layers else None

    def _extend(self) -> None:
        """Give the model what the settings ask for: LoRA factors, and exits, which are trained and kept with it."""
        config, context = self.config, self.context
        if (config.prefixes or config.inner_layers) and not isinstance(self.model.head, nn.Linear):
            raise ValueError(
                f"fedmuscle.prefixes and inner-layers cut a Linear head, model {context.profile.model!r} ends in {type(self.model.head)}"
            )
        with seeded(context.seed, "extras"):
            self._adapted = add_lora(self.model, config.lora_rank, config.lora_modules) if config.lora_rank else 0
            if config.inner_layers:
                self.model.add_module("exits", Exits(self.model))

    def _without_extras(self) -> SplitModel:
        if not self._adapted and self._exits is None:
            return self.evaluated
        whole = folded(self.evaluated)
        if self._exits is not None:
            del whole.exits
        return whole

    def _loss_of_a_cut(self, exits: Exits, batch: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        head = cast(nn.Linear, self.model.head)
        layer, size = sample_cut(exits.num_layers, self._narrower() or [self.model.feature_dim], self._cuts)
        inner_BD, last_BD = exits(self.model, layer + 1, batch)

        def scored(rep: torch.Tensor) -> torch.Tensor:
            return self.context.task.loss(F.linear(rep, head.weight[:, : rep.shape[1]], head.bias), targets)

        weight = layer_weight(layer, exits.num_layers)
        total = elastic_loss(inner_BD, last_BD, size, scored, inner_weight=weight)
        return total / ((1.0 + weight) * (2 if size < self.model.feature_dim else 1))  # a mean, as above

    def _narrower(self) -> list[int]:
        return [k for k in self._head_sizes() if k < self.model.feature_dim]

    def _head_sizes(self) -> list[int]:
        width = self.model.feature_dim
        return sorted({*(k for k in self.config.prefixes if k < width), width})

    def _catch_up(self, payload: Payload, generator: torch.Generator) -> dict[str, float]:
        """Take the T steps of phase (b) on the last round's public batches; return what they were."""
        batches = self._batches(payload)
        peers = self._peers(payload, batches)
        losses = []
        for step, index_B in enumerate(batches.indices):
            anchor_BD = self._represent(index_B, batches.server_round, step)
            loss = alignment_loss(self.config, anchor_BD, [rows_SBD[step] for rows_SBD in peers], generator)
            self.adam.step(self._with_simclr(loss, anchor_BD, index_B, batches.server_round, step))
            losses.append(float(loss.detach()))
        return {"contrastive_loss": sum(losses) / len(losses), "peers": float(len(peers))}

    def _contrast_views(self, server_round: int) -> dict[str, float]:
        """Take T steps on two views of its own; return what they were."""
        losses = []
        seed, size = self.context.settings.seed, self.config.public_batch
        for step in range(self.config.steps):
            index_B = public_indices(seed, server_round, step, num_items=len(self.public), batch_size=size)
            loss = self._simclr(self._represent(index_B, server_round, step), index_B, server_round, step)
            self.adam.step(loss)
            losses.append(float(loss.detach()))
        return {"contrastive_loss": sum(losses) / len(losses), "peers": 0.0}

    def _with_simclr(self, loss: torch.Tensor, rep_BD: torch.Tensor, index_B: torch.Tensor, server_round: int, step: int) -> torch.Tensor:
        weight = self.config.simclr_weight
        return loss + weight * self._simclr(rep_BD, index_B, server_round, step) if weight else loss

    def _simclr(self, rep_BD: torch.Tensor, index_B: torch.Tensor, server_round: int, step: int) -> torch.Tensor:
        second_BD = self._represent(index_B, server_round, step, "second view")
        return simclr_loss(rep_BD, second_BD, self.config.schedule.at(1).tau)

    def _represent(self, index_B: torch.Tensor, server_round: int, step: int, view: str = "view") -> torch.Tensor:
        """Return unit rows (B, D) of public items, of the view that this node has of them at that step, or of another one.

        In evaluation mode: public items must not move running statistics, and the anchor must be what was uploaded.
        """
        self.model.eval()
        raw = self.public.batch(index_B)
        if self.config.public_views == "random":
            node, seed = self.context.profile.node_name, self.context.settings.seed
            raw = random_view(raw, generator_of(seed, node, server_round, step, view))
        raw = raw.to(self.context.device)
        features = self.model.features(channels_last(self.context.task.prepare(raw, False, None)))
        return normalise(self.projector(features.to(self.projector.weight.dtype)))[0]

    @torch.no_grad()
    def _upload(self, server_round: int, step: int = 0) -> Tensors:
        batches = self._at(server_round, step)
        rows = [self._represent(index_B, server_round, step + s) for s, index_B in enumerate(batches.indices)]
        return pack(torch.stack(rows), batches, self.config.transport)

    def _peers(self, payload: Payload, batches: Batches) -> list[torch.Tensor]:
        found = []
        for name, tensors in sorted(payload.parts.items()):
            if tensors.keys() != {"rows"}:
                raise ValueError(f"the server sent {sorted(tensors)} as {name}, expected rows")
            found.append(unit_rows(tensors["rows"], batches, width=self.config.dim, sender=name).to(self.context.device))
        return found

    def _batches(self, payload: Payload) -> Batches:
        """Return the batches that `payload` is about; raises ValueError where this node has other items in them."""
        said = payload.settings
        batches = self._at(int(said["round"]), int(said["step"]))
        if batches.digest != said["digest"]:
            raise ValueError(
                f"node {self.context.profile.node_name}: the public items of round {said['round']}, step {said['step']} are not those of "
                f"the server; is the public set {self.public.name!r} the same on all nodes?"
            )
        return batches

    def _at(self, server_round: int, step: int) -> Batches:
        seed, public = self.context.settings.seed, self.public
        return Batches.of(self.config, seed, public.manifest, len(public), server_round, step)


def _below(prefix: str, state: Tensors) -> Tensors:
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in state.items() if name.startswith(f"{prefix}.")}
