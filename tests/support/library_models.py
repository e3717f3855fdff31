"""Small models of OneFlow's library, made by transformers' and timm's classes with random weights.

LiBai has BERT, GPT-2, T5, ViT, Swin, MoCo v3 and MAE. Each is made small, for tests, or of its usual size; its weights
travel as a file, and its outputs are computed by its library: what a conversion is compared with has not passed through
our sources.

Source: Oneflow-Inc/libai, "Supported Models" (the list).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.repository.version import ModelVersion, read_version
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe_file import read_recipe
from graphkiln_converters.torch_libraries import import_torchvision

_ROWS, _TOKENS, _PAST = 3, 11, 5
_TEMPERATURE = 10_000.0
Arrays = dict[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Model ready for conversion.

    Attributes:
        source: What `graphkiln convert` takes.
        options: Further keys of the recipe.
        feeds: Inputs of three samples by the source's names.
        expected: What the library computes from them.
    """

    source: str
    feeds: Arrays
    expected: Arrays
    options: Mapping[str, Any] = field(default_factory=dict)


# Folder for its files, whether it is to be small -> the model.
Make = Callable[[Path, bool], Made]

_PATCHES = {
    "image_size": 32, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128,
}  # fmt: skip
_WORDS = 99


def _text_model(kind: str, outputs: tuple[str, ...], small: Mapping[str, Any], folder: Path, is_small: bool) -> Made:
    module = _transformers_model(kind, small if is_small else {})
    module.save_pretrained(folder)
    feeds = _texts(int(module.config.vocab_size))
    returned = _compute(module, feeds)
    return Made(
        source=f"huggingface:{folder}", feeds=feeds, expected={name: returned[name].numpy() for name in outputs}
    )


def _image_model(kind: str, small: Mapping[str, Any], folder: Path, is_small: bool) -> Made:
    module = _transformers_model(kind, small if is_small else {})
    module.save_pretrained(folder)
    feeds = {"pixel_values": _normal(_ROWS, 3, *[module.config.image_size] * 2)}
    return Made(
        source=f"huggingface:{folder}", feeds=feeds, expected={"logits": _compute(module, feeds)["logits"].numpy()}
    )


_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": _WORDS}


def _t5_encoder(folder: Path, is_small: bool) -> Made:
    model = _transformers_model("T5ForConditionalGeneration", _T5 if is_small else {})
    model.save_pretrained(folder)
    feeds = _texts(int(model.config.vocab_size))
    states = _compute(model.encoder, feeds)["last_hidden_state"]
    return Made(source=f"huggingface:{folder}", feeds=feeds, expected={"last_hidden_state": states.numpy()})


def _t5_decoder(folder: Path, is_small: bool) -> Made:
    from graphkiln_converters.sources.decoder import cache_argument  # brings transformers

    model = _transformers_model("T5ForConditionalGeneration", _T5 if is_small else {})
    model.save_pretrained(folder)
    config = model.config
    shape = (_ROWS, config.num_heads, _PAST, config.d_kv)
    layers = range(config.num_decoder_layers)
    past = {
        f"past_{what}_{layer}": _normal(*shape, seed=2 * layer + (what == "value"))
        for layer in layers
        for what in ("key", "value")
    }
    mask = np.ones((_ROWS, _PAST + 1), np.int64)
    mask[1, :2] = 0
    feeds = {
        "decoder_input_ids": np.arange(3, 3 + _ROWS)[:, None],
        "decoder_attention_mask": mask,
        "encoder_hidden_states": _normal(_ROWS, _TOKENS, config.d_model),
        "attention_mask": _mask(),
        **past,
    }
    caches = _transformers()
    own = caches.DynamicCache([_pair(past, layer) for layer in layers])
    cache = {cache_argument(model): caches.EncoderDecoderCache(own, caches.DynamicCache()), "use_cache": True}
    given = ("attention_mask", "decoder_input_ids", "decoder_attention_mask")
    tensors = {name: torch.from_numpy(feeds[name]) for name in given}
    with torch.inference_mode():
        states = torch.from_numpy(feeds["encoder_hidden_states"])
        found = model(encoder_outputs=(states,), **cache, **tensors)
    present = {
        f"present_{what}_{number}": getattr(layer, f"{what}s").numpy()
        for number, layer in enumerate(own.layers)
        for what in ("key", "value")
    }
    return Made(source=f"decoder:{folder}", feeds=feeds, expected={"logits": found.logits.numpy(), **present})


def _pair(past: Arrays, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(past[f"past_key_{layer}"]), torch.from_numpy(past[f"past_value_{layer}"])


def _moco(folder: Path, is_small: bool) -> Made:
    """Backbone of MoCo v3: a ViT with sine-cosine positions and a fixed patch projection.

    Source: X. Chen et al., "An Empirical Study of Training Self-Supervised Vision Transformers", 2021, section 4.
    """
    name = "vit_tiny_patch16_224" if is_small else "vit_base_patch16_224"
    torch.manual_seed(7)
    module: Any = _timm().create_model(name).eval()
    vary(module)
    width, side = module.embed_dim, module.patch_embed.grid_size[0]
    with torch.no_grad():
        module.pos_embed.copy_(torch.from_numpy(sine_positions(side, width)))
    module.patch_embed.proj.requires_grad_(requires_grad=False)
    torch.save(module.state_dict(), folder / "moco.pth")
    feeds = {"image": _normal(_ROWS, 3, 224, 224)}
    with torch.inference_mode():
        expected = module(torch.from_numpy(feeds["image"])).numpy()
    return Made(
        source=f"timm:{name}", feeds=feeds, expected={"output": expected}, options={"weights": folder / "moco.pth"}
    )


def sine_positions(side: int, width: int) -> AnyArray:
    """Positions of a grid of patches and of the token before them, FP32 `[1, 1 + side * side, width]`.

    Args:
        side: Of the grid.
        width: A multiple of 4.
    """
    down, right = np.divmod(np.arange(side * side), side)
    frequencies = _TEMPERATURE ** -(np.arange(width // 4) / (width // 4))
    angles = [np.outer(each, frequencies) for each in (right, down)]
    grid = np.concatenate([turn(angle) for angle in angles for turn in (np.sin, np.cos)], axis=1)
    table: AnyArray = np.concatenate([np.zeros((1, width)), grid])[None].astype(np.float32)
    return table


class MaskedAutoencoder(nn.Module):
    """The whole of MAE: from pixels, and the noise that selects hidden patches, to the pixels of all patches.

    Args:
        config: Of `ViTMAEConfig`, what differs from the base.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        settings = _transformers().ViTMAEConfig(**config)
        settings._attn_implementation = "eager"
        self.model = _transformers().ViTMAEForPreTraining(settings)

    def forward(self, pixel_values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """`[batch, 3, side, side]`, `[batch, patches]` -> `[batch, patches, pixels of a patch]`."""
        found: torch.Tensor = self.model(pixel_values=pixel_values, noise=noise).logits
        return found


_SMALL_MAE = {
    **_PATCHES, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 64,
}  # fmt: skip


def make_mae() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make the module of its usual size, and an example."""
    return MaskedAutoencoder({}), {"pixel_values": torch.zeros(2, 3, 224, 224), "noise": torch.zeros(2, 196)}


def make_small_mae() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make a small module, and an example."""
    return MaskedAutoencoder(_SMALL_MAE), {"pixel_values": torch.zeros(2, 3, 32, 32), "noise": torch.zeros(2, 16)}


def _mae(folder: Path, is_small: bool) -> Made:
    factory = make_small_mae if is_small else make_mae
    torch.manual_seed(7)
    module, example = factory()
    vary(module.eval())
    torch.save(module.state_dict(), folder / "mae.pth")
    feeds = {name: _normal(_ROWS, *tensor.shape[1:]) for name, tensor in example.items()}
    with torch.inference_mode():
        expected = module(**{name: torch.from_numpy(array) for name, array in feeds.items()}).numpy()
    return Made(
        source=f"python:{Path(__file__).resolve()}:{factory.__name__}",
        feeds=feeds,
        expected={"output": expected},
        options={"weights": folder / "mae.pth"},
    )


# Name -> function that makes the model.
MODELS: dict[str, Make] = {
    "BERT": partial(
        _text_model,
        "BertModel",
        ("last_hidden_state", "pooler_output"),
        {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
            "vocab_size": _WORDS,
        },
    ),
    "GPT-2": partial(
        _text_model,
        "GPT2LMHeadModel",
        ("logits",),
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": _WORDS, "n_positions": 64},
    ),
    "T5 encoder": _t5_encoder,
    "T5 decoder": _t5_decoder,
    "ViT": partial(_image_model, "ViTForImageClassification", _PATCHES),
    "Swin": partial(
        _image_model,
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "MoCo v3": _moco,
    "MAE": _mae,
}  # fmt: skip


def _transformers_model(kind: str, config: Mapping[str, Any]) -> Any:
    torch.manual_seed(7)
    factory: Any = getattr(_transformers(), kind)
    settings = factory.config_class(**config)
    settings._attn_implementation = "eager"
    module = factory(settings).eval()
    vary(module)
    return module


def _transformers() -> Any:
    import_torchvision()
    import transformers  # seconds, and it imports torchvision

    return transformers


def _timm() -> Any:
    import_torchvision()
    import timm  # likewise

    return timm


def vary(module: nn.Module) -> None:
    """Randomize constants, such as zero biases, so that they affect the outputs."""
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(0.1 * torch.rand_like(tensor))


def _compute(module: Any, feeds: Arrays) -> Any:
    with torch.inference_mode():
        return module(**{name: torch.from_numpy(array) for name, array in feeds.items()}, return_dict=True)


def _texts(words: int) -> Arrays:
    ids = np.random.default_rng(3).integers(3, words, (_ROWS, _TOKENS))
    return {"input_ids": ids, "attention_mask": _mask()}


def _mask() -> AnyArray:
    """Attention mask in which one text is shorter."""
    mask = np.ones((_ROWS, _TOKENS), np.int64)
    mask[1, -4:] = 0
    return mask


def _normal(*shape: int, seed: int = 3) -> AnyArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def convert_made(made: Made, name: str, store: Path) -> ModelVersion:
    """Convert a model with its own tensor names.

    Args:
        made: The model.
        name: Its name; characters that no model may have are left out.
        store: The folder of models.

    Raises:
        GraphkilnError: It cannot be converted, or the graph computes something else.
    """
    legal = re.sub(r"[^a-z0-9]+", "-", name.lower())
    values = {"source": made.source, "name": legal, "model_store": store, "keep_names": True, **made.options}
    return read_version(convert(read_recipe(None, values, []), command=f"convert {made.source}"))


def difference(found: Mapping[str, AnyArray], expected: Mapping[str, AnyArray]) -> float:
    """Largest relative L2 of all expected outputs; 0 for equal bits.

    Raises:
        ValueError: An output is missing, has another shape, or is expected to be all zeros.
    """
    errors = []
    for name, array in expected.items():
        norm = float(np.linalg.norm(array))
        if name not in found or found[name].shape != array.shape or not norm:
            raise ValueError(f"output '{name}' cannot be compared")
        apart = found[name].astype(np.float64) - array.astype(np.float64)
        errors.append(float(np.linalg.norm(apart)) / norm)
    return max(errors)
