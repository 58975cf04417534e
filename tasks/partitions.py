"""Which samples a virtual node gets: flwr-datasets' partitioners over the label or natural column, computed once and cached."""

from __future__ import annotations

import functools
import heapq
import io
import logging
import os
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks import DataError
from tasks.cache import cache_root, digest, locked, unwritable
from tasks.raw import column_error
from tasks.sources import Source, open_source
from tasks.splits import rng_for, stratified

if TYPE_CHECKING:
    from server_app.settings import DataSettings, Settings

log = logging.getLogger(__name__)

_FORMAT = 1


def common_test(source: Source, data: DataSettings, seed: int) -> tuple[np.ndarray, bool]:
    """Return (sorted positions of the common test set, whether they lie in the source's own test split).

    At most `data.shared-test` samples, stratified. A source without a test split gives them from its samples, at most a fifth
    of them, and no virtual node ever gets those.
    """
    if len(source.test_labels):
        return stratified(np.asarray(source.test_labels), data.shared_test, rng_for(seed, "common-test")), True
    most = min(data.shared_test, len(source.labels) // 5)
    return stratified(np.asarray(source.labels), most, rng_for(seed, "common-test")), False


def partition_indices(source: Source, settings: Settings, num_partitions: int) -> list[np.ndarray]:
    """Return the samples of each partition, (num_partitions) sorted arrays of positions in the source's train split.

    Disjoint, and without the common test set. The partitioners:

    - iid: equal random parts.
    - dirichlet: each class is divided by proportions drawn from Dirichlet(`data.alpha`), drawn anew up to ten times until every
      node has `data.min-samples`; if no draw has, the last step moves random samples from the largest nodes to those below.
    - pathological: `data.classes-per-node` classes a node. Nodes walk through the classes in a seeded order, so that with c
      classes a node, node p holds the classes c*p ... c*p+c-1 (modulo their number): all are used as soon as nodes x c reaches
      their number, and each is divided evenly among its nodes.
    - shard: samples sorted by class, cut into equal pieces, `data.shards-per-node` random ones a node.
    - natural: partition i is the i-th of the sorted values of `data.natural-column`; values beyond `num_partitions` are unused.

    Raises:
        DataError: the settings cannot be met, or a node would get fewer than `data.min-samples`; it names the node and the keys.
    """
    data = settings.data
    identity = [_FORMAT, source.key, num_partitions, settings.seed, data.partitioner, data.min_samples, data.samples_per_node,
                data.shared_test, data.alpha, data.classes_per_node, data.shards_per_node, data.natural_column]  # fmt: skip
    path = cache_root() / f"partition-{digest(identity)}.npz"
    found = _read(path)
    if found is None:
        with locked(path):
            found = _read(path)
            if found is None:
                found = _compute(source, settings, num_partitions)
                _save(path, found)
    return found


def class_table(settings: Settings, num_partitions: int) -> np.ndarray:
    """Return (num_partitions, C) counts: samples of each class on each virtual node, its test samples included.

    It is also the check before round 1: whatever is wrong with the partition raises here.

    Raises:
        DataError: as `partition_indices`, or a label outside 0..C-1, naming the node.
    """
    source = open_source(settings.data.source, settings.data)
    classes = settings.data.num_classes or source.num_classes
    rows = []
    for partition, indices in enumerate(partition_indices(source, settings, num_partitions)):
        labels = np.asarray(source.labels[indices])
        check_labels(labels, classes, f"partition-{partition}")
        rows.append(np.bincount(labels, minlength=classes))
    return np.stack(rows)


def check_labels(labels: np.ndarray, classes: int, node_name: str) -> None:
    """Raise DataError where a label is outside 0..classes-1, with the node and the label."""
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise DataError(
            f"node {node_name!r}: label {wrong[0]} is outside 0..{classes - 1} ({len(wrong)} such samples, {classes} classes in all); "
            f"set data.num-classes to the number of classes of the whole federation, or correct the labels"
        )


def _read(path: Path) -> list[np.ndarray] | None:
    try:
        return _parse(path, path.stat().st_mtime_ns)
    except OSError:
        return None
    except Exception as error:  # whatever a damaged npz raises: BadZipFile, zlib.error, KeyError, ValueError
        log.warning("the cached partition %s is computed again (%s)", path, error)
        return None


@functools.lru_cache(maxsize=16)
def _parse(path: Path, mtime_ns: int) -> list[np.ndarray]:
    with np.load(path) as saved:
        return np.split(saved["indices"], saved["ends"][:-1])


def _save(path: Path, partitions: list[np.ndarray]) -> None:
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        with scratch.open("wb") as handle:
            np.savez(handle, indices=np.concatenate(partitions), ends=np.cumsum([len(part) for part in partitions]))
        os.replace(scratch, path)
    except OSError as error:
        raise unwritable(error) from error


def _compute(source: Source, settings: Settings, num_partitions: int) -> list[np.ndarray]:
    data = settings.data
    rng = rng_for(settings.seed, "partition", data.partitioner)
    common, elsewhere = common_test(source, data, settings.seed)
    pool = rng.permutation(len(source.labels))
    if not elsewhere:
        pool = pool[~np.isin(pool, common)]
    _check_feasible(source, data, num_partitions, len(pool))
    seed = int(rng.integers(2**31))
    parts = _PARTITIONERS[data.partitioner](source, pool, data, num_partitions, seed)
    if data.samples_per_node:
        parts = [rng.permutation(part)[: data.samples_per_node] for part in parts]
    for partition, part in enumerate(parts):
        if len(part) < data.min_samples:
            raise DataError(
                f"node 'partition-{partition}' would get {len(part)} samples, data.min-samples asks for {data.min_samples} "
                f"(data.partitioner = {data.partitioner!r}, {num_partitions} nodes); take fewer nodes or lower data.min-samples"
            )
    return [np.sort(part) for part in parts]


def _check_feasible(source: Source, data: DataSettings, num_partitions: int, available: int) -> None:
    if data.samples_per_node and data.samples_per_node < data.min_samples:
        raise DataError(f"data.samples-per-node = {data.samples_per_node} is below data.min-samples = {data.min_samples}; lower the latter")
    if data.partitioner != "natural" and num_partitions * data.min_samples > available:
        raise DataError(
            f"{num_partitions} nodes with data.min-samples = {data.min_samples} need {num_partitions * data.min_samples} samples; "
            f"{source.name} has {available} (without the common test set); take fewer nodes or lower data.min-samples"
        )


def _iid(source: Source, pool: np.ndarray, data: DataSettings, num_partitions: int, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import IidPartitioner

    return _run(IidPartitioner(num_partitions), pool, np.asarray(source.labels)[pool], num_partitions)


def _shard(source: Source, pool: np.ndarray, data: DataSettings, num_partitions: int, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import ShardPartitioner

    if num_partitions * data.shards_per_node > len(pool):
        raise DataError(
            f"data.shards-per-node = {data.shards_per_node} on {num_partitions} nodes makes more shards than {len(pool)} samples"
        )
    partitioner = ShardPartitioner(num_partitions, "label", num_shards_per_partition=data.shards_per_node, seed=seed)
    return _run(partitioner, pool, np.asarray(source.labels)[pool], num_partitions)


def _dirichlet(source: Source, pool: np.ndarray, data: DataSettings, num_partitions: int, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = np.asarray(source.labels)[pool]

    def drawn(least: int) -> list[np.ndarray]:
        partitioner = DirichletPartitioner(num_partitions, "label", data.alpha, min_partition_size=least, self_balancing=False, seed=seed)
        return _run(partitioner, pool, labels, num_partitions)

    try:
        return drawn(data.min_samples)
    except DataError:
        return topped_up(drawn(0), data.min_samples)


def topped_up(parts: list[np.ndarray], least: int) -> list[np.ndarray]:
    """Return `parts` with samples moved, one at a time from the end of whichever part is largest, until none has fewer than `least`.

    Parts come shuffled from the partitioner, so what is moved is a random sample of the giver. The sum of sizes must suffice.
    """
    if min(map(len, parts)) >= least:
        return parts
    lists = [part.tolist() for part in parts]
    largest = [(-len(part), index) for index, part in enumerate(lists) if len(part) > least]
    heapq.heapify(largest)
    moved = 0
    for part in lists:
        while len(part) < least:
            _, giver = heapq.heappop(largest)
            part.append(lists[giver].pop())
            moved += 1
            if len(lists[giver]) > least:
                heapq.heappush(largest, (-len(lists[giver]), giver))
    log.warning("no Dirichlet draw gave every node data.min-samples = %d; %d samples were moved from the largest nodes", least, moved)
    return [np.array(part, dtype=np.int64) for part in lists]


def _pathological(source: Source, pool: np.ndarray, data: DataSettings, num_partitions: int, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import PathologicalPartitioner

    labels = np.asarray(source.labels)[pool]
    present, codes = np.unique(labels, return_inverse=True)
    each = data.classes_per_node
    if each > len(present):
        raise DataError(f"data.classes-per-node = {each}, but {source.name} has samples of {len(present)} classes only")
    if num_partitions * each < len(present):
        log.warning("%d nodes with data.classes-per-node = %d hold %d of the %d classes; the others are not used",
                    num_partitions, each, num_partitions * each, len(present))  # fmt: skip
    # The library's own assignment (p + i) % C reaches only N + c - 1 classes. One virtual partition a (node, class) pair reaches N * c.
    order = np.random.default_rng(seed).permutation(len(present))
    slots = num_partitions * each
    partitioner = PathologicalPartitioner(slots, "label", 1, class_assignment_mode="deterministic", seed=seed)
    single = _run(partitioner, pool, order[codes.reshape(-1)], slots)
    return [np.concatenate(single[start : start + each]) for start in range(0, slots, each)]


def _natural(source: Source, pool: np.ndarray, data: DataSettings, num_partitions: int, seed: int) -> list[np.ndarray]:
    from flwr_datasets.partitioner import NaturalIdPartitioner

    names = [name.strip() for name in data.natural_column.split(",") if name.strip()]
    if not names:
        raise DataError(
            f"data.partitioner = 'natural' needs data.natural-column; columns of {source.name}: {', '.join(source.columns) or 'none'}"
        )
    if not source.natural_names:
        missing = next((name for name in names if name not in source.columns), names[0])
        raise column_error(source.name, "data.natural-column", missing, source.columns)
    if num_partitions > len(source.natural_names):
        raise DataError(
            f"{num_partitions} nodes, but data.natural-column = {data.natural_column!r} has {len(source.natural_names)} values; "
            f"take at most {len(source.natural_names)} nodes"
        )
    ids = source.natural[pool]
    found = np.unique(ids)
    # The common test set may have taken all samples of an id: its node is empty, and min-samples says so.
    found = found[found < num_partitions]
    by_id = dict(zip(found.tolist(), _run(NaturalIdPartitioner("label"), pool, ids, len(found)), strict=True))
    return [by_id.get(index, np.empty(0, dtype=np.int64)) for index in range(num_partitions)]


_PARTITIONERS = {"iid": _iid, "dirichlet": _dirichlet, "pathological": _pathological, "shard": _shard, "natural": _natural}


def _run(partitioner: Any, pool: np.ndarray, by: np.ndarray, num_partitions: int) -> list[np.ndarray]:
    """Return the positions of each partition in its order; `by` (len(pool),) is the column to partition by.

    Raises:
        DataError: the partitioner refuses, or loses or repeats a sample.
    """
    import datasets

    class Columns(datasets.Dataset):
        """A data set whose columns are arrays: partitioners turn columns into arrays, which takes lists a second a 60,000 rows."""

        def __getitem__(self, key: Any) -> Any:
            return self.with_format("arrow")[:][key].to_numpy() if isinstance(key, str) else super().__getitem__(key)

    partitioner.dataset = Columns.from_dict({"label": by, "position": pool})
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            parts = [np.asarray(partitioner.load_partition(index)["position"][:], dtype=np.int64) for index in range(num_partitions)]
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(f"data.partitioner ({type(partitioner).__name__}, {num_partitions} parts): {error}") from error
    together = np.concatenate(parts)
    if len(np.unique(together)) != len(together):
        raise DataError(f"data.partitioner ({type(partitioner).__name__}) gave a sample to two nodes; try another data.alpha or seed")
    return parts
