"""Decoding steps of a T5, compared with the model without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_t5
import torch
from recipes import recipe

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.decoder import open_source

OPTIONS = recipe()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_t5.save(tmp_path_factory.mktemp("t5"))


def test_inputs_of_a_step(folder: Path) -> None:
    specs = open_source(str(folder), OPTIONS).inputs
    assert [spec.name for spec in specs] == [
        *("decoder_input_ids", "decoder_attention_mask", "encoder_hidden_states", "attention_mask"),
        *("past_key_0", "past_value_0", "past_key_1", "past_value_1"),
    ]
    assert [spec.shape for spec in specs[:5]] == [(1,), (9,), (32, 16), (32,), (2, 8, 8)]
    assert specs[0].high == tiny_t5.WORDS
    assert specs[4].dynamic == {1: (1, 64)}
    assert specs[1].dynamic == {0: (2, 65)}


@pytest.mark.parametrize("hidden", [1, 3])
def test_steps_compute_what_the_model_computes_at_once(folder: Path, hidden: int) -> None:
    """The masked part of the first past has no effect."""
    model: Any = tiny_t5.load(folder)
    random = np.random.default_rng(3)
    states = random.standard_normal((2, 10, 16)).astype(np.float32)
    source_mask = np.array([[1] * 10, [1] * 7 + [0] * 3])
    tokens = random.integers(1, tiny_t5.WORDS, (2, 4))
    with torch.inference_mode():
        expected = model(
            encoder_outputs=(torch.from_numpy(states),),
            attention_mask=torch.from_numpy(source_mask),
            decoder_input_ids=torch.from_numpy(tokens),
        ).logits.numpy()
    source = open_source(str(folder), OPTIONS)
    cache: dict[str, AnyArray] = tiny_t5.hidden_past(rows=2, length=hidden, seed=4)
    mask = np.array([[0] * hidden] * 2)
    for position in range(tokens.shape[1]):
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)
        found = source.run(
            {
                "decoder_input_ids": tokens[:, position : position + 1],
                "decoder_attention_mask": mask,
                "encoder_hidden_states": states,
                "attention_mask": source_mask,
                **cache,
            }
        )
        np.testing.assert_allclose(found["logits"][:, 0], expected[:, position], rtol=1e-4, atol=1e-5)
        cache = tiny_t5.next_past(found)
    assert cache["past_key_0"].shape == (2, 2, hidden + 4, 8)


def test_another_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart"}))
    with pytest.raises(ConversionError, match="is a bart, and decoder: supports t5 only") as caught:
        open_source(str(tmp_path), OPTIONS)
    assert "python:FILE:FACTORY" in caught.value.hint


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="transformers cannot open"):
        open_source(str(tmp_path / "none"), OPTIONS)


def test_an_encoder_without_decoder_is_refused(folder: Path, tmp_path: Path) -> None:
    tiny_t5.hf.T5EncoderModel.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match=r"lacks .*decoder"):
        open_source(str(tmp_path), OPTIONS)
