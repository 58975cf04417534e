"""Server half shared by the methods that average one set of tensors: FedAvg all of the model, FedMRL the small one."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter

import models
import tasks
from strategies.aggregation import WeightedMean
from strategies.engine import HeteroStrategy
from strategies.fleet import FleetError, Node
from strategies.messages import Payload, Scalar, Tensors, Update
from strategies.seeds import seeded
from tasks import Task


class AveragingStrategy(HeteroStrategy):
    """theta <- sum_k w_k theta_k / sum_k w_k over the nodes that replied, w_k = n_k or 1."""

    uniform = False

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> models.SplitModel:
        """Return the shared model; its tensors are what travels."""

    def prepare(self, nodes: list[Node]) -> None:
        shape, outputs = self.one_task(nodes)
        if hasattr(self, "theta"):
            return
        with seeded(self.settings.seed, "shared"):
            self.model = self.build(shape, outputs)
        self.theta: Tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        if self._restored is not None:
            self._take(self._restored)

    _restored: Tensors | None = None

    def common_test(self) -> Task | None:
        """Return the task that holds the common test set, or None where it is not of what these nodes learn."""
        if any(node.facts.get("own_data") for node in self._here) and self.settings.data.source == "embedded":
            return None  # nodes read their own pictures; the default source is none of theirs
        task = tasks.load_shared_test(self.settings)
        if task is None or (task.input_shape, task.num_outputs) != (self.model.input_shape, self.model.num_outputs):
            return None
        return task

    def begin_round(self, server_round: int, nodes: list[Node]) -> None:
        expected = sum(max(1, int(node.facts.get("num_train", 1))) for node in nodes)
        self._server_round = server_round
        self._mean = WeightedMean(self.theta, scale=float(len(nodes) if self.uniform else expected))
        self._payload = Payload(self.theta, self.settings_of_round(server_round))

    def settings_of_round(self, server_round: int) -> dict[str, Scalar]:
        """Return what the nodes are told beside theta."""
        return {}

    def payload_for(self, node: Node) -> Payload:
        if self._payload.tensors is not self.theta:
            self._payload = Payload(self.theta, self.settings_of_round(self._server_round))
        return self._payload

    def fold(self, node: Node, update: Update) -> None:
        self._mean.add(update.tensors, 1.0 if self.uniform else float(update.num_examples))

    def end_round(self) -> dict[str, float]:
        old, self.theta = self.theta, self._mean.result()
        moved = sum(float((self.theta[n].double() - t.double()).square().sum()) for n, t in old.items() if t.is_floating_point())
        return {"shared_change": moved**0.5}

    def state_dict(self) -> Tensors:
        return dict(self.theta)

    def load_state_dict(self, state: Tensors) -> None:
        self._restored = state

    def _take(self, state: Tensors) -> None:
        wrong = sorted(
            {n for n in self.theta.keys() | state.keys() if n not in state or n not in self.theta}
            | {n for n in self.theta.keys() & state.keys() if self.theta[n].shape != state[n].shape}
        )
        if wrong:
            raise FleetError(
                f"the checkpoint's shared part does not fit this run's model: {', '.join(wrong[:6])}"
                "; resume with the settings of the first run"
            )
        self.theta = dict(state)

    def one_task(self, nodes: list[Node]) -> tuple[tuple[int, ...], int]:
        """Return the input shape and the number of classes that the shared model is for; other nodes are excluded by name.

        What is shared has one head, so all need one input shape and the same classes: those of the first round's most
        nodes (of the first by name where two are equally many), and the same from then on.
        """
        kinds = {
            node.name: (str(node.facts["input_shape"]), int(node.facts["num_outputs"]), str(node.facts["class_names"])) for node in nodes
        }
        if self._kind is None:
            counts = Counter(kinds.values())
            self._kind = min(kinds.items(), key=lambda item: (-counts[item[1]], item[0]))[1]
        shape, outputs, names = self._kind
        for node in nodes:
            if not self.fits(node):
                own_shape, own_outputs, own_names = _kind_of(node)
                self.exclude(
                    node,
                    f"node {node.name!r} has input {own_shape} and {own_outputs} classes ({own_names[:120] or 'no names'}), the federation "
                    f"learns input {shape} and {outputs} classes ({names[:120] or 'no names'}): they share one model and need the same; "
                    "see data.num-classes, data.image-size and data.image-channels",
                )
        return tuple(int(part) for part in shape.split(",")), outputs

    def fits(self, node: Node) -> bool:
        """Return whether `node` learns what the shared model is for."""
        return _kind_of(node) == self._kind

    _kind: tuple[str, int, str] | None = None


def _kind_of(node: Node) -> tuple[str, int, str]:
    """Return input shape, number of classes and their names as the node described them."""
    return str(node.facts["input_shape"]), int(node.facts["num_outputs"]), str(node.facts["class_names"])
