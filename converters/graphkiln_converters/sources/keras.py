"""`keras:FILE.keras`: Keras 3 models, run on the PyTorch backend and exported as PyTorch modules."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads it on import

import keras
import torch

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError, EngineUnavailable
from graphkiln_backend.graph.files import open_regular
from graphkiln_converters.recipe import Recipe, check_file, first_line
from graphkiln_converters.sources.base import CODE_HINT, InputSpec, sizes_of
from graphkiln_converters.sources.pytorch import TorchModel, freeze


class _Positional(torch.nn.Module):
    """Wrapper of a Keras model with positional inputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(inputs[0] if len(inputs) == 1 else list(inputs))


def open_source(location: str, recipe: Recipe) -> TorchModel:
    """Load a model with its declared inputs.

    Raises:
        ConversionError: The file is missing or damaged, contains code without --allow-code, or declares no inputs.
        EngineUnavailable: Keras uses a backend other than PyTorch.
    """
    if keras.backend.backend() != "torch":
        raise EngineUnavailable(f"Keras uses the {keras.backend.backend()} backend: set KERAS_BACKEND=torch")
    model = _load(location, recipe)
    inputs = tuple(_spec(tensor, location, recipe) for tensor in getattr(model, "inputs", None) or ())
    if not inputs:
        raise ConversionError(
            f"{location} declares no inputs", hint="build it with keras.Input, or call it once before saving"
        )
    return TorchModel(
        module=freeze(_Positional(model)),
        description=f"keras:{location}",
        libraries=("keras", "torch"),
        inputs=inputs,
    )


def _load(location: str, recipe: Recipe) -> Any:
    check_file(location)
    if Path(location).suffix != ".keras":  # loading older formats can run code
        raise ConversionError(f"{location} is not a .keras file", hint="save the model again: model.save('NAME.keras')")
    try:
        with open_regular(location) as file:
            zipfile.ZipFile(file).close()  # Keras reports other files as missing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return keras.saving.load_model(location, compile=False, safe_mode=not recipe.allow_code)
    except Exception as error:
        text = str(error)
        if "arbitrary code" in text or "unsafe" in text:
            raise ConversionError(f"{location} is not loaded: it contains code", hint=CODE_HINT) from error
        raise ConversionError(
            f"Keras 3 cannot load {location}: {first_line(error)}",
            hint="save it with model.save('NAME.keras'); for custom layers write a function: python:FILE:FACTORY",
        ) from error


def _spec(tensor: Any, location: str, recipe: Recipe) -> InputSpec:
    try:
        dtype = DType(_TYPES.get(tensor.dtype, tensor.dtype.upper()))
    except ValueError as error:
        raise ConversionError(f"{location}: type {tensor.dtype} of input '{tensor.name}' is not supported") from error
    sizes = sizes_of(tensor.name, tensor.shape, recipe.shapes)[1:]
    dynamic = {axis: (1, 2 * sizes[axis]) for axis, size in enumerate(tensor.shape[1:]) if size is None}
    return InputSpec(name=tensor.name, dtype=dtype, shape=sizes, dynamic=dynamic)


# Keras's names of element types that differ from Triton's in lower case.
_TYPES = {"float32": "FP32", "float64": "FP64", "float16": "FP16", "bfloat16": "BF16"}
