"""Models as a user would bring them (`module:function`): with BatchNorm, and in bfloat16."""

import torch
from torch import nn

from models.split import SplitModel


def batch_norm_net(input_shape, num_outputs, feature_dim=None):
    """A small net with BatchNorm2d, BatchNorm1d on the representation, and an integer and a boolean buffer of its own."""
    width = feature_dim or 12
    body = nn.Sequential(
        nn.Conv2d(input_shape[0], 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, width), nn.BatchNorm1d(width), nn.ReLU(),
    )  # fmt: skip
    body.register_buffer("calls", torch.tensor(3))
    body.register_buffer("mask", torch.tensor([True, False]))
    return SplitModel(body, nn.Linear(width, num_outputs), input_shape=input_shape, feature_dim=width, num_outputs=num_outputs)


def brain_float_net(input_shape, num_outputs, feature_dim=None):
    """An MLP whose weights are bfloat16."""
    width, size = feature_dim or 12, torch.Size(input_shape).numel()

    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(size, width).to(torch.bfloat16)

        def forward(self, batch):
            return torch.relu(self.layer(batch.flatten(1).to(torch.bfloat16)))

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(width, num_outputs).to(torch.bfloat16)

        def forward(self, rep):
            return self.layer(rep.to(torch.bfloat16)).float()

    return SplitModel(Narrow(), Wide(), input_shape=input_shape, feature_dim=width, num_outputs=num_outputs)


def with_an_offset(input_shape, num_outputs, feature_dim=None):
    """A linear model that also holds a number which float16 cannot carry."""
    width = torch.Size(input_shape).numel()

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.offset = nn.Parameter(torch.tensor(7e4))

        def forward(self, batch):
            return batch.flatten(1) + 0 * self.offset

    return SplitModel(Body(), nn.Linear(width, num_outputs), input_shape=input_shape, feature_dim=width, num_outputs=num_outputs)
