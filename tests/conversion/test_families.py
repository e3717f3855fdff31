"""Conversions of architectures of several families, with random weights: one for each trait that exporters get wrong.

`tests/families` converts and serves a hundred more (`scripts/test -m families`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from converting import Convert

from graphkiln_backend.graph.manifest import Manifest

pytestmark = pytest.mark.slow

CHANNELS_SHUFFLED = "torchvision:shufflenet_v2_x1_0"
GATED_BY_THEIR_MEANS = "torchvision:mobilenet_v3_small"
PADDED_BY_THE_SIZE = "timm:resnet10t"
NORMALIZED_BY_LAYER = "timm:convnext_atto"
SIZE = {"shape": ["3x64x64"]}


@pytest.mark.parametrize("source", [CHANNELS_SHUFFLED, GATED_BY_THEIR_MEANS, PADDED_BY_THE_SIZE, NORMALIZED_BY_LAYER])
def test_convolutions(run: Convert, source: str) -> None:
    proven(run(source, **SIZE))


@pytest.mark.parametrize("source", ["timm:vit_tiny_patch16_224", "timm:levit_128s"])
def test_attention(run: Convert, source: str) -> None:
    proven(run(source))


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


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers(run: Convert, tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **TRANSFORMERS[kind]}))
    version = run(f"huggingface:{tmp_path}")
    proven(version)
    signature = Manifest.read(version / "manifest.json").signature
    if kind in ("bert", "gpt2", "t5"):
        assert [str(spec).partition("[")[0] for spec in signature.inputs] == ["input_ids INT64", "attention_mask INT64"]
        assert isinstance(signature.inputs[0].shape[1], str), "the number of tokens does not vary"


def proven(version: Path) -> None:
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.verification[0].verdict.endswith("PASS")
    assert manifest.signature.batchable
