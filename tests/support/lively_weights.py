"""Random weights with which torchvision's architectures find something; as built, all scores are alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphkiln_converters.detection.torchvision import LibraryPipeline
from graphkiln_converters.samples import synthetic_images
from graphkiln_converters.torch_libraries import import_torchvision

# Layers that decide, or that no normalization follows (VGG's), and the standard deviation that their outputs get.
_SPREAD: Mapping[str, float] = {
    r"^backbone\.(features|extra)\.": 1.0,
    r"cls_logits$|cls_score$|classification_head\.module_list|classifier\.4$|(low|high)_classifier$": 2.0,
    r"bbox_pred$|bbox_reg$|regression_head\.module_list": 0.5,
    r"mask_fcn_logits$|kps_score_lowres$": 2.0,
}


def lively_weights(name: str, side: int) -> dict[str, torch.Tensor]:
    """State of an architecture whose last layers have a spread output.

    Args:
        name: torchvision's name of a detector or a segmenter.
        side: Of the images that they are made for, in pixels.
    """
    torch.manual_seed(0)
    models = import_torchvision().models
    model = models.get_model(name, weights=None, weights_backbone=None).eval()
    # Beside smooth images, MobileNets whose normalizations were set tell differences that fp32 cannot.
    takes_noise = name.startswith("fasterrcnn_mobilenet") or not hasattr(model, "transform")
    batch = torch.randn(2, 3, side, side) if takes_noise else _images(model.transform, side)
    if name.startswith(("fasterrcnn_mobilenet", "retinanet")):
        _let_through(model, torch.randn(2, 3, side, side))
    _spread(model, batch)
    return dict(model.state_dict())


def _images(transform: Any, side: int) -> torch.Tensor:
    """Two images as `convert` generates them, normalized as a detector normalizes them."""
    images = torch.tensor(synthetic_images((side, side, 3), 2)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (transform.image_mean, transform.image_std))
    return (images - mean) / std


@torch.inference_mode()
def _let_through(model: Any, batch: torch.Tensor) -> None:
    """Set normalizations to the statistics of their inputs; as built, their outputs do not depend on the image."""
    for layer in model.modules():
        if hasattr(layer, "running_mean"):
            layer.register_forward_pre_hook(_normalizing)
    LibraryPipeline(model, 1)(batch)
    for layer in model.modules():
        layer._forward_pre_hooks.clear()


def _normalizing(layer: Any, given: tuple[torch.Tensor]) -> None:
    layer.running_mean = given[0].mean((0, 2, 3))
    layer.running_var = given[0].var((0, 2, 3)).clamp_min(1e-12)


@torch.inference_mode()
def _spread(model: Any, batch: torch.Tensor) -> None:
    for name, layer in model.named_modules():
        wanted = [spread for pattern, spread in _SPREAD.items() if re.search(pattern, name)]
        if wanted and isinstance(layer, nn.Conv2d | nn.Linear | nn.ConvTranspose2d):
            layer.register_forward_hook(_ScaledOnce(wanted[0]))
    transform = getattr(model, "transform", None)
    LibraryPipeline(model, 1)(batch) if transform else model(batch)
    for layer in model.modules():
        layer._forward_hooks.clear()


class _ScaledOnce:
    """Scale a layer by its first output.

    Heads are called for each size of features, the largest first; of those of one pixel a kernel sees one in nine.
    """

    def __init__(self, spread: float) -> None:
        self._spread = spread

    def __call__(self, layer: Any, _: object, found: torch.Tensor) -> torch.Tensor | None:
        if not self._spread:
            return None
        bias = layer.bias.reshape(-1, *[1] * (found.dim() - 2)) if layer.bias is not None else 0.0
        factor = self._spread / max(float((found - bias).std()), 1e-30)
        self._spread = 0.0
        layer.weight *= factor
        return (found - bias) * factor + bias
