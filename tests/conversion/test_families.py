"""Architectures of many families convert and verify, with random weights.

One runs with all other tests, a few more with the slow ones (`scripts/test -m slow`); `tests/families` converts, serves
and asks many more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from converting import Convert

from graphkiln_backend.graph.manifest import Manifest


def slow(*names: str) -> list[object]:
    """Parameters that run with the slow tests."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


TORCHVISION = (
    *slow("shufflenet_v2_x1_0", "resnet18", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "swin_t"),
)

TIMM = (
    *slow("resnet10t"),
    *slow("regnety_002", "repvgg_a0", "mobilenetv4_conv_small", "ghostnet_050", "convnext_atto"),
    *slow("vit_tiny_patch16_224", "mixer_s32_224", "levit_128s"),
)


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(run: Convert, name: str) -> None:
    proven(run(f"torchvision:{name}"))


@pytest.mark.parametrize("name", TIMM)
def test_timm(run: Convert, name: str) -> None:
    proven(run(f"timm:{name}"))


TRANSFORMERS = {
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    "swin": {
        "architectures": ["SwinModel"],
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "bert": {
        "architectures": ["BertModel"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 99,
        "max_position_embeddings": 64,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 99,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 99,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers(run: Convert, tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **TRANSFORMERS[kind]}))
    version = run(f"huggingface:{tmp_path}")
    proven(version)
    signature = Manifest.read(version / "manifest.json").signature
    if kind in ("bert", "gpt2", "t5"):
        assert [spec.dtype.value for spec in signature.inputs] == ["INT64", "INT64"]
        assert isinstance(signature.inputs[0].shape[1], str), "the number of tokens does not vary"


def proven(version: Path) -> None:
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.verification[0].verdict.endswith("PASS")
    assert manifest.signature.batchable
