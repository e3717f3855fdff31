"""`decoder:DIR_OR_ID`: a step of the decoder of a T5 of transformers, whose cache goes in and comes out.

`huggingface:DIR_OR_ID` of the same folder is the encoder. A client keeps the cache between steps: what comes out as
`present_key_0` goes in as `past_key_0` with the next token. The first step has a past of one position that the mask
hides: only distances between positions count in a T5, so that one that is hidden changes nothing. So may sequences of
different lengths be computed in one batch: their pasts are filled up in front.
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

# Of transformers' models that know positions by their distance alone.
_TYPE = "t5"
_TOKENS, _LEAST_TOKENS, _MOST_TOKENS = 32, 8, 512
_PAST, _MOST_PAST = 8, 64


# Half of its methods say no types.
_Layer: Any = DynamicLayer


class _Past(_Layer):  # type: ignore[misc]
    """The cache of a layer's own attention, as it came in."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Positions so far; transformers' own asks whether there is any element, which no export can follow."""
        length: int = self.keys.shape[-2]
        return length


class _Source(_Layer):  # type: ignore[misc]
    """Keys and values of the encoder's states: computed at each step, and not kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As they are."""
        return key_states, value_states


def cache_argument(model: Any) -> str:
    """Name of a transformers model's cache argument: 5.24 renamed it, and 5.40 no longer knows the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class DecoderStep(torch.nn.Module):
    """One token for each sequence of a batch.

    Args:
        model: An encoder-decoder of transformers; its encoder is not used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._cache = cache_argument(model)

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs in order -> `logits` `[batch, 1, tokens]`, and the cache, longer by one position."""
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
    """Open a folder (or a hub's id) with a T5; a folder without weights gets random ones.

    Raises:
        ConversionError: There is no such model, or it has no decoder whose positions are distances.
    """
    with opened(location):
        config = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False)
        if config.model_type != _TYPE:
            raise ConversionError(
                f"'{location}' is a {config.model_type}: decoder: takes a {_TYPE}",
                hint="wrap one step of yours in a module that takes and return its cache: python:FILE:FACTORY",
            )
        model = create(location, config, transformers.AutoModelForSeq2SeqLM, complete=True)
    if recipe.weights:
        load_weights(model, recipe.weights)
    model.encoder = torch.nn.Identity()  # its weights are another graph's
    random_weights = is_without_weights(location) and recipe.has_random_weights
    return TorchModel(
        module=freeze(DecoderStep(model)),
        description=f"decoder:{location}",
        random_weights=random_weights,
        libraries=("torch", "transformers"),
        inputs=_inputs(config),
    )


def _inputs(config: Any) -> tuple[InputSpec, ...]:
    """One token, which positions count, the encoder's states and mask, keys and values of each layer."""
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
