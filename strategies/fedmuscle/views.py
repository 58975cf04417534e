"""Random views of public pictures: what of a picture the nodes are to agree on, and what not.

Each node sees its own view of an item. Of equal pictures two models agree soonest on what is simplest in them, such as
their mean colour. Letters: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_AREA = (0.25, 1.0)  # of the picture, kept by a crop
_JITTER = 0.4  # brightness, contrast and saturation are multiplied by 1 - this to 1 + this
_GREY = 0.2  # share of the views without colour


def random_view(batch_BCHW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return one view of each picture, float32 (B, C, H, W) in 0..255.

    A crop brought to full size, mirrored half of the time, with other brightness, contrast and saturation, now and then grey.

    Args:
        batch_BCHW: uint8, or floating in the range of uint8.
        generator: CPU generator; the only randomness.

    Raises:
        ValueError: the items are no pictures.
    """
    if batch_BCHW.dim() != 4:
        shape = tuple(batch_BCHW.shape[1:])
        raise ValueError(
            f"public items of shape {shape} are no pictures, random views are of pictures; set fedmuscle.public-views to 'plain'"
        )
    B, C = batch_BCHW.shape[:2]
    draws_8B = torch.rand(8, B, generator=generator).to(batch_BCHW.device)
    batch = _cropped(batch_BCHW.float(), draws_8B[:4])
    brightness, contrast, saturation = 1.0 + _JITTER * (2.0 * draws_8B[4:7, :, None, None, None] - 1.0)
    batch = batch * brightness
    mean_B111 = batch.mean((1, 2, 3), keepdim=True)
    batch = mean_B111 + contrast * (batch - mean_B111)
    if C == 3:
        grey_B1HW = batch.mean(1, keepdim=True)
        coloured_B111 = (draws_8B[7] >= _GREY).float().reshape(B, 1, 1, 1)
        batch = grey_B1HW + coloured_B111 * saturation * (batch - grey_B1HW)
    return batch.clamp(0.0, 255.0)


def _cropped(batch_BCHW: torch.Tensor, draws_4B: torch.Tensor) -> torch.Tensor:
    side_B = (_AREA[0] + (_AREA[1] - _AREA[0]) * draws_4B[0]).sqrt()
    across_B, down_B = (1.0 - side_B) * (2.0 * draws_4B[1:3] - 1.0)
    mirror_B = torch.where(draws_4B[3] < 0.5, -1.0, 1.0)
    none_B = torch.zeros_like(side_B)
    # Output pixel (x, y) in -1..1 reads the picture at (side x + across, side y + down); shrinking only, so no antialiasing.
    theta_B23 = torch.stack([side_B * mirror_B, none_B, across_B, none_B, side_B, down_B], 1).reshape(-1, 2, 3)
    grid_BHW2 = F.affine_grid(theta_B23, list(batch_BCHW.shape), align_corners=False)
    return F.grid_sample(batch_BCHW, grid_BHW2, mode="bilinear", padding_mode="reflection", align_corners=False)
