"""Segmenters of transformers' classes with per-pixel classes and few random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
import transformers as hf  # noqa: E402 - transformers imports torchvision

_VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
_SQUARE = (64, 64)


def makers(labels: int, size: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """Function that makes a model of each type, for a number of classes and a `(height, width)` in pixels."""
    told = {"num_labels": labels}
    return {
        "beit": lambda: _beit("Beit", image_size=list(size), out_indices=[1, 2, 3, 4], **told),
        "data2vec-vision": lambda: _beit("Data2VecVision", image_size=_SQUARE[0], out_indices=(1, 2, 3, 4), **told),
        "dpt": lambda: _dpt(**told),
        "mobilenet_v2": lambda: _made("MobileNetV2", depth_multiplier=0.1, finegrained_output=False, **told),
        "mobilevit": lambda: _mobilevit(**told),
        "mobilevitv2": lambda: _mobilevitv2(**told),
        "sapiens2": lambda: _sapiens2(image_size=list(size), **told),
        "tipsv2_dpt": lambda: _tipsv2_dpt(**told),
    }


# Model type -> the image processor that its checkpoints come with, by the beginning of its name.
PROCESSORS = {
    "segformer": "Segformer",
    "upernet": "Segformer",
    "maskformer": "MaskFormer",
    "mask2former": "Mask2Former",
    "beit": "Beit",
    "data2vec-vision": "Beit",
    "dpt": "DPT",
    "mobilenet_v2": "MobileNetV2",
    "mobilevit": "MobileViT",
    "mobilevitv2": "MobileViT",
    "sapiens2": "Sapiens2",
    "tipsv2_dpt": "Tipsv2Dpt",
}


def processor_of(kind: str, **options: Any) -> Any:
    """Image processor of a type, Pillow's if it has one."""
    name = PROCESSORS[kind]
    made = getattr(hf, f"{name}ImageProcessorPil", None) or getattr(hf, f"{name}ImageProcessor")
    return made(**options)


def size_of(kind: str, usual: tuple[int, int]) -> tuple[int, int]:
    """`(height, width)` of a model's input; some types need squares."""
    return _SQUARE if kind in ("data2vec-vision", "dpt", "tipsv2_dpt") else usual


def balance_classes(model: Any, batch: torch.Tensor, labels: int) -> None:
    """Shift the mean of each class to 0: with random scores one class is best nearly everywhere."""
    kinds = (nn.Conv2d, nn.Linear)
    layers = [each for each in model.modules() if isinstance(each, kinds) and _outputs_of(each) == labels]
    with torch.no_grad():
        layers[-1].bias -= model(pixel_values=batch).logits.mean((0, 2, 3))


def revive(model: nn.Module) -> None:
    """Reset normalizations that suppress nearly everything."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.ones_(layer.weight)


def _outputs_of(layer: nn.Conv2d | nn.Linear) -> int:
    """Outputs of a layer whose bias can be shifted."""
    return 0 if layer.bias is None else int(layer.weight.shape[0])


def _made(name: str, **options: Any) -> Any:
    config = getattr(hf, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    return getattr(hf, f"{name}ForSemanticSegmentation")(config)


def _beit(name: str, **options: Any) -> Any:
    small = {**_VIT, "intermediate_size": 16, "use_relative_position_bias": True, "use_auxiliary_head": False}
    return _made(name, **small, pool_scales=[1, 2, 3], **options)  # 2 and 3 do not divide its features


def _dpt(**options: Any) -> Any:
    return _made(
        "DPT",
        **_VIT,
        intermediate_size=16,
        image_size=_SQUARE[0],
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8] * 4,
        fusion_hidden_size=8,
        use_auxiliary_head=False,
        **options,
    )


def _mobilevit(**options: Any) -> Any:
    return _made(
        "MobileViT",
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 16],
        num_attention_heads=2,
        expand_ratio=1.0,
        aspp_out_channels=16,
        **options,
    )


def _mobilevitv2(**options: Any) -> Any:
    return _made(
        "MobileViTV2",
        base_attn_unit_dims=[64, 64, 64],
        n_attn_blocks=[1, 1, 1],
        width_multiplier=0.25,
        aspp_out_channels=16,
        **options,
    )


def _sapiens2(**options: Any) -> Any:
    head = hf.Sapiens2HeadConfig(upsample_out_channels=[8], conv_out_channels=[8])
    return _made("Sapiens2", **_VIT, intermediate_size=16, num_register_tokens=2, head_config=head, **options)


def _tipsv2_dpt(**options: Any) -> Any:
    backbone = hf.Tipsv2VisionConfig(
        **_VIT,
        mlp_ratio=1,
        image_size=_SQUARE[0],
        patch_size=16,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    return _made("Tipsv2Dpt", backbone_config=backbone, neck_hidden_sizes=[8] * 4, fusion_hidden_size=8, **options)
