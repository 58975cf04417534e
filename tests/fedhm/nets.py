"""Models as a user would bring them, for FedHM's tests."""

from torch import nn

from models.split import SplitModel


def grouped(input_shape, num_outputs, feature_dim=None):
    """Plain, grouped, depthwise and 1x1 convolutions with BatchNorm2d, and BatchNorm1d on the representation."""
    body = nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 12, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(48, 24), nn.BatchNorm1d(24), nn.ReLU(),
    )  # fmt: skip
    return SplitModel(body, nn.Linear(24, num_outputs), input_shape=input_shape, feature_dim=24, num_outputs=num_outputs)


def attentive(input_shape, num_outputs, feature_dim=None):
    """One transformer block over the rows of the picture."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.TransformerEncoderLayer(input_shape[-1], 2, 32, dropout=0.0, batch_first=True)

        def forward(self, batch):
            return self.block(batch.mean(dim=1)).mean(dim=1)

    width = input_shape[-1]
    return SplitModel(Rows(), nn.Linear(width, num_outputs), input_shape=input_shape, feature_dim=width, num_outputs=num_outputs)
