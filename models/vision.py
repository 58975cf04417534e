"""Models for images: small convolutional nets, ResNets, MobileNetV3, a small ViT; and an MLP for anything.

None has dropout: nodes draw randomness from a seeded generator, and torch's dropout cannot be given one.

Letters: B batch, C channels, H height, W width, T tokens, D width of a token or representation.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial

import torch
from torch import nn

from models.assemble import assemble, image_shape
from models.registry import Shape, register
from models.split import SplitModel


def _cnn(name: str, shape: Shape, num_outputs: int, feature_dim: int | None, *, filters: int, hidden: int) -> SplitModel:
    """Two 5x5 convolutions, each with ReLU and 2x2 max-pooling, then Linears of `hidden`, `feature_dim` (500) and the head.

    Pooling comes before the ReLU: the largest of four values is the same before and after it, and so is the
    gradient, with a quarter of the work.
    """
    channels, height, width = image_shape(name, shape, smallest=16)
    side_h, side_w = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    feature_dim = feature_dim or 500
    extractor = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, filters, 5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(filters * side_h * side_w, hidden),
            relu3=nn.ReLU(),
            fc2=nn.Linear(hidden, feature_dim),
            relu4=nn.ReLU(),
        )
    )
    return assemble(extractor, feature_dim, shape, num_outputs, None)


@register
def cnn1(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """CNN-1 of FedMRL (Yi et al., NeurIPS 2024): the largest of five."""
    return _cnn("cnn1", input_shape, num_outputs, feature_dim, filters=32, hidden=2000)


@register
def cnn2(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """CNN-2 of FedMRL: half the filters in the second convolution."""
    return _cnn("cnn2", input_shape, num_outputs, feature_dim, filters=16, hidden=2000)


@register
def cnn3(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """CNN-3 of FedMRL: first Linear 1000 wide."""
    return _cnn("cnn3", input_shape, num_outputs, feature_dim, filters=32, hidden=1000)


@register
def cnn4(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """CNN-4 of FedMRL: first Linear 800 wide."""
    return _cnn("cnn4", input_shape, num_outputs, feature_dim, filters=32, hidden=800)


@register
def cnn5(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """CNN-5 of FedMRL: first Linear 500 wide; the shared small model is this one with a narrow `feature_dim`."""
    return _cnn("cnn5", input_shape, num_outputs, feature_dim, filters=32, hidden=500)


def _resnet(name: str, shape: Shape, num_outputs: int, feature_dim: int | None, *, blocks: tuple[int, ...], group_norm: bool) -> SplitModel:
    """ResNet (He et al., 2016) for small images: 3x3 stem of stride 1, no max-pooling; width 512."""
    # torchvision takes as long to import as torch, and most nodes don't need it: hence inside the builders.
    from torchvision.models.resnet import BasicBlock, ResNet

    channels, _, _ = image_shape(name, shape)
    norm = partial(nn.GroupNorm, 32) if group_norm else nn.BatchNorm2d
    # ResNet calls one classifier output for a layer that is dropped here; its blocks are what is wanted.
    net = ResNet(BasicBlock, list(blocks), num_classes=1, norm_layer=norm)
    conv = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    extractor = nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(OrderedDict(conv=conv, norm=norm(64), relu=nn.ReLU())),
            layer1=net.layer1,
            layer2=net.layer2,
            layer3=net.layer3,
            layer4=net.layer4,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
        )
    )
    return assemble(extractor, 512, shape, num_outputs, feature_dim)


@register
def resnet18(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """ResNet-18 with BatchNorm."""
    return _resnet("resnet18", input_shape, num_outputs, feature_dim, blocks=(2, 2, 2, 2), group_norm=False)


@register
def resnet34(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """ResNet-34 with BatchNorm."""
    return _resnet("resnet34", input_shape, num_outputs, feature_dim, blocks=(3, 4, 6, 3), group_norm=False)


@register
def resnet18_gn(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """ResNet-18 with GroupNorm of 32 groups: no running statistics to average."""
    return _resnet("resnet18_gn", input_shape, num_outputs, feature_dim, blocks=(2, 2, 2, 2), group_norm=True)


@register
def resnet34_gn(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """ResNet-34 with GroupNorm of 32 groups."""
    return _resnet("resnet34_gn", input_shape, num_outputs, feature_dim, blocks=(3, 4, 6, 3), group_norm=True)


@register
def mobilenetv3_small(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """MobileNetV3-Small (Howard et al., 2019); below 64 pixels its first convolution does not halve the image.

    The representation is the last hidden layer (1024 wide) after Hardswish.
    """
    from torchvision.models import mobilenet_v3_small

    channels, height, width = image_shape("mobilenetv3_small", input_shape)
    feature_dim = feature_dim or 1024
    # torchvision's own BatchNorm momentum of 0.01 needs hundreds of steps until evaluation can be trusted; a node takes tens.
    net = mobilenet_v3_small(weights=None, norm_layer=nn.BatchNorm2d)
    stem = nn.Conv2d(channels, 16, 3, stride=1 if min(height, width) < 64 else 2, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out")
    net.features.set_submodule("0.0", stem)
    extractor = nn.Sequential(
        OrderedDict(
            features=net.features,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(576, feature_dim),
            act=nn.Hardswish(),
        )
    )
    return assemble(extractor, feature_dim, input_shape, num_outputs, None)


class _ViT(nn.Module):
    """Patches -> transformer blocks (pre-norm) -> mean over the tokens: (B, C, H, W) -> (B, D)."""

    def __init__(self, shape: tuple[int, int, int], *, patch: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        channels, height, width = shape
        rows, columns = math.ceil(height / patch), math.ceil(width / patch)
        # A side that is no multiple of the patch is padded: a convolution alone would drop the border.
        self.pad = nn.ZeroPad2d((0, columns * patch - width, 0, rows * patch - height))
        self.patches = nn.Conv2d(channels, dim, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, rows * columns, dim))
        nn.init.trunc_normal_(self.positions, std=0.02)
        # Built one by one: nn.TransformerEncoder copies one block, so that all would start with equal weights.
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        tokens_BTD = self.patches(self.pad(batch)).flatten(2).transpose(1, 2)
        return self.norm(self.blocks(tokens_BTD + self.positions)).mean(dim=1)


@register
def vit_tiny(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """Small ViT (after Dosovitskiy et al., 2021): width 192, 6 blocks, at most 8 x 8 patches of equal size."""
    shape = image_shape("vit_tiny", input_shape)
    # An odd number of heads keeps evaluation off torch's fused path, which reads `linear1.weight` past the module
    # and so breaks where a method has replaced that Linear.
    extractor = _ViT(shape, patch=math.ceil(max(shape[1:]) / 8), dim=192, depth=6, heads=3)
    return assemble(extractor, 192, input_shape, num_outputs, feature_dim)


@register
def mlp(input_shape: Shape, num_outputs: int, feature_dim: int | None) -> SplitModel:
    """Two hidden layers (256 and 128 wide) with ReLU over the flattened sample, whatever its shape."""
    feature_dim = feature_dim or 128
    extractor = nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(math.prod(input_shape), 256),
            relu1=nn.ReLU(),
            fc2=nn.Linear(256, feature_dim),
            relu2=nn.ReLU(),
        )
    )
    return assemble(extractor, feature_dim, input_shape, num_outputs, None)
