"""`keras:FILE.keras`: a model of Keras 3, which computes with PyTorch here and is exported as one of its modules."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # read once, when it is imported

import keras
import torch

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError, EngineUnavailable
from graphkiln_backend.graph.files import open_regular
from graphkiln_converters.recipe import Recipe, check_file, first_line
from graphkiln_converters.sources.base import CODE_HINT, InputSpec, sizes_of
from graphkiln_converters.sources.pytorch import TorchModel, freeze


class _Positional(torch.nn.Module):
    """A Keras model whose inputs come one by one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(inputs[0] if len(inputs) == 1 else list(inputs))


def open_source(location: str, recipe: Recipe) -> TorchModel:
    """Load a model with its declared inputs.

    Raises:
        ConversionError: The file is missing or damaged, holds code without --allow-code, or does not say its inputs.
        EngineUnavailable: Keras computes with another library than PyTorch.
    """
    if keras.backend.backend() != "torch":
        raise EngineUnavailable(f"Keras computes with {keras.backend.backend()} here: set KERAS_BACKEND=torch")
    model = _load(location, recipe)
    inputs = tuple(_spec(tensor, location, recipe) for tensor in getattr(model, "inputs", None) or ())
    if not inputs:
        raise ConversionError(
            f"{location} does not say what it takes", hint="build it with keras.Input, or call it once before saving"
        )
    return TorchModel(
        module=freeze(_Positional(model)),
        description=f"keras:{location}",
        libraries=("keras", "torch"),
        inputs=inputs,
    )


def _load(location: str, recipe: Recipe) -> Any:
    check_file(location)
    if Path(location).suffix != ".keras":  # the loader of older formats runs what they hold
        raise ConversionError(f"{location} is no .keras file", hint="save the model again: model.save('NAME.keras')")
    try:
        with open_regular(location) as file:
            zipfile.ZipFile(file).close()  # of other files, Keras says that they are missing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return keras.saving.load_model(location, compile=False, safe_mode=not recipe.allow_code)
    except Exception as error:
        text = str(error)
        if "arbitrary code" in text or "unsafe" in text:
            raise ConversionError(f"{location} is not loaded: it holds code", hint=CODE_HINT) from error
        raise ConversionError(
            f"{location} is no model that Keras 3 can load: {first_line(error)}",
            hint="one is written by model.save('NAME.keras'); layers of your own need a function: python:FILE:FACTORY",
        ) from error


def _spec(tensor: Any, location: str, recipe: Recipe) -> InputSpec:
    try:
        dtype = DType(_TYPES.get(tensor.dtype, tensor.dtype.upper()))
    except ValueError as error:
        raise ConversionError(f"{location} takes {tensor.dtype} as '{tensor.name}'") from error
    sizes = sizes_of(tensor.name, tensor.shape, recipe.shapes)[1:]
    dynamic = {axis: (1, 2 * sizes[axis]) for axis, size in enumerate(tensor.shape[1:]) if size is None}
    return InputSpec(name=tensor.name, dtype=dtype, shape=sizes, dynamic=dynamic)


# Keras's names of element types, where they are not ours in lower case.
_TYPES = {"float32": "FP32", "float64": "FP64", "float16": "FP16", "bfloat16": "BF16"}
