"""Detectors and segmenters of transformers' classes with a few thousand random weights that find something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_segmenters
import torch

from graphkiln_converters.sources import huggingface_tasks
from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
import transformers as hf  # noqa: E402 - transformers imports torchvision

LABELS = 4
SIZE = (64, 96)
_QUERIES = 12
_SMALL = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}


def tiny_model(kind: str, **changes: Any) -> Any:
    """Make a model in evaluation mode, by transformers' name of its type."""
    torch.manual_seed(0)
    model = _MAKERS[kind](**changes).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        with torch.no_grad():
            if parameter.dim() > 1:
                spread = 1.5 / parameter[0].numel() ** 0.5
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    if hasattr(model, "class_predictor"):
        _spread_classes(model)
    if kind == "lw_detr":
        _calm_boxes(model)
    if kind in _PIXEL_SEGMENTERS:
        tiny_segmenters.revive(model)
        tiny_segmenters.balance_classes(model, images(2, tiny_segmenters.size_of(kind, SIZE)), LABELS)
    return model.requires_grad_(requires_grad=False)


def _calm_boxes(model: Any) -> None:
    """Reduce the sizes of random boxes, which otherwise exceed the image."""
    for name, parameter in model.named_parameters():
        if "bbox" in name and ".layers.2." in name:
            parameter.data *= 0.1


def save_model(kind: str, folder: Path, **changes: Any) -> str:
    """Save a model and its image processor with its library; return the shape of a sample."""
    tiny_model(kind, **changes).save_pretrained(folder)
    names = {**huggingface_tasks._SOFTMAX, **huggingface_tasks._FOCAL}
    made = huggingface_tasks._processor(names[kind]) if kind in names else tiny_segmenters.processor_of(kind)
    made.save_pretrained(folder)
    height, width = tiny_segmenters.size_of(kind, SIZE)
    return f"3x{height}x{width}"


def _spread_classes(model: Any) -> None:
    """Remove what random queries have in common, which would make all of them one class."""
    model.class_predictor.weight.data *= 20
    with torch.no_grad():
        model.class_predictor.bias -= model(pixel_values=images(2)).class_queries_logits.mean((0, 1))


def images(count: int, size: tuple[int, int] = SIZE) -> torch.Tensor:
    """FP32 `[count, 3, height, width]`."""
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(2))


def _resnet(*stages: str) -> Any:
    return hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, layer_type="basic", out_features=list(stages)
    )


def _queries(name: str, stages: tuple[str, ...], **own: Any) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        config = getattr(hf, f"{name}Config")(
            **{
                "backbone_config": _resnet(*stages),
                "use_timm_backbone": False,
                "num_queries": _QUERIES,
                "num_labels": LABELS,
                **_SMALL,
                **own,
                **changes,
            }
        )
        config._attn_implementation = "eager"
        return getattr(hf, f"{name}ForObjectDetection")(config)

    return make


def _rt_detr_backbone() -> Any:
    return hf.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1] * 4,
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def _hgnet() -> Any:
    return hf.HGNetV2Config(
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 8, 8, 16],
        stage_mid_channels=[8] * 4,
        stage_out_channels=[8, 8, 16, 16],
        stage_num_blocks=[1] * 4,
        stage_numb_of_layers=[1] * 4,
        stage_kernel_size=[3] * 4,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1] * 4,
        out_features=["stage2", "stage3", "stage4"],
    )


_PYRAMID = {
    "encoder_hidden_dim": 16,
    "encoder_in_channels": [8, 16, 16],
    "encoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_in_channels": [16] * 3,
    "decoder_attention_heads": 2,
}
_LIGHT = {
    "c2f_num_blocks": 1,
    "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 2,
    "decoder_n_points": 2,
    "group_detr": 1,
}


def _transformer(name: str, backbone: Callable[[], Any], kind: dict[str, Any], **own: Any) -> Callable[..., Any]:
    """RT-DETR and similar (three levels of features), or LW-DETR and RF-DETR (a vision transformer and a decoder)."""
    shared = {"d_model": 16, "decoder_ffn_dim": 16, "decoder_layers": 1, "num_queries": _QUERIES, "num_labels": LABELS}

    def make(**changes: Any) -> Any:
        config = getattr(hf, f"{name}Config")(**{"backbone_config": backbone(), **shared, **kind, **own, **changes})
        config._attn_implementation = "eager"
        return getattr(hf, f"{name}ForObjectDetection")(config)

    return make


_SMALL_VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 1, "patch_size": 16}


def _lw_backbone() -> Any:
    return hf.LwDetrViTConfig(
        **_SMALL_VIT,
        image_size=64,
        pretrain_image_size=64,
        num_windows=4,
        window_block_indices=[0],
        out_features=["stage1", "stage2"],
    )


def _rf_backbone() -> Any:
    return hf.RfDetrDinov2Config(**_SMALL_VIT, image_size=64, num_windows=1, out_features=["stage1", "stage2"])


def _yolos(**changes: Any) -> Any:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    own = {"image_size": list(SIZE), "patch_size": 16, "num_detection_tokens": _QUERIES, "num_labels": LABELS}
    config = hf.YolosConfig(**{**small, **own, **changes})
    config._attn_implementation = "eager"
    return hf.YolosForObjectDetection(config)


def _segformer() -> Any:
    config = hf.SegformerConfig(
        depths=[1] * 4,
        hidden_sizes=[8] * 4,
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
        mlp_ratios=[1] * 4,
        num_labels=LABELS,
    )
    return hf.SegformerForSemanticSegmentation(config)


def _swin() -> Any:
    return hf.SwinConfig(
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        image_size=64,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def _maskformer() -> Any:
    decoder = hf.DetrConfig(num_queries=6, use_timm_backbone=False, backbone_config=_resnet("stage4"), **_SMALL)
    config = hf.MaskFormerConfig(
        backbone_config=_swin(), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, num_labels=LABELS
    )
    return hf.MaskFormerForInstanceSegmentation(config)


def _mask2former() -> Any:
    config = hf.Mask2FormerConfig(
        backbone_config=_swin(),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=6,
        num_labels=LABELS,
    )
    return hf.Mask2FormerForUniversalSegmentation(config)


def _upernet() -> Any:
    backbone = _resnet("stage1", "stage2", "stage3", "stage4")
    config = hf.UperNetConfig(
        backbone_config=backbone, hidden_size=8, pool_scales=[1, 2], use_auxiliary_head=False, num_labels=LABELS
    )
    return hf.UperNetForSemanticSegmentation(config)


DETECTORS = (
    "detr",
    "yolos",
    "conditional_detr",
    "dab-detr",
    "deformable_detr",
    "table-transformer",
    "rt_detr",
    "rt_detr_v2",
    "d_fine",
    "deimv2",
    "lw_detr",
    "rf_detr",
)
_PIXEL_SEGMENTERS = tiny_segmenters.makers(LABELS, SIZE)
SEGMENTERS = ("segformer", "upernet", "maskformer", "mask2former", *_PIXEL_SEGMENTERS)
_LEVELS = ("stage2", "stage3", "stage4")
_MAKERS: dict[str, Callable[..., Any]] = {
    "detr": _queries("Detr", ("stage4",)),
    "conditional_detr": _queries("ConditionalDetr", ("stage4",)),
    "deformable_detr": _queries("DeformableDetr", _LEVELS, num_feature_levels=3, d_model=32, decoder_layers=2),
    "dab-detr": _queries("DabDetr", ("stage4",), hidden_size=16),
    "table-transformer": _queries("TableTransformer", ("stage4",)),
    "rt_detr": _transformer("RTDetr", _rt_detr_backbone, _PYRAMID),
    "rt_detr_v2": _transformer("RTDetrV2", _rt_detr_backbone, _PYRAMID, decoder_layers=2),
    "d_fine": _transformer("DFine", _hgnet, _PYRAMID, decoder_layers=2, lqe_hidden_dim=8),
    "deimv2": _transformer("Deimv2", _hgnet, _PYRAMID, decoder_layers=2, lqe_hidden_dim=8),
    "lw_detr": _transformer("LwDetr", _lw_backbone, _LIGHT, projector_scale_factors=[1.0]),
    "rf_detr": _transformer("RfDetr", _rf_backbone, _LIGHT),
    "yolos": _yolos,
    "segformer": _segformer,
    "upernet": _upernet,
    "maskformer": _maskformer,
    "mask2former": _mask2former,
    **_PIXEL_SEGMENTERS,
}
