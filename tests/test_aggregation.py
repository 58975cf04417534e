"""The weighted mean: true, order-free, shape-strict."""

import random

import pytest
import torch

from strategies.aggregation import UpdateError, WeightedMean


def test_constants_a_b_with_one_and_three_samples_give_a_plus_3b_over_4():
    a, b = torch.full((2, 3), 1.5), torch.full((2, 3), -2.25)
    mean = WeightedMean({"w": a}, scale=4)
    mean.add({"w": a}, 1)
    mean.add({"w": b}, 3)
    assert torch.equal(mean.result()["w"], torch.full((2, 3), (1.5 + 3 * -2.25) / 4))


def test_result_keeps_nothing_of_what_was_folded():
    live = {"w": torch.ones(3)}
    mean = WeightedMean(live, scale=1)
    mean.add(live, 1)
    live["w"].fill_(7.0)
    assert torch.equal(mean.result()["w"], torch.ones(3))


@pytest.mark.parametrize("seed", range(5))
def test_any_order_gives_the_same_bits_and_the_float64_mean(seed):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(50, generator=generator) * 10.0 ** random.Random(seed + i).uniform(-4, 3) for i in range(17)]
    weights = [random.Random(100 * seed + i).randint(1, 5000) for i in range(17)]
    results = []
    for order in (range(17), reversed(range(17)), random.Random(seed).sample(range(17), 17)):
        mean = WeightedMean({"w": values[0]}, scale=sum(weights))
        for i in order:
            mean.add({"w": values[i]}, weights[i])
        results.append(mean.result()["w"])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    oracle = sum(w * v.double() for w, v in zip(weights, values, strict=True)) / sum(weights)
    torch.testing.assert_close(results[0].double(), oracle, rtol=1.2e-7, atol=1e-9)


def test_counters_and_masks_keep_their_dtype_and_are_not_averaged():
    like = {"n": torch.tensor(5), "mask": torch.tensor([True, False]), "u": torch.tensor([3], dtype=torch.uint8)}
    mean = WeightedMean(like, scale=2)
    mean.add(like, 1)
    mean.add({"n": torch.tensor(6), "mask": torch.tensor([False, False]), "u": torch.tensor([1], dtype=torch.uint8)}, 1)
    result = mean.result()
    assert result["n"].dtype == torch.int64
    assert result["n"].shape == ()
    assert int(result["n"]) == 6
    assert result["mask"].tolist() == [True, False]
    assert result["u"].dtype == torch.uint8
    assert int(result["u"]) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_wide_and_comes_back_narrow(dtype):
    values = [torch.full((4,), 1.0 + i / 8, dtype=dtype) for i in range(9)]
    mean = WeightedMean({"w": values[0]}, scale=9)
    for value in values:
        mean.add({"w": value}, 1)
    assert mean.result()["w"].dtype == dtype
    assert torch.equal(mean.result()["w"], torch.full((4,), 1.5, dtype=dtype))


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"w": torch.ones(1)}, r"w is \(1,\)"),
        ({"w": torch.ones(2, 3)}, r"w is \(2, 3\)"),
        ({"w": torch.ones(3, dtype=torch.float64)}, "float64"),
        ({"v": torch.ones(3)}, r"missing \['w'\], unexpected \['v'\]"),
        ({"w": torch.tensor([1.0, float("nan"), 0.0])}, "NaN"),
        ({"w": torch.tensor([1.0, float("-inf"), 0.0])}, "infinity"),
        ({"w": torch.tensor([1.0, 1e9, 0.0])}, "diverged"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_folds_nothing(update, words):
    mean = WeightedMean({"w": torch.zeros(3)}, scale=2)
    mean.add({"w": torch.ones(3)}, 1)
    with pytest.raises(UpdateError, match=words):
        mean.add(update, 1)
    assert mean.count == 1
    assert torch.equal(mean.result()["w"], torch.ones(3))


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e9])
def test_weights_that_are_no_weights_are_refused(weight):
    mean = WeightedMean({"w": torch.zeros(3)}, scale=2)
    with pytest.raises(UpdateError, match="weight"):
        mean.add({"w": torch.ones(3)}, weight)
    with pytest.raises(ValueError, match="no update"):
        mean.result()


def test_memory_does_not_grow_with_the_number_of_updates():
    mean = WeightedMean({"w": torch.zeros(1000)}, scale=200)
    before = {name: tensor.data_ptr() for name, tensor in mean._sums.items()}
    for i in range(200):
        mean.add({"w": torch.full((1000,), float(i))}, 1)
    assert {name: tensor.data_ptr() for name, tensor in mean._sums.items()} == before
    assert torch.allclose(mean.result()["w"], torch.full((1000,), 99.5))
