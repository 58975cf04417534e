"""Who gets which samples."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tasks import DataError
from tasks.partitions import class_table, common_test, partition_indices, topped_up
from tasks.sources import open_source
from tasks.splits import node_splits, rng_for, stratified

LABELS = np.repeat(np.arange(10), 60)
WAYS = [
    {"partitioner": "iid"},
    {"partitioner": "dirichlet", "alpha": 0.3},
    {"partitioner": "pathological", "classes_per_node": 3},
    {"partitioner": "shard", "shards_per_node": 2},
    {"partitioner": "natural", "natural_column": "who"},
]


def opened(settings):
    return open_source(settings.data.source, settings.data)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["partitioner"])
def test_disjoint_seeded_apart_from_the_common_test_and_read_back_equal(labelled, configured, cache_home, way):
    name = labelled(LABELS, who=np.arange(600) % 7)
    settings = configured(source=name, shared_test=100, min_samples=5, **way)
    source = opened(settings)
    parts = partition_indices(source, settings, 5)
    together = np.concatenate([*parts, common_test(source, settings.data, 1)[0]])
    assert len(parts) == 5
    assert len(np.unique(together)) == len(together)
    if way["partitioner"] in ("iid", "dirichlet", "pathological", "shard"):
        assert len(together) == 600
    for file in (cache_home / "cache").glob("partition-*.npz"):
        file.write_bytes(b"damaged")
    for again, part in zip(partition_indices(source, settings, 5), parts, strict=True):
        np.testing.assert_array_equal(again, part)
    other = partition_indices(source, configured(seed=2, source=name, shared_test=100, min_samples=5, **way), 5)
    assert any(a.tolist() != b.tolist() for a, b in zip(other, parts, strict=True))
    table = class_table(settings, 5)
    assert table.shape == (5, 10)
    assert table.sum(axis=1).tolist() == [len(part) for part in parts]


def test_iid_parts_are_equal_and_mixed(labelled, configured):
    table = class_table(configured(source=labelled(LABELS), partitioner="iid", shared_test=0), 6)
    assert table.sum(axis=1).tolist() == [100] * 6
    assert (table > 0).all()


def test_natural_nodes_are_the_sorted_ids(labelled, configured):
    settings = configured(
        source=labelled(LABELS, who=np.array([30, 4, 200] * 200)), partitioner="natural", natural_column="who", shared_test=0
    )
    first, second, third = partition_indices(opened(settings), settings, 3)
    assert first.tolist() == list(range(1, 600, 3))  # id 4
    assert second.tolist() == list(range(0, 600, 3))  # id 30
    assert third.tolist() == list(range(2, 600, 3))  # id 200


def test_pathological_covers_every_class_evenly_as_soon_as_it_can(labelled, configured):
    settings = configured(source=labelled(LABELS), partitioner="pathological", classes_per_node=3, shared_test=0)
    table = class_table(settings, 4)
    assert ((table > 0).sum(axis=1) == 3).all()
    assert (table.sum(axis=0) == 60).all()
    assert sorted((table > 0).sum(axis=0).tolist()) == [1] * 8 + [2] * 2
    assert set(table[table > 0].tolist()) == {60, 30}


def test_pathological_with_too_few_nodes_says_which_is_left_out(labelled, configured, caplog):
    table = class_table(configured(source=labelled(LABELS), partitioner="pathological", classes_per_node=2, shared_test=0), 3)
    assert (table.sum(axis=0) > 0).sum() == 6
    assert "hold 6 of the 10 classes" in caplog.text


@pytest.mark.parametrize("nodes", [100, 200])
def test_skewed_dirichlet_ends_and_gives_every_node_the_minimum(labelled, configured, caplog, nodes):
    settings = configured(source=labelled(np.repeat(np.arange(10), 300)), alpha=0.1, min_samples=10, shared_test=0)
    source = opened(settings)
    import flwr_datasets.partitioner  # noqa: F401  (its import is no part of the time)

    start = time.monotonic()
    parts = partition_indices(source, settings, nodes)
    assert time.monotonic() - start < 5
    assert min(map(len, parts)) >= 10
    assert sorted(np.concatenate(parts).tolist()) == list(range(3000))
    assert "moved from the largest nodes" in caplog.text


def test_topping_up_takes_from_the_largest_first():
    parts = [np.array([1, 2, 3, 4, 5, 6]), np.array([], dtype=np.int64), np.array([7, 8, 9, 10]), np.array([11])]
    # 6, 5 from the first (6 -> 4), then ties at 4 go by number: 4 from the first, and 10 from the third.
    assert [part.tolist() for part in topped_up(parts, 2)] == [[1, 2, 3], [6, 5], [7, 8, 9, 10], [11, 4]]


@pytest.mark.parametrize(
    ("data", "nodes", "words"),
    [
        ({"min_samples": 10}, 61, "61 nodes with data.min-samples = 10 need 610 samples"),
        ({"partitioner": "natural"}, 2, "needs data.natural-column"),
        ({"partitioner": "natural", "natural_column": "whom"}, 2, "no column 'whom'"),
        ({"partitioner": "natural", "natural_column": "who"}, 8, "take at most 7 nodes"),
        ({"partitioner": "natural", "natural_column": "who", "min_samples": 86}, 7, "'partition-5' would get 85 samples, data.min-samples"),
        ({"partitioner": "pathological", "classes_per_node": 11}, 2, "data.classes-per-node = 11"),
        ({"partitioner": "shard", "shards_per_node": 400}, 2, "data.shards-per-node = 400"),
        ({"samples_per_node": 5, "min_samples": 10}, 2, "data.samples-per-node = 5 is below data.min-samples"),
        ({"num_classes": 4, "partitioner": "iid"}, 2, "node 'partition-0': label"),
    ],
)
def test_what_cannot_be_split_says_why(labelled, configured, data, nodes, words):
    name = labelled(LABELS, who=np.arange(600) % 7)
    with pytest.raises(DataError) as caught:
        class_table(configured(source=name, shared_test=0, **data), nodes)
    assert words in str(caught.value)


def test_the_cap_keeps_a_seeded_choice(labelled, configured):
    name = labelled(LABELS)
    full = configured(source=name, partitioner="iid", shared_test=0)
    capped = configured(source=name, partitioner="iid", shared_test=0, samples_per_node=20)
    for all_of_it, some in zip(*(partition_indices(opened(full), one, 3) for one in (full, capped)), strict=True):
        assert len(some) == 20
        assert set(some.tolist()) < set(all_of_it.tolist())


def test_the_common_test_is_stratified_and_at_most_a_fifth(labelled, configured):
    settings = configured(source=labelled(LABELS), shared_test=1000)
    positions, own = common_test(opened(settings), settings.data, 1)
    assert not own
    assert np.bincount(LABELS[positions]).tolist() == [12] * 10


def test_a_source_with_a_test_split_keeps_all_its_samples_for_nodes(labelled, configured):
    name = labelled(LABELS, test_inputs=np.zeros((30, 1, 2, 2), dtype=np.uint8), test_labels=np.arange(30) % 10)
    settings = configured(source=name, shared_test=20, partitioner="iid")
    positions, own = common_test(opened(settings), settings.data, 1)
    assert own
    assert np.bincount(positions % 10).tolist() == [2] * 10
    assert sum(map(len, partition_indices(opened(settings), settings, 3))) == 600


def test_stratified_gives_shares_and_spares_single_samples():
    labels = np.array([0] * 8 + [1] * 4 + [2])
    counts = np.bincount(labels[stratified(labels, 3, rng_for(1, "x"))], minlength=3)
    assert counts.tolist() == [2, 1, 0]  # shares 1.85, 0.92, 0.23
    assert sorted(stratified(labels, 13, rng_for(1, "x")).tolist()) == list(range(13))
    assert len(stratified(labels, 0, rng_for(1, "x"))) == 0


@pytest.mark.parametrize(("total", "sizes"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 1)), (10, (7, 1, 2)), (100, (70, 10, 20))])
def test_node_splits_cover_and_leave_something_to_train_on(total, sizes):
    labels = np.arange(total) % 2
    parts = node_splits(labels, seed=1, node_name="a", test_fraction=0.2, val_fraction=0.1)
    assert tuple(map(len, parts)) == sizes
    assert sorted(np.concatenate(parts).tolist()) == list(range(total))
    again = node_splits(labels, seed=1, node_name="a", test_fraction=0.2, val_fraction=0.1)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if total == 100:
        other = node_splits(labels, seed=1, node_name="b", test_fraction=0.2, val_fraction=0.1)
        assert not np.array_equal(parts[2], other[2])


def test_fractions_that_leave_nothing_are_refused():
    with pytest.raises(DataError, match=r"data.val-fraction = 0.5"):
        node_splits(np.zeros(10), seed=1, node_name="a", test_fraction=0.5, val_fraction=0.5)
