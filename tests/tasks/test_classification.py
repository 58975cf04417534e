"""The task a node sees: splits, normalisation, augmentation, metrics, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tasks
from tasks import DataError
from tasks.classification import Preparation, classification_metrics, random_crop, random_flip


def rows_of(samples: tasks.Samples) -> list[int]:
    return (samples.inputs[:, 0, 0, 0].int() + 256 * samples.inputs[:, 0, 0, 1].int()).tolist()


def test_virtual_nodes_and_the_common_test_share_no_sample(labelled, configured, virtual):
    labels = np.arange(500) % 5
    settings = configured(source=labelled(labels), partitioner="dirichlet", val_fraction=0.1, shared_test=100)
    seen = rows_of(tasks.load_shared_test(settings).test)
    assert len(seen) == 100
    for partition in range(4):
        task = tasks.load(virtual(partition, 4, settings), settings)
        assert task.num_outputs == 5
        assert task.input_shape == (1, 2, 2)
        for samples in (task.train, task.val, task.test):
            assert samples.targets.tolist() == [row % 5 for row in rows_of(samples)]
            seen += rows_of(samples)
    assert sorted(seen) == list(range(500))


def test_no_common_test_when_it_is_off(configured):
    assert tasks.load_shared_test(configured(source="/nowhere", shared_test=0)) is None


def test_a_real_node_reads_all_of_its_own_folder(picture_folder, configured, deployed):
    settings = configured(test_fraction=0.25)
    task = tasks.load(deployed(picture_folder({"a": 8, "b": 4, "c": 0}), settings), settings)
    assert (len(task.train), len(task.val), len(task.test)) == (9, 0, 3)
    assert torch.bincount(task.test.targets).tolist() == [2, 1]
    assert task.num_outputs == 3
    assert task.class_names == ("a", "b", "c")
    ready = task.prepare(torch.cat([task.train.inputs, task.test.inputs]), False, None).double()
    torch.testing.assert_close(ready.mean(dim=(0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(ready.std(dim=(0, 2, 3), unbiased=False), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0)


def test_a_real_nodes_own_test_folder_is_its_test(picture_folder, tmp_path, configured, deployed):
    picture_folder({"a": 5, "b": 5}, name="set/train")
    picture_folder({"a": 2, "b": 1}, name="set/test")
    settings = configured()
    task = tasks.load(deployed(tmp_path / "set", settings), settings)
    assert (len(task.train), len(task.test)) == (10, 3)


def test_a_single_sample_is_trained_on(picture_folder, configured, deployed):
    settings = configured()
    task = tasks.load(deployed(picture_folder({"a": 1}), settings), settings)
    assert (len(task.train), len(task.val), len(task.test)) == (1, 0, 0)


def test_vectors_are_standardised_and_gaps_become_the_mean(tmp_path, configured, deployed):
    (tmp_path / "x.csv").write_text("a,b,label\n1,5,0\n3,5,1\n,5,1\n")
    settings = configured(test_fraction=0.0, num_classes=2)
    task = tasks.load(deployed(tmp_path / "x.csv", settings), settings)
    raw = task.train.inputs.clone()
    assert task.input_shape == (2,)
    assert task.prepare(task.train.inputs, True, None).tolist() == [[-1, 0], [1, 0], [0, 0]]
    torch.testing.assert_close(task.train.inputs, raw, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("counts", "num_classes", "words"),
    [
        ({"0": 3, "7": 2}, 5, "node 'pi-3': label 7 is outside 0..4"),
        ({"cat": 3, "dog": 2}, 5, "make an empty folder for each missing class"),
        ({"cat": 0}, 0, "node 'pi-3': .*is empty"),
    ],
)
def test_labels_that_may_not_be_the_federations_are_refused(picture_folder, configured, deployed, counts, num_classes, words):
    settings = configured(num_classes=num_classes)
    with pytest.raises(DataError, match=words):
        tasks.load(deployed(picture_folder(counts), settings), settings)


def test_unnamed_numbers_need_the_number_of_classes(tmp_path, configured, deployed):
    (tmp_path / "x.csv").write_text("a,label\n1,0\n3,1\n2,1\n")
    with pytest.raises(DataError, match=r"set data.num-classes"):
        tasks.load(deployed(tmp_path / "x.csv", configured()), configured())
    settings = configured(num_classes=6)
    assert tasks.load(deployed(tmp_path / "x.csv", settings), settings).num_outputs == 6


def test_one_node_with_a_wrong_label_leaves_the_others_alone(labelled, configured, virtual):
    labels = np.repeat([0, 1, 2], 20)
    labels[5] = -1
    settings = configured(
        source=labelled(labels, who=np.repeat([0, 1, 2], 20)), partitioner="natural", natural_column="who", num_classes=3, shared_test=0
    )
    with pytest.raises(DataError, match=r"node 'partition-0': label -1 is outside 0..2"):
        tasks.load(virtual(0, 3, settings), settings)
    assert len(tasks.load(virtual(1, 3, settings), settings).train) == 16


def test_wrong_partition_numbers_are_refused(labelled, configured, virtual):
    settings = configured(source=labelled([0, 1] * 10), partitioner="iid")
    with pytest.raises(DataError, match=r"partition-id=2 is not below num-partitions=2"):
        tasks.load(virtual(2, 2, settings), settings)


def test_augmentation_of_vectors_is_refused(tmp_path, configured, deployed):
    (tmp_path / "x.csv").write_text("a,label\n1,0\n3,1\n")
    settings = configured(num_classes=2, augment="flip")
    with pytest.raises(DataError, match=r"data.augment = 'flip' is for pictures"):
        tasks.load(deployed(tmp_path / "x.csv", settings), settings)


def test_crop_and_flip_equal_a_loop_over_samples():
    batch = torch.randint(0, 256, (9, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    got = random_flip(random_crop(batch, generator := torch.Generator().manual_seed(5)), generator)
    draws = torch.Generator().manual_seed(5)
    corners = torch.randint(0, 9, (2, 9, 1), generator=draws)
    mirrored = torch.rand(9, generator=draws) < 0.5
    assert 0 < mirrored.sum() < 9
    for index in range(9):
        wide = np.zeros((3, 14, 13), dtype=np.uint8)
        wide[:, 4:10, 4:9] = batch[index].numpy()
        top, left = corners[0, index].item(), corners[1, index].item()
        expected = wide[:, top : top + 6, left : left + 5]
        np.testing.assert_array_equal(got[index].numpy(), expected[:, :, ::-1] if mirrored[index] else expected)


@pytest.mark.parametrize("augment", ["flip", "crop-flip"])
def test_augmentation_is_for_training_and_seeded(augment):
    prepare = Preparation(torch.zeros(1, 1, 1), torch.ones(1, 1, 1), augment)
    batch = torch.arange(8 * 30, dtype=torch.uint8).reshape(8, 1, 6, 5)
    state = torch.get_rng_state()
    first, second = (prepare(batch, True, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == torch.float32
    assert not torch.equal(first, batch.float())
    assert torch.equal(prepare(batch, False, None), batch.float())
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"needs a generator"):
        prepare(batch, True, None)


def test_metrics_by_hand():
    outputs = torch.tensor([[3.0, 1, 0], [3, 1, 0], [0, 3, 1], [3, 1, 0]])
    found = classification_metrics(outputs, torch.tensor([0, 0, 1, 1]))
    assert list(found) == ["accuracy", "balanced_accuracy"]
    assert found == {"accuracy": 0.75, "balanced_accuracy": 0.75}
    assert classification_metrics(outputs, torch.tensor([0, 0, 0, 1]))["balanced_accuracy"] == pytest.approx((2 / 3 + 0) / 2)
    assert classification_metrics(outputs[:0], torch.tensor([], dtype=torch.int64)) == {}
