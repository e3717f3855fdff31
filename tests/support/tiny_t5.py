"""A T5 of a few thousand weights of transformers' classes, its cache as clients keep it, and greedy generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
import transformers as hf  # noqa: E402 - transformers imports torchvision

WORDS, LAYERS, HEADS, DEPTH, WIDTH = 50, 2, 2, 8, 16
START = 0
Tensors = Mapping[str, AnyArray]


def save(folder: Path) -> Path:
    """Write the folder of a model whose weights differ enough for distinct tokens."""
    torch.manual_seed(6)
    config = hf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=DEPTH, d_ff=32, num_layers=LAYERS, num_heads=HEADS,
        decoder_start_token_id=START, pad_token_id=START, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = hf.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    """Load the whole model in evaluation mode."""
    return hf.T5ForConditionalGeneration.from_pretrained(folder).eval()


def generate(model: Any, tokens: AnyArray, mask: AnyArray, count: int) -> AnyArray:
    """Greedy generation by transformers, INT64 `[rows, count]`: no sequence ends early."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        found = model.generate(
            input_ids=torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask), max_new_tokens=count,
            do_sample=False, num_beams=1,
        )  # fmt: skip
    generated: AnyArray = found.numpy()[:, 1:]
    return generated


def hidden_past(rows: int, length: int = 1, seed: int | None = None) -> dict[str, AnyArray]:
    """Masked past of the first step: zeros or random numbers, `[rows, heads, length, depth]`."""
    shape = (rows, HEADS, length, DEPTH)
    names = [f"past_{what}_{layer}" for layer in range(LAYERS) for what in ("key", "value")]
    if seed is None:
        return {name: np.zeros(shape, np.float32) for name in names}
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name in names}


def next_past(found: Tensors) -> dict[str, AnyArray]:
    """Past of the next step, from the cache that a step returned."""
    return {name.replace("present", "past"): array for name, array in found.items() if name.startswith("present")}


def generate_by_steps(
    encode: Callable[[Tensors], Tensors],
    step: Callable[[Tensors], Tensors],
    tokens: AnyArray,
    mask: AnyArray,
    count: int,
) -> AnyArray:
    """Greedy generation over two graphs, INT64 `[rows, count]`.

    Args:
        encode: Runs the encoder.
        step: Runs a step of the decoder.
        tokens: Of the source, INT64 `[rows, tokens]`.
        mask: Of the source.
        count: How many tokens to generate.
    """
    rows = len(tokens)
    states = encode({"input_ids": tokens, "attention_mask": mask})["last_hidden_state"]
    cache, seen = hidden_past(rows), np.zeros((rows, 1), np.int64)
    current, generated = np.full((rows, 1), START, np.int64), list[AnyArray]()
    for _ in range(count):
        seen = np.concatenate([seen, np.ones((rows, 1), np.int64)], axis=1)
        found = step(
            {
                "decoder_input_ids": current, "decoder_attention_mask": seen, "encoder_hidden_states": states,
                "attention_mask": mask, **cache,
            }
        )  # fmt: skip
        current, cache = found["logits"].argmax(axis=-1), next_past(found)
        generated.append(current)
    return np.concatenate(generated, axis=1)
