"""Server half of FedHM: cuts the full model to every node's rank, multiplies replies out, averages, cuts anew."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from logging import INFO, WARNING
from typing import cast

import torch
from flwr.common.logger import log
from torch import nn

import models
from client_app.protocol import Order
from client_app.training import channels_last, evaluate
from server_app.settings import Section, Settings
from strategies.averaging import AveragingStrategy
from strategies.engine import Journal
from strategies.fedhm.config import Config
from strategies.fedhm.decompose import Factors
from strategies.fedhm.hybrid import state_of
from strategies.fedhm.lowrank import matrix_size
from strategies.fedhm.merge import Merger, Stack, squared_distance
from strategies.fedhm.norms import calibrated, with_norm
from strategies.fedhm.plan import Part, extract, needed_ranks
from strategies.fedhm.rank_metrics import effective_rank, energy_beyond
from strategies.fedhm.spectral import Decomposer, Layer
from strategies.fedhm.tiers import Tier, drawn_ratio
from strategies.fedhm.weighting import shares
from strategies.fleet import FleetError, Node
from strategies.messages import Payload, Tensors, Update
from strategies.seeds import seeded

_EVAL_BATCH = 256


class Strategy(AveragingStrategy):
    """W <- sum_p alpha_p U_p V_p^T, then one decomposition of each layer at the fleet's largest rank; every tier is a prefix.

    Attributes:
        theta: the full model's tensors.
        ratios: all rank ratios met in this run: what ranks are needed must not change when a node misses a round.
    """

    def __init__(self, settings: Settings, config: Section, order: Order, journal: Journal) -> None:
        super().__init__(settings, config, order, journal)
        method = self.method
        # The nodes are idle while layers are decomposed, so that all cores may be used; the bits don't depend on how many.
        self._decomposer = Decomposer(method.svd, tolerance=method.tolerance, floor=method.floor, workers=os.cpu_count() or 1)
        self.ratios: set[float] = set()
        self._tiers: dict[float, Tier] = {}
        self._plans: dict[float, dict[str, Part]] = {}
        self._factors: dict[str, Factors] = {}
        self._payloads: dict[float, Payload] = {}
        self._round = 0

    @property
    def method(self) -> Config:
        """The method's settings."""
        return cast(Config, self.config)

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> models.SplitModel:
        model = models.build(self.method.model, input_shape=input_shape, num_outputs=num_outputs)
        with_norm(model, self.method.batch_norm)
        return model

    def prepare(self, nodes: list[Node]) -> None:
        """Build the full model once, leave out nodes whose ranks differ from the server's, decompose for new ranks."""
        self.build_for(nodes)
        for node in filter(self.fits, list(nodes)):
            tier = self.tier(float(node.facts["rank_ratio"]))
            if node.facts.get("ranks") == tier.table:
                self.ratios.add(tier.ratio)
            else:
                self.exclude(
                    node,
                    f"its ranks of {self.method.model} at ratio {tier.ratio:g} ({node.facts.get('ranks')}) are not the server's "
                    f"({tier.table}); use the same versions of torch and of the model on both",
                )
        if self.method.rank_ratio == "dynamic":
            self.ratios |= set(self.settings.fleet.rank_ratios)
        if any(name not in self._factors or self._factors[name].rank < ranks[0] for name, (ranks, _) in self._needed().items()):
            self._decompose({})

    def build_for(self, nodes: list[Node]) -> None:
        """Build the full model for what `nodes` learn, or take it from the checkpoint, once."""
        shape, outputs = self.one_task(nodes)
        if not hasattr(self, "theta"):
            with seeded(self.settings.seed, "shared"):
                self.model = self.build(shape, outputs)
            self.theta = {name: tensor.clone() for name, tensor in state_of(self.model).items()}
            if self._restored is not None:
                self._take(self._restored)

    def tier(self, ratio: float) -> Tier:
        """Return the full model's tier at `ratio`; a new one is listed in the log."""
        if ratio not in self._tiers:
            self._tiers[ratio] = tier = Tier.of(self.model, ratio, self.method)
            self._plans[ratio] = tier.plan(self.model, self.theta)
            log(INFO, "%s at rank ratio %g:\n%s", self.method.model, ratio, "\n".join(f"  {choice}" for choice in tier.choices))
            if ratio < 1 and not tier.ranks:
                log(WARNING, "at rank ratio %g no layer of %s is cut (fedhm.rho = %d)", ratio, self.method.model, self.method.rho)
        return self._tiers[ratio]

    def ratio_of(self, node: Node) -> float:
        """Return the node's rank ratio in the current round."""
        if self._round <= self.method.warmup_rounds:
            return 1.0
        if self.method.rank_ratio == "dynamic":
            return drawn_ratio(self.settings.fleet.rank_ratios, self.settings.seed, node.name, self._round)
        return float(node.facts["rank_ratio"])

    def begin_round(self, server_round: int, nodes: list[Node]) -> None:
        self._round = server_round
        method, ratios = self.method, [self.ratio_of(node) for node in nodes]
        # The server's own model may take part as one more full node; see `end_round`.
        alphas = shares([*ratios, 1.0], scheme=method.weighting, temperature=method.temperature)
        self._alphas = {node.name: alpha for node, alpha in zip(nodes, alphas[:-1], strict=True)}
        self._own_alpha = alphas[-1]
        counts = [max(1, int(node.facts.get("num_train", 1))) if method.times_samples else 1 for node in nodes]
        expected = math.fsum(a * n for a, n in zip(alphas, [*counts, sum(counts) / len(counts)], strict=True))
        self._merger = Merger(self.theta, keep=method.kept(server_round), sent=self._received(), scale=expected)
        self._counted: list[tuple[float, int]] = []

    def payload_for(self, node: Node) -> Payload:
        ratio = self.ratio_of(node)
        if ratio not in self._payloads:
            tier = self.tier(ratio)
            tensors = extract(self.theta, self._plans[ratio], self._factors)
            self._payloads[ratio] = Payload(tensors, {"rank_ratio": ratio, "ranks": tier.table})
        return self._payloads[ratio]

    def fold(self, node: Node, update: Update) -> None:
        ratio, count = self.ratio_of(node), update.num_examples if self.method.times_samples else 1
        self._merger.fold(update.tensors, self._plans[ratio], self._alphas[node.name] * count, key=node.name)
        self._counted.append((ratio, count))

    def end_round(self) -> dict[str, float]:
        if self.method.missing_largest == "history" and max(ratio for ratio, _ in self._counted) < max(self.ratios):
            own = {name: tensor for name, tensor in self.theta.items() if tensor.is_floating_point()}
            mean = sum(count for _, count in self._counted) / len(self._counted)
            self._merger.fold(own, Tier(1.0, []).plan(self.model, self.theta), self._own_alpha * mean)
        merged = self._merger.result()
        del self._merger  # it holds the old model
        moved = sum(squared_distance(merged.state[n], t) for n, t in self.theta.items() if t.is_floating_point())
        self.theta, self._payloads = merged.state, {}
        started = time.perf_counter()
        self._decompose(merged.stacks)
        return {"shared_change": moved**0.5, "seconds_decompose": time.perf_counter() - started, **self._rank_numbers()}

    def evaluate_shared(self) -> dict[str, float]:
        """Return the full model's metrics on the common test set, and as `<metric>_<ratio>` those of its truncation to each tier."""
        task = self.common_test()
        if task is None:
            return {}
        found: dict[str, float] = {}
        for ratio in [1.0, *sorted(self.ratios - {1.0}, reverse=True)]:
            cut = self.cut(ratio)
            if self.method.batch_norm == "recalibrate":
                cut = calibrated(cut, task.test.inputs, lambda raw: channels_last(task.prepare(raw, False, None)))
            metrics = evaluate(task, cut.eval(), task.test, batch_size=_EVAL_BATCH, device=torch.device("cpu"))
            found |= {name if ratio == 1 else f"{name}_{ratio:g}": value for name, value in metrics.items()}
        return found

    def cut(self, ratio: float) -> nn.Module:
        """Return a copy of the newest full model cut to `ratio`, one that this run has met or 1."""
        tier = self.tier(ratio)
        return tier.hybrid(self.model, extract(self.theta, self._plans[ratio], self._factors)).to(memory_format=torch.channels_last)

    def shared_tensors(self) -> Tensors:
        """Return the full model, named as `state_of` names it."""
        return dict(self.theta)

    def state_dict(self) -> Tensors:
        """Return the full model, the factors made of it, the bases of the next decomposition, the ratios met.

        Factors are kept and not made anew: the ones made from stacked replies could not be.
        """
        state = {f"full/{name}": tensor for name, tensor in self.theta.items()}
        for name, factors in self._factors.items():
            parts = {
                "ut": factors.ut,
                "vt": factors.vt,
                "sigma": factors.sigma,
                "energy": torch.tensor(factors.energy, dtype=torch.float64),
            }
            state |= {f"{part}/{name}": tensor for part, tensor in parts.items()}
        state |= {f"basis/{key}": basis for key, basis in self._decomposer.state_dict().items()}
        return {**state, "ratios": torch.tensor(sorted(self.ratios), dtype=torch.float64)}

    def _take(self, state: Tensors) -> None:
        parts: dict[str, Tensors] = {part: {} for part in ("full", "ut", "vt", "sigma", "energy", "basis", "ratios")}
        for key, tensor in state.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = tensor
        full = parts["full"]
        wrong = sorted(
            n for n in self.theta.keys() | full.keys() if n not in full or n not in self.theta or full[n].shape != self.theta[n].shape
        )
        if wrong:
            raise FleetError(
                f"the checkpoint's full model does not fit this run's: {', '.join(wrong[:6])}; resume with the settings of the first run"
            )
        self.theta = full
        self._factors = {
            name: Factors(ut, parts["vt"][name], parts["sigma"][name], float(parts["energy"][name])) for name, ut in parts["ut"].items()
        }
        self._decomposer.load_state_dict(parts["basis"])
        self.ratios = set(parts["ratios"][""].tolist())
        for ratio in self.ratios:
            self.tier(ratio)

    def _needed(self) -> dict[str, tuple[tuple[int, ...], int]]:
        return needed_ranks(self._plans[self.tier(ratio).ratio] for ratio in sorted(self.ratios))

    def _decompose(self, stacks: dict[str, Stack]) -> None:
        self._factors = self._decomposer(
            {name: Layer(self.theta[name], ranks, groups, stacks.get(name)) for name, (ranks, groups) in self._needed().items()}
        )
        self._payloads = {}

    def _received(self) -> dict[str, Factors]:
        """Return the factors as nodes get them: rounded to the model's dtype, then to the transport's where that is narrower."""
        if not self.method.kept(self._round):
            return {}
        wire = getattr(torch, self.settings.transport.dtype)

        def rounded(tensor: torch.Tensor, own: torch.dtype) -> torch.Tensor:
            narrow = wire if torch.finfo(own).bits > torch.finfo(wire).bits else own
            return tensor.to(own).to(narrow).to(own)

        return {
            name: replace(f, ut=rounded(f.ut, self.theta[name].dtype), vt=rounded(f.vt, self.theta[name].dtype))
            for name, f in self._factors.items()
        }

    def _rank_numbers(self) -> dict[str, float]:
        """Return each layer's effective rank and its share of energy beyond each tier's rank, and their means over the layers."""
        numbers: dict[str, float] = {}
        listed: dict[str, list[float]] = {}
        groups = {name: count for name, (_, count) in self._needed().items()}
        for name, factors in self._factors.items():
            layer = name.removesuffix(".weight")
            found = {"effective_rank": effective_rank(factors, min(matrix_size(tuple(self.theta[name].shape), groups[name])))}
            for ratio in sorted(self.ratios):
                if rank := self.tier(ratio).ranks.get(layer):
                    found[f"energy_beyond_{ratio:g}"] = energy_beyond(factors, [rank])[rank]
            for key, value in found.items():
                numbers[f"{key}/{layer}"] = value
                listed.setdefault(key, []).append(value)
        return {key: sum(values) / len(values) for key, values in listed.items()} | numbers
