"""SplitModel: every model is an extractor (input -> representation) and a head (representation -> outputs)."""

from __future__ import annotations

import torch
from torch import nn


class SplitModel(nn.Module):
    """A model in two named parts.

    Attributes:
        extractor: input (B, *input_shape) -> representation (B, feature_dim).
        head: representation (B, feature_dim) -> outputs (B, num_outputs); a Linear in all built-in models.
    """

    def __init__(self, extractor: nn.Module, head: nn.Module, *, input_shape: tuple[int, ...], feature_dim: int, num_outputs: int) -> None:
        super().__init__()
        self.extractor, self.head = extractor, head
        self.input_shape, self.feature_dim, self.num_outputs = tuple(input_shape), feature_dim, num_outputs

    def features(self, batch: torch.Tensor) -> torch.Tensor:
        """(B, *input_shape) -> (B, feature_dim)."""
        return self.extractor(batch)

    def classify(self, rep: torch.Tensor) -> torch.Tensor:
        """(B, feature_dim) -> (B, num_outputs)."""
        return self.head(rep)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """(B, *input_shape) -> (B, num_outputs)."""
        return self.classify(self.features(batch))
