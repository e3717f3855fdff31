"""MONAI: a U-Net for volumes, such as CT scans.

    pip install monai
    graphkiln convert python:docs/sources/monai_unet.py:make --name volumes --max-batch-size 2

Load your own weights in `make`, or give `--weights FILE`. Volumes of another size: change the example.
"""

import torch
from monai.networks.nets import UNet


def make() -> tuple[torch.nn.Module, torch.Tensor]:
    """The network, and a batch of one volume: `[batch, channels, depth, height, width]`."""
    net = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2))
    return net, torch.zeros(1, 1, 32, 32, 32)
