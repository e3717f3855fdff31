"""The architectures that are converted, served and asked: the smallest of each family, in small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture.

    Attributes:
        library: `timm`, `torchvision` or `transformers`.
        name: The library's name of it; for transformers the class.
        side: Height and width of its images in pixels; 0 where it reads texts.
        config: Of transformers: what differs from the defaults.
    """

    library: str
    name: str
    side: int
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.library}:{self.name}"


_TIMM = {
    64: "resnet10t resnet34 resnetv2_50 resnext26ts seresnet33ts skresnet18 res2net50_14w_8s resnest14d nf_resnet26 "
    "regnetx_002 regnety_002 repvgg_a0 mobilenetv2_035 mobilenetv3_small_050 mobilenetv4_conv_small ghostnet_050 "
    "efficientnet_lite0 tf_efficientnetv2_b0 tinynet_e mnasnet_small mixnet_s fbnetc_100 lcnet_035 hardcorenas_a "
    "rexnet_100 densenet121 dla34 dpn68 vgg11 xception41 hrnet_w18_small selecsls42b cspresnet50 darknet17 vovnet39a "
    "gernet_s convnext_atto convnextv2_atto inception_next_atto poolformer_s12 caformer_s18 edgenext_xx_small "
    "mobileone_s0 repvit_m0_9 efficientvit_b0 hgnetv2_b0",
    128: "inception_v3 fastvit_t8",
    224: "vit_tiny_patch16_224 deit_tiny_patch16_224 pit_ti_224 mixer_s32_224 gmlp_ti16_224 resmlp_12_224 levit_128s "
    "visformer_tiny coat_lite_tiny efficientformer_l1 swin_tiny_patch4_window7_224",
    240: "crossvit_tiny_240",
}
_TORCHVISION = {
    64: "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet mnasnet0_5 mobilenet_v2 mobilenet_v3_small "
    "regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x1_0 squeezenet1_1 swin_t swin_v2_t vgg11_bn "
    "wide_resnet50_2",
    128: "inception_v3",
    224: "maxvit_t vit_b_16",
}
_PATCHES = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_STAGES = {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_TOKENS = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 99,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}
_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": _PATCHES,
    "DeiTForImageClassification": _PATCHES,
    "BeitForImageClassification": _PATCHES,
    "Dinov2ForImageClassification": {**_PATCHES, "mlp_ratio": 2},
    "SwinForImageClassification": {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4
    },
    "ConvNextForImageClassification": _STAGES,
    "ConvNextV2ForImageClassification": _STAGES,
    "ResNetForImageClassification": {"embedding_size": 8, **_STAGES, "layer_type": "basic"},
    "RegNetForImageClassification": {"embedding_size": 8, **_STAGES, "groups_width": 8},
    "SegformerForImageClassification": {
        "image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]
    },
    "MobileViTForImageClassification": {
        "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]
    },
    "BertForSequenceClassification": _TOKENS,
    "RobertaForSequenceClassification": _TOKENS,
    "ElectraForSequenceClassification": {**_TOKENS, "embedding_size": 32},
    "AlbertModel": {**_TOKENS, "embedding_size": 32},
    "MPNetModel": _TOKENS,
    "DistilBertForSequenceClassification": {
        "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 99, "max_position_embeddings": 66
    },
    "GPT2LMHeadModel": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "LlamaForCausalLM": {**_TOKENS, "num_key_value_heads": 2},
    "T5EncoderModel": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 99},
}  # fmt: skip


def _of(library: str, names: dict[int, str]) -> list[Architecture]:
    return [Architecture(library=library, name=name, side=side) for side in names for name in names[side].split()]


ARCHITECTURES: tuple[Architecture, ...] = (
    *_of("timm", _TIMM),
    *_of("torchvision", _TORCHVISION),
    *(
        Architecture(library="transformers", name=name, side=config.get("image_size", 0), config=tuple(config.items()))
        for name, config in _TRANSFORMERS.items()
    ),
)
