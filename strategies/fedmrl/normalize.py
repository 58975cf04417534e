"""Representations of one length, so that neither extractor drowns the other in the fused one."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from models import SplitModel


def normalized(model: SplitModel) -> SplitModel:
    """Return `model` with every representation scaled to a root mean square of 1; no tensor is added, all are shared with it."""
    width = model.feature_dim
    scaled = nn.Sequential(OrderedDict(net=model.extractor, norm=nn.RMSNorm(width, elementwise_affine=False)))
    return SplitModel(scaled, model.head, input_shape=model.input_shape, feature_dim=width, num_outputs=model.num_outputs)
