"""Single-label classification of pictures or feature vectors: cross entropy, accuracy, balanced accuracy.

Letters: B batch, C channels (or classes, of outputs), H height, W width, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from tasks import DataError, Samples, Task
from tasks.partitions import check_labels, common_test, partition_indices
from tasks.sources import Source, open_source
from tasks.splits import node_splits

if TYPE_CHECKING:
    from client_app.profile import NodeProfile
    from server_app.settings import Settings

_PAD = 4


def load_classification(profile: NodeProfile, settings: Settings) -> Task:
    """Return one node's task.

    The source is `profile.data`, else `settings.data.source`. A node without a partition has all of it: split into train,
    validation and test, or, where the source has its own test split, that is the node's test. A node with a partition has that part.

    Inputs are normalised by the channel means and deviations of the source's train split: in simulation the same for all nodes, in
    deployment each node's own, so that cameras and sensors that differ in brightness or scale are brought together.

    Raises:
        DataError: naming the node; nothing to read, labels outside 0..C-1, class names that may not be the other nodes', or a
            partition that cannot be made.
    """
    name, data = profile.node_name, settings.data
    try:
        source = open_source(profile.data or data.source, data)
        classes = _num_classes(source, settings, own=profile.partition is None)
        indices = _indices(source, profile, settings)
        labels = np.asarray(source.labels)[indices]
        own_test = profile.partition is None and len(source.test_labels) > 0
        train, val, test = node_splits(
            labels,
            seed=settings.seed,
            node_name=name,
            test_fraction=0.0 if own_test else data.test_fraction,
            val_fraction=data.val_fraction,
        )
        prepare = Preparation.of(source, data.augment)
    except DataError as error:
        raise DataError(f"node {name!r}: {error}") from error
    check_labels(labels, classes, name)
    tests = _own_test(source, np.arange(len(source.test_labels))) if own_test else _samples(source, indices[test])
    check_labels(tests.targets.numpy(), classes, name)
    return _task(source, classes, prepare, _samples(source, indices[train]), _samples(source, indices[val]), tests)


def load_common(settings: Settings) -> Task | None:
    """Return a task whose `test` is the common test set of `settings.data.source`, or None with `data.shared-test = 0`.

    Raises:
        DataError: the source cannot be read, or has labels outside 0..C-1.
    """
    if not settings.data.shared_test:
        return None
    source = open_source(settings.data.source, settings.data)
    classes = settings.data.num_classes or source.num_classes
    positions, own = common_test(source, settings.data, settings.seed)
    if not len(positions):
        return None
    nothing = _samples(source, np.empty(0, dtype=np.int64))
    test = _own_test(source, positions) if own else _samples(source, positions)
    try:
        check_labels(test.targets.numpy(), classes, "common test set")
    except DataError as error:
        raise DataError(f"{error}; where nodes read their own data, set data.shared-test = 0 or data.source to what they have") from error
    return _task(source, classes, Preparation.of(source, "none"), nothing, nothing, test)


@dataclass(frozen=True)
class Preparation:
    """Raw batch -> float32 batch: augmented when training, then normalised; all of it on the batch's device.

    Attributes:
        centre, factor: (C, 1, 1) or (F,) float32, in units of the raw values: out = (raw - centre) * factor.
        augment: "none", "flip" (left to right, half of the samples), "crop-flip" (a random H x W window of the picture with 4
            black pixels around it, then flip).
    """

    centre: torch.Tensor
    factor: torch.Tensor
    augment: str

    @classmethod
    def of(cls, source: Source, augment: str) -> Preparation:
        """Return the preparation by the statistics of `source`.

        Raises:
            DataError: augmentation of samples that are no pictures.
        """
        if augment != "none" and len(source.input_shape) != 3:
            raise DataError(f"data.augment = {augment!r} is for pictures, {source.name} has vectors; set it to 'none'")
        scale = 255.0 if source.inputs.dtype == np.uint8 else 1.0
        shape = (-1, *[1] * (len(source.input_shape) - 1))
        mean, std = (torch.tensor(values, dtype=torch.float64).reshape(shape) * scale for values in (source.mean, source.std))
        return cls(mean.float(), (1 / std).float(), augment)

    def __call__(self, batch: torch.Tensor, train: bool, generator: torch.Generator | None) -> torch.Tensor:
        """(B, *input_shape) of the raw dtype -> float32 of the same shape; missing numbers become the mean.

        Args:
            batch: raw samples on the device that computes.
            train: augment.
            generator: CPU generator; the only randomness, so that CPU and GPU see the same augmentation.

        Raises:
            ValueError: augmentation without a generator.
        """
        if train and self.augment != "none":
            if generator is None:
                raise ValueError(f"data.augment = {self.augment!r} needs a generator")
            if self.augment == "crop-flip":
                batch = random_crop(batch, generator)
            batch = random_flip(batch, generator)
        ready = (batch.to(torch.float32) - self.centre.to(batch.device)) * self.factor.to(batch.device)
        return ready if batch.dtype == torch.uint8 else ready.nan_to_num_(nan=0.0)


def random_crop(batch_BCHW: torch.Tensor, generator: torch.Generator, pad: int = _PAD) -> torch.Tensor:
    """Return a random H x W window of each picture surrounded by `pad` zeros; one gather for the whole batch."""
    B, _, H, W = batch_BCHW.shape
    device = batch_BCHW.device
    corner = torch.randint(0, 2 * pad + 1, (2, B, 1), generator=generator).to(device)
    rows_BH, columns_BW = corner[0] + torch.arange(H, device=device), corner[1] + torch.arange(W, device=device)
    padded_BHWC = F.pad(batch_BCHW, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
    sample = torch.arange(B, device=device).reshape(B, 1, 1)
    return padded_BHWC[sample, rows_BH.unsqueeze(2), columns_BW.unsqueeze(1)].permute(0, 3, 1, 2)


def random_flip(batch_BCHW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the batch with each picture mirrored left to right with probability one half."""
    mirrored = (torch.rand(len(batch_BCHW), generator=generator) < 0.5).to(batch_BCHW.device)
    return torch.where(mirrored.reshape(-1, 1, 1, 1), batch_BCHW.flip(3), batch_BCHW)


def classification_metrics(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Return accuracy, and balanced accuracy: the mean recall of the classes that occur; nothing for no samples.

    Args:
        outputs: (N, C).
        targets: (N,) int64.
    """
    if not len(targets):
        return {}
    hit, classes = outputs.argmax(dim=1) == targets, outputs.shape[1]
    total = torch.bincount(targets, minlength=classes)
    right = torch.bincount(targets[hit], minlength=classes)
    recall = right[total > 0].double() / total[total > 0]
    return {"accuracy": hit.double().mean().item(), "balanced_accuracy": recall.mean().item()}


def _num_classes(source: Source, settings: Settings, *, own: bool) -> int:
    """Return C, the classes of the whole federation.

    A node's own data may lack classes that others have, so its labels must not be numbered by what happens to be there.
    """
    wanted = settings.data.num_classes
    if own and source.sorted_names and wanted not in (0, source.num_classes):
        shown = ", ".join(source.class_names[:10])
        raise DataError(
            f"{source.name} has {source.num_classes} class names ({shown}) but data.num-classes = {wanted}, so which number each has "
            "in the federation is unknown; make an empty folder for each missing class, or use numbers from 0"
        )
    if own and not wanted and not source.class_names:
        raise DataError(f"{source.name} has numbers for labels; set data.num-classes to the number of classes of the whole federation")
    return wanted or source.num_classes


def _indices(source: Source, profile: NodeProfile, settings: Settings) -> np.ndarray:
    if profile.partition is None:
        return np.arange(len(source.labels))
    if profile.num_partitions is None:
        raise DataError(f"partition-id={profile.partition} without num-partitions; add it to --node-config, or leave both out")
    if profile.partition >= profile.num_partitions:
        raise DataError(f"partition-id={profile.partition} is not below num-partitions={profile.num_partitions}; they count from 0")
    return partition_indices(source, settings, profile.num_partitions)[profile.partition]


def _samples(source: Source, positions: np.ndarray) -> Samples:
    return _taken(source.inputs, source.labels, positions)


def _own_test(source: Source, positions: np.ndarray) -> Samples:
    return _taken(source.test_inputs, source.test_labels, positions)


def _taken(inputs: np.ndarray, labels: np.ndarray, positions: np.ndarray) -> Samples:
    """Return the samples at `positions`, copied out of the memory map: a node holds its own share and no more."""
    return Samples(torch.from_numpy(np.asarray(inputs[positions])), torch.from_numpy(np.asarray(labels[positions])))


def _task(source: Source, classes: int, prepare: Preparation, train: Samples, val: Samples, test: Samples) -> Task:
    return Task(
        kind="classification",
        input_shape=source.input_shape,
        num_outputs=classes,
        train=train,
        val=val,
        test=test,
        prepare=prepare,
        loss=F.cross_entropy,
        metrics=classification_metrics,
        class_names=source.class_names if len(source.class_names) == classes else (),
    )
