"""A small residual net: the third family of models in `muscle_federation.py`, at about the cost of the other two."""

from __future__ import annotations

import torch
from torch import nn


class _Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut: (B, inner, H, W) -> (B, width, H / stride, W / stride)."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.short = nn.Identity() if (inner, stride) == (width, 1) else nn.Conv2d(inner, width, 1, stride, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        inner = self.norm1(self.conv1(batch)).relu()
        return (self.norm2(self.conv2(inner)) + self.short(batch)).relu()


def resnet8(input_shape: tuple[int, ...], num_outputs: int, feature_dim: int | None) -> nn.Module:
    """Three residual blocks, 16, 32 and 128 wide, on a stem of stride 2; `feature_dim` is the caller's business."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        _Block(16, 16, 1),
        _Block(16, 32, 2),
        _Block(32, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_outputs),
    )
