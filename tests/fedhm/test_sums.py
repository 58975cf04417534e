"""Sums in six bytes an element, against Python's own integers."""

import pytest
import torch

from strategies.fedhm.sums import UNIT, FixedSum, fixed


def _integers(values, shares):
    return [sum(round(share * value * 2**36) for value, share in zip(column, shares, strict=True)) for column in zip(*values, strict=True)]


@pytest.mark.parametrize("size", [1e-9, 1.0, 60.0, 5e3, 1e6], ids=str)
def test_sums_equal_those_of_exact_integers_also_when_they_become_wide(size):
    values = size * torch.randn(7, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shares = [0.3, 0.11, 0.07, 1.2, 0.5, 0.01, 0.9]
    total = FixedSum.zeros(torch.Size((20, 5)))
    for value, share in zip(values, shares, strict=True):
        total.reserve(share * float(value.abs().max()))
        total.viewed(lambda x: x.view(-1)).add(slice(0, 100), fixed(value, share))
    exact = [float(n) for n in _integers(values.tolist(), shares)]
    assert total.read(slice(None)).flatten().tolist() == exact
    assert (total.low is None) == (total.bound >= 2**10)


def test_narrow_sums_hold_values_up_to_their_bound_in_both_signs():
    edges = torch.tensor(
        [1023.9999, -1023.9999, 2**-21 - 2**-37, 3 * 2**-21, -3 * 2**-21, 2**-36, -(2**-36), 2**-21, -(2**-21), 0.0], dtype=torch.float64
    )
    total = FixedSum.zeros(edges.shape)
    total.reserve(1023.9999)
    total.add(slice(None), fixed(edges, 1.0))
    assert total.low is not None
    assert total.read(slice(None)).tolist() == [round(v * 2**36) for v in edges.tolist()]
    assert (total.read(slice(None)) / UNIT - edges).abs().max() <= 2**-37


def test_sums_of_a_scalar_and_at_chosen_places_only():
    scalar = FixedSum.zeros(torch.Size(()))
    for size in (3.0, 4096.0):
        scalar.reserve(size)
        scalar.viewed(lambda x: x.unsqueeze(0)).add(slice(0, 1), fixed(torch.tensor([size]), 1.0))
    assert scalar.low is None
    assert float(scalar.read(())) / UNIT == 4099.0
    places = FixedSum.zeros(torch.Size((3, 4)))
    rows, columns = torch.tensor([[0], [2]]), torch.tensor([[1, 3]])
    places.add((rows, columns), fixed(torch.ones(2, 2), 0.5))
    assert (places.read(slice(None)) / UNIT).tolist() == [[0, 0.5, 0, 0.5], [0, 0, 0, 0], [0, 0.5, 0, 0.5]]


def test_memory_is_six_bytes_an_element():
    total = FixedSum.zeros(torch.Size((64, 64)))
    total.reserve(10)
    assert sum(x.nbytes for x in (total.high, total.low)) == 6 * 64 * 64
