"""FedMRL as one would first write it in PyTorch: the named reference of the speed benchmarks.

The same work as ours: ten nodes with CNN-1..5 and the small model, one forward of each extractor a batch, both
losses, one backward, SGD with momentum and weight decay, the small models averaged, every node evaluated on its own
test split. Default memory layout, default optimiser, one process, one thread, nothing written to disk.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tasks import Task

_SIZES = {"cnn1": (32, 2000), "cnn2": (16, 2000), "cnn3": (32, 1000), "cnn4": (32, 800), "cnn5": (32, 500)}


class PlainCNN(nn.Module):
    """The paper's CNN-k for 32x32 pictures; `width` of the representation."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        filters, hidden = _SIZES[name]
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 5), nn.Conv2d(16, filters, 5)
        self.fc1, self.fc2 = nn.Linear(25 * filters, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return functional.relu(self.fc2(functional.relu(self.fc1(x.flatten(1)))))


class PlainFederation:
    """All nodes of one federation in one process.

    Args:
        tasks: one a node, with 3x32x32 uint8 pictures and ten classes.
        batch_size, rate, momentum, decay: of the local SGD.
    """

    def __init__(self, tasks: list[Task], batch_size: int, rate: float, momentum: float, decay: float) -> None:
        torch.manual_seed(0)
        self.tasks, self.batch_size, self.options = tasks, batch_size, {"lr": rate, "momentum": momentum, "weight_decay": decay}
        self.private = [PlainCNN(f"cnn{i % 5 + 1}", 500) for i in range(len(tasks))]
        self.projectors = [nn.Linear(600, 500) for _ in tasks]
        self.small = PlainCNN("cnn5", 100)
        self.shared = {k: v.clone() for k, v in self.small.state_dict().items()}

    def round(self) -> float:
        """Train every node once, average, evaluate; return the mean accuracy."""
        received = []
        for task, private, projector in zip(self.tasks, self.private, self.projectors, strict=True):
            self.small.load_state_dict(self.shared)
            self._train(task, private, projector)
            received.append((len(task.train), {k: v.clone() for k, v in self.small.state_dict().items()}))
        total = sum(n for n, _ in received)
        self.shared = {k: sum(n * sd[k] for n, sd in received) / total for k in self.shared}
        self.small.load_state_dict(self.shared)
        return sum(map(self._test, self.tasks, self.private, self.projectors)) / len(self.tasks)

    def _train(self, task: Task, private: PlainCNN, projector: nn.Linear) -> None:
        parameters = [*self.small.parameters(), *private.parameters(), *projector.parameters()]
        optimizer = torch.optim.SGD(parameters, **self.options)
        for module in (self.small, private, projector):
            module.train()
        for index in torch.randperm(len(task.train)).split(self.batch_size):
            x, y = task.prepare(task.train.inputs[index], True, None), task.train.targets[index]
            z = projector(torch.cat((self.small.features(x), private.features(x)), dim=1))
            loss = functional.cross_entropy(self.small.head(z[:, :100]), y) + functional.cross_entropy(private.head(z), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def _test(self, task: Task, private: PlainCNN, projector: nn.Linear) -> float:
        for module in (self.small, private, projector):
            module.eval()
        correct = 0
        for start in range(0, len(task.test), self.batch_size):
            x = task.prepare(task.test.inputs[start : start + self.batch_size], False, None)
            z = projector(torch.cat((self.small.features(x), private.features(x)), dim=1))
            correct += int((private.head(z).argmax(1) == task.test.targets[start : start + self.batch_size]).sum())
        return correct / len(task.test)
