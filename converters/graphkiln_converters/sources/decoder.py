"""`decoder:DIR_OR_ID`: one decoding step of a T5 from transformers, with the cache as inputs and outputs.

`huggingface:DIR_OR_ID` of the same folder is the encoder. The client keeps the cache: the output `present_key_0` of one
step is the input `past_key_0` of the next. The first step has a past of one masked position; T5 uses relative
positions, so masked ones have no effect. Sequences of different lengths can be batched by padding their pasts on the
left.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec
from graphkiln_converters.sources.huggingface import create, is_without_weights, opened
from graphkiln_converters.sources.pytorch import TorchModel, freeze
from graphkiln_converters.torch_libraries import import_torchvision
from graphkiln_converters.weights import load_weights

import_torchvision()
import transformers  # noqa: E402 - transformers imports torchvision
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache  # noqa: E402 - likewise

# The model type in transformers with relative positions only.
_TYPE = "t5"
_TOKENS, _LEAST_TOKENS, _MOST_TOKENS = 32, 8, 512
_PAST, _MOST_PAST = 8, 64


# transformers' cache layer is only partly typed.
_Layer: Any = DynamicLayer


class _Past(_Layer):  # type: ignore[misc]
    """Self-attention cache of a layer, from the inputs."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return the number of cached positions, without the data-dependent branch of transformers' own method."""
        length: int = self.keys.shape[-2]
        return length


class _Source(_Layer):  # type: ignore[misc]
    """Cross-attention keys and values, which are recomputed at each step and not cached."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values unchanged."""
        return key_states, value_states


def cache_argument(model: Any) -> str:
    """Return the name of a model's cache argument, which transformers 5.24 renamed (5.40 removed the old name)."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class DecoderStep(torch.nn.Module):
    """Decodes one token for each sequence of a batch.

    Args:
        model: An encoder-decoder model of transformers; its encoder is not used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._cache = cache_argument(model)

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute `logits` `[batch, 1, tokens]` and the cache, extended by one position."""
        tokens, mask, states, source_mask, *past = tensors
        pairs = list(zip(past[::2], past[1::2], strict=True))
        layers: list[Any] = [_Past(keys, values) for keys, values in pairs]
        cache = EncoderDecoderCache(Cache(layers=layers), Cache(layers=[_Source() for _ in pairs]))
        found = self.model(
            encoder_outputs=(states,),
            attention_mask=source_mask,
            decoder_input_ids=tokens,
            decoder_attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **{self._cache: cache},
        )
        present: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(layers):
            present |= {f"present_key_{number}": layer.keys, f"present_value_{number}": layer.values}
        return {"logits": found.logits, **present}


def open_source(location: str, recipe: Recipe) -> TorchModel:
    """Open a T5 from a folder or a hub id; a folder without weights gets random ones.

    Raises:
        ConversionError: The model does not exist, or is not a T5.
    """
    with opened(location):
        config = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False)
        if config.model_type != _TYPE:
            raise ConversionError(
                f"'{location}' is a {config.model_type}, and decoder: supports {_TYPE} only",
                hint="wrap one decoding step in a module with the cache as inputs and outputs: python:FILE:FACTORY",
            )
        model = create(location, config, transformers.AutoModelForSeq2SeqLM, complete=True)
    if recipe.weights:
        load_weights(model, recipe.weights)
    model.encoder = torch.nn.Identity()  # exported as a separate graph
    random_weights = is_without_weights(location) and recipe.has_random_weights
    return TorchModel(
        module=freeze(DecoderStep(model)),
        description=f"decoder:{location}",
        named=True,
        random_weights=random_weights,
        libraries=("torch", "transformers"),
        inputs=_inputs(config),
    )


def _inputs(config: Any) -> tuple[InputSpec, ...]:
    """Return the inputs: token, position mask, encoder states and mask, and each layer's keys and values."""
    source = {0: (_LEAST_TOKENS, _MOST_TOKENS)}
    past = {1: (1, _MOST_PAST)}
    shape = (int(config.num_heads), _PAST, int(config.d_kv))
    return (
        InputSpec(name="decoder_input_ids", dtype=DType.INT64, shape=(1,), high=int(config.vocab_size)),
        InputSpec(
            name="decoder_attention_mask", dtype=DType.INT64, shape=(_PAST + 1,), dynamic={0: (2, _MOST_PAST + 1)},
            mask=True,
        ),
        InputSpec(name="encoder_hidden_states", shape=(_TOKENS, int(config.d_model)), dynamic=source),
        InputSpec(name="attention_mask", dtype=DType.INT64, shape=(_TOKENS,), dynamic=source, mask=True),
        *(
            InputSpec(name=f"past_{what}_{number}", shape=shape, dynamic=past)
            for number in range(int(config.num_decoder_layers))
            for what in ("key", "value")
        ),
    )  # fmt: skip
