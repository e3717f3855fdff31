"""segmentation_models_pytorch: a U-Net over an encoder of timm.

    pip install segmentation-models-pytorch
    graphkiln convert python:docs/sources/segmentation_unet.py:make --name masks --shape 3x64x64

Sides are multiples of 32. Load your own weights in `make`, or give `--weights FILE`.
"""

import segmentation_models_pytorch as smp
import torch


def make() -> torch.nn.Module:
    """The network; it returns one plane of scores for each class: `[batch, 2, height, width]`."""
    net: torch.nn.Module = smp.Unet("resnet18", encoder_weights=None, classes=2)
    return net
