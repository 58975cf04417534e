"""Costs against published numbers and numbers counted by hand."""

import pytest
import torch
from torch import nn

from models import build
from models.cost import activation_bytes, forward_macs, parameter_count, summary


@pytest.mark.parametrize(
    ("name", "millions", "digits"),
    [
        ("cnn1", 4.83, 2),
        ("cnn2", 3.39, 2),
        ("cnn3", 3.53, 2),
        ("cnn4", 3.27, 2),
        ("cnn5", 2.88, 2),
        ("resnet18", 555.4, 1),
    ],
)
def test_macs_equal_the_published_ones(name, millions, digits):
    model = build(name, input_shape=(3, 32, 32), num_outputs=10)
    assert round(forward_macs(model, (3, 32, 32)) / 1e6, digits) == millions


def test_macs_of_attention_by_hand():
    tokens, dim, depth = 64, 192, 6
    block = tokens * (4 * dim * dim + 2 * dim * 2 * dim) + 2 * tokens * tokens * dim
    expected = tokens * (3 * 4 * 4) * dim + depth * block + dim * 10
    assert forward_macs(build("vit_tiny", input_shape=(3, 32, 32), num_outputs=10), (3, 32, 32)) == expected


def test_saved_activations_by_hand():
    # Kept for backward: the input (4 floats) for the first Linear, ReLU's output (6), which also feeds the second.
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    assert activation_bytes(net, (4,)) == (4 + 6) * 4
    assert activation_bytes(net[:2].double(), (4,)) == (4 + 6) * 4
    # A 2x2 max-pooling keeps its input and, for each of 4 results, the place of the maximum (int64).
    pooled = nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2))
    assert activation_bytes(pooled, (1, 4, 4)) == (16 + 16) * 4 + 4 * 8


def test_saved_activations_of_resnet18_equal_the_measured_ones():
    model = build("resnet18", input_shape=(3, 32, 32), num_outputs=10)
    assert round(activation_bytes(model, (3, 32, 32)) / 2**20, 2) == 4.48


def test_shared_parameters_count_once_and_buffers_never():
    layer = nn.Linear(3, 3)
    assert parameter_count(nn.Sequential(layer, nn.BatchNorm1d(3), layer)) == 12 + 6


def test_measuring_leaves_the_model_and_the_random_numbers_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    forward_macs(model, (4,))
    activation_bytes(model, (4,))
    summary("mlp", (4,), 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_summary_names_everything():
    cost = summary("cnn5", (3, 32, 32), 10)
    assert (cost.name, cost.input_shape, cost.num_outputs, cost.feature_dim) == ("cnn5", (3, 32, 32), 10, 500)
    assert (cost.parameters, round(cost.macs / 1e6, 2)) == (670_058, 2.88)
    # Input, four ReLUs and two poolings with their indices.
    floats = 3 * 32 * 32 + 16 * 28 * 28 + 16 * 14 * 14 + 32 * 10 * 10 + 32 * 5 * 5 + 500 + 500
    assert cost.activation_bytes == floats * 4 + (16 * 14 * 14 + 32 * 5 * 5) * 8
