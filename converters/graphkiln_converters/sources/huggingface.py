"""`huggingface:DIR_OR_ID`: image and text encoders of transformers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.preprocess import Interpolation, Letterbox, Preprocess
from graphkiln_backend.graph.task import Detection
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec, image_shape
from graphkiln_converters.sources.huggingface_tasks import (
    check_takes_images_alone,
    image_task,
    takes_images_of_any_size,
)
from graphkiln_converters.sources.pytorch import TorchModel, freeze
from graphkiln_converters.torch_libraries import import_torchvision
from graphkiln_converters.weights import load_weights

import_torchvision()
os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")  # keep its shape checks out of the graph
import transformers  # noqa: E402 - transformers imports torchvision
from transformers.image_processing_backends import PilBackend  # noqa: E402

_TOKENS = 32
_LEAST_TOKENS, _MOST_TOKENS = 8, 512
# Ends of the names of models whose classes have names.
_NAMED = ("Classification", "Detection", "Segmentation")
# Outputs of transformers models to serve.
_SERVED = (
    "logits",
    "last_hidden_state",
    "pooler_output",
    "image_embeds",
    "text_embeds",
    "predicted_depth",
    "field_of_view",
)


def open_source(location: str, recipe: Recipe) -> TorchModel:
    """Open a model from a folder with `config.json`, or a hub id; a folder without weights gets random ones.

    Raises:
        ConversionError: The model does not exist, or is neither an image nor a text encoder.
    """
    with opened(location):
        config = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False)
        check_takes_images_alone(config, location)
        model = _model(location, config)
    if recipe.weights:
        load_weights(model, recipe.weights)
    inputs, preprocess = _inputs(model, config, location, recipe)
    labels = getattr(config, "id2label", None) or {}
    shape = inputs[0].shape
    own = image_task(freeze(model), (shape[-2], shape[-1]), recipe.task) if len(inputs) == 1 else None
    module = own.module if own else _Encoder(model, [spec.name for spec in inputs])
    random_weights = is_without_weights(location) and recipe.has_random_weights
    return TorchModel(
        module=freeze(module),
        reference=own.reference.eval() if own and own.reference else None,
        task=own.task if own else None,
        classes=int(model.config.num_labels) if own and isinstance(own.task, Detection) else 0,
        description=f"huggingface:{location}",
        named=True,
        random_weights=random_weights,
        libraries=("torch", "transformers"),
        inputs=inputs,
        preprocess=preprocess,
        labels=() if recipe.task == "embedding" else _labels(labels, model),
    )


def list_architectures() -> list[str]:
    """List the model types of transformers; most names on the hub begin with one."""
    return list(transformers.CONFIG_MAPPING)


@contextmanager
def opened(location: str) -> Iterator[None]:
    """Translate transformers' errors on opening a model.

    Raises:
        ConversionError: The model does not exist, has an unknown type, needs a library that is not installed, or
            contains code.
    """
    try:
        yield
    except GraphkilnError:
        raise
    except ImportError as error:
        hint = "pip install 'graphkiln[timm]'" if "timm" in str(error) else "install the library that it names"
        raise ConversionError(f"transformers cannot open '{location}': {_reason(error)}", hint=hint) from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ConversionError(
                f"'{location}' contains code, which is not run", hint="wrap the model: python:FILE:FACTORY"
            ) from error
        raise ConversionError(
            f"transformers cannot open '{location}': {_reason(error)}",
            hint="name a folder with config.json, or an id of the hub (needs the internet)",
        ) from error


def _reason(error: Exception) -> str:
    """Return the first non-empty line of an error, without transformers' advice on pip, which the hint replaces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(" You can install")[0] if lines else type(error).__name__


def is_without_weights(location: str) -> bool:
    """Return True for a folder with a configuration but no weights."""
    folder = Path(location)
    return folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin"))


def create(location: str, config: Any, factory: Any, *, complete: bool = False) -> Any:
    """Create a model for export, with the weights of its folder, or random ones if there are none.

    Args:
        location: Folder or hub id.
        config: Configuration of the model.
        factory: Model class, or a transformers auto class (`AutoModel`).
        complete: Raise an error on missing weights, which transformers would initialize at random.

    Raises:
        ConversionError: Weights are missing.
    """
    config._attn_implementation = "eager"  # noqa: SLF001 - transformers' switch; fused attention is opaque to export
    if is_without_weights(location):
        torch.manual_seed(0)
        make = getattr(factory, "_from_config", None) or factory.from_config
        return make(config)
    model, found = factory.from_pretrained(
        location, config=config, dtype=torch.float32, trust_remote_code=False, weights_only=True,
        output_loading_info=True,
    )  # fmt: skip
    if complete and (missing := sorted(found["missing_keys"])):
        raise ConversionError(
            f"'{location}' lacks {len(missing)} of the model's weights, for example {missing[0]}",
            hint="use a folder with the complete model; missing weights would be random",
        )
    return model


def _model(location: str, config: Any) -> Any:
    config.use_cache = False
    architecture = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if config.model_type == "t5":
        architecture = transformers.T5EncoderModel
    return create(location, config, architecture or transformers.AutoModel)


class _Encoder(torch.nn.Module):
    """Wrapper of a transformers model that returns the tensors to serve, without caches and losses."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the outputs by transformers' names."""
        return _tensors(self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=True))


def _tensors(outputs: Any) -> dict[str, torch.Tensor]:
    served = {name: outputs[name] for name in _SERVED if outputs.get(name) is not None}
    if not served:
        returned = ", ".join(outputs.keys())
        raise ConversionError(
            f"the model returns {returned}, expected one of {', '.join(_SERVED)}",
            hint="wrap it in a module that returns the wanted tensors: python:FILE:FACTORY",
        )
    return served


def _inputs(model: Any, config: Any, location: str, recipe: Recipe) -> tuple[tuple[InputSpec, ...], Preprocess | None]:
    if model.main_input_name == "pixel_values" and takes_images_of_any_size(model):
        processor = _processor(location)
        height, width = fitted_size(config, processor)
        fitted = image_shape(recipe, (3, height, width))
        return (InputSpec(name="pixel_values", shape=fitted),), fitted_preprocess(processor, fitted[1:])
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        shape = image_shape(recipe, (getattr(config, "num_channels", 3), height, width))
        processor = _processor(location)
        preprocess = preprocess_from_processor(processor) if processor is not None else None
        return (InputSpec(name="pixel_values", shape=shape),), preprocess
    if model.main_input_name == "input_ids":
        most = _most_tokens(model, config)
        dynamic = {0: (min(_LEAST_TOKENS, most), min(most, _MOST_TOKENS))}
        tokens = min(_TOKENS, most)
        ids = InputSpec(
            name="input_ids", dtype=DType.INT64, shape=(tokens,), dynamic=dynamic, high=int(config.vocab_size)
        )
        mask = InputSpec(name="attention_mask", dtype=DType.INT64, shape=(tokens,), dynamic=dynamic, mask=True)
        return (ids, mask), None
    raise ConversionError(
        f"the input '{model.main_input_name}' of '{location}' is neither an image nor text",
        hint="wrap the model in a module: python:FILE:FACTORY",
    )


def _most_tokens(model: Any, config: Any) -> int:
    """Return the largest number of tokens; RoBERTa and related models start positions after the padding index."""
    most = int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", _MOST_TOKENS))
    for name, layer in model.named_modules():
        if name.endswith("position_embeddings") and getattr(layer, "padding_idx", None) is not None:
            return most - int(layer.padding_idx) - 1
    return most


def _processor(location: str) -> Any:
    """Load the model's image processor, or return None."""
    if Path(location).is_dir() and not (Path(location) / "preprocessor_config.json").is_file():
        return None
    try:
        automatic: Any = transformers.AutoImageProcessor
        return automatic.from_pretrained(location, backend="pil", trust_remote_code=False)
    except (OSError, ValueError):  # no processor, or one of an unknown type
        return None


def _labels(names: dict[int, str], model: Any) -> tuple[str, ...]:
    if not type(model).__name__.endswith(_NAMED) or all(v.startswith("LABEL_") for v in names.values()):
        return ()
    # Look names up by index, as transformers does: the indices need not start at 0.
    return tuple(names.get(index, f"LABEL_{index}") for index in range(len(names)))


# Preprocessing specs from transformers' image processors (Pillow backend).

# Source: `PIL.Image.Resampling`.
RESAMPLING: dict[int, Interpolation] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
_METHODS = ("_preprocess", "preprocess", "resize", "center_crop", "rescale", "normalize")
# Processors that override only the handling of segmentation maps.
_SAME_FOR_IMAGES = ("BeitImageProcessorPil", "MobileNetV2ImageProcessorPil")
_CONVNEXT = "ConvNextImageProcessorPil"
_CONVNEXT_WARPS_FROM = 384
_STRIDE = 32
# Processors that pad by reflection, or on all sides.
_PADS_WITH_MIRRORED = "ZoeDepthImageProcessorPil"
_PADS_AROUND = "Sapiens2ImageProcessor"


def _pixels(processor: Any) -> Preprocess | None:
    """Return a processor's resampling and normalization, without sizes; None if a spec cannot express them."""
    interpolation = RESAMPLING.get(int(getattr(processor, "resample", None) or 0))
    scales = processor.do_rescale and math.isclose(getattr(processor, "rescale_factor", 1 / 255), 1 / 255)
    if interpolation is None or not scales:
        return None
    mean, std = (tuple(processor.image_mean), tuple(processor.image_std)) if processor.do_normalize else ((), ())
    return Preprocess(interpolation=interpolation, mean=mean, std=std)


def preprocess_from_processor(processor: Any) -> Preprocess | None:
    """Return the spec of a classifier's or encoder's image processor; None if a spec cannot express it.

    Source: `transformers.image_processing_backends.PilBackend`; `ConvNextImageProcessorPil.resize`.
    """
    kind = type(processor)
    inherited = all(getattr(kind, method) is getattr(PilBackend, method) for method in _METHODS)
    spec = _pixels(processor)
    if spec is None or processor.do_pad or not (inherited or kind.__name__ in (*_SAME_FOR_IMAGES, _CONVNEXT)):
        return None
    spec = replace(spec, crop_rounding="down")
    size = processor.size
    if kind.__name__ == _CONVNEXT:
        side = size.shortest_edge
        if not processor.do_resize or not side or processor.do_center_crop:
            return None
        if side >= _CONVNEXT_WARPS_FROM:
            return replace(spec, resize=(side, side))
        return replace(spec, resize=int(side / processor.crop_pct), crop=(side, side))
    if processor.do_resize:
        if size.longest_edge or size.max_height or not (size.shortest_edge or (size.height and size.width)):
            return None
        spec = replace(spec, resize=size.shortest_edge or (size.height, size.width))
    return replace(spec, crop=_crop(processor))


def fitted_size(config: Any, processor: Any) -> tuple[int, int]:
    """Return the default `(height, width)`: the model's, the processor's, or a square of the processor's."""
    own = getattr(config, "image_size", None)
    if isinstance(own, (list, tuple)):
        return int(own[0]), int(own[1])
    if crop := _crop(processor):
        return crop
    size = getattr(processor, "size", None)
    if size is not None and size.height and size.width:
        return int(size.height), int(size.width)
    side = int(own or getattr(size, "shortest_edge", None) or 800)
    side = -(-side // _STRIDE) * _STRIDE
    return side, side


def fitted_preprocess(processor: Any, size: tuple[int, int]) -> Preprocess | None:
    """Return a spec that fits images into the input of a detector, segmenter or depth estimator.

    A processor that keeps the aspect ratio pads images to the largest of a batch. The spec pads each image to the size
    of the input instead.

    Args:
        processor: Image processor of transformers, or None.
        size: `(height, width)` of the input in pixels.

    Returns:
        The spec, or None if a spec cannot express the processor.
    """
    name = type(processor).__name__
    if processor is None or name == _PADS_WITH_MIRRORED or (name == _PADS_AROUND and processor.do_pad):
        return None
    spec = _pixels(processor)
    if spec is None:
        return None
    if getattr(processor, "do_flip_channel_order", False):
        spec = replace(spec, color="BGR")
    own = processor.size
    if crop := _crop(processor):
        edge = getattr(own, "shortest_edge", None)
        resize = (
            round(edge * min(size) / min(crop))
            if edge
            else (round(own.height * size[0] / crop[0]), round(own.width * size[1] / crop[1]))
        )
        return replace(spec, resize=resize, crop=size, crop_rounding="down")
    if own is not None and own.height and own.width and not getattr(processor, "keep_aspect_ratio", False):
        return replace(spec, resize=size)
    return replace(spec, letterbox=Letterbox(size=size, padding=None, position="top-left", rounding="down"))


def _crop(processor: Any) -> tuple[int, int] | None:
    """Return `(height, width)` of a processor's center crop, or None."""
    crop = getattr(processor, "crop_size", None)
    if not getattr(processor, "do_center_crop", False) or crop is None:
        return None
    return int(crop.height), int(crop.width)
