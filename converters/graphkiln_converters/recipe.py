"""The recipe: everything that `graphkiln convert` may be told, as one checked object.

Written on the command line, in a YAML file, or both; kept in the manifest, so that a conversion can be repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.spelling import did_you_mean

_BASE = "_base_"
_DYNAMIC = re.compile(r"(?P<name>[^:]+):(?P<axis>\d+)=(?P<least>\d+)\.\.(?P<most>\d+)")
_SHAPE = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<sizes>\d+(?:x\d+)*)")


SavedPrecision = Literal[Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8]
"""What a graph can be saved in."""


class Recipe(BaseModel):
    """What to convert, from where, how, to where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description="KIND:LOCATION, FILE.pt2 or FILE.onnx")
    name: str = Field(description="model name", pattern=r"^[A-Za-z0-9_.-]+$")
    model_store: Path = Field(default=Path("model_repository"), description="folder of models")
    version: int | None = Field(default=None, ge=1, description="version number; the next free one when empty")
    weights: Path | None = Field(default=None, description="state dict to load")
    pretrained: bool = Field(default=False, description="load published weights (needs the internet)")
    features_only: bool = Field(default=False, description="a backbone that returns feature maps")
    out_indices: tuple[int, ...] = Field(default=(), description="which feature maps")
    shape: tuple[str, ...] = Field(default=(), description="sizes of one sample, [NAME=]3x224x224")
    dynamic: tuple[str, ...] = Field(default=(), description="another dimension that varies, NAME:AXIS=MIN..MAX")
    keep_names: bool = Field(default=False, description="keep the source's tensor names")
    outputs: tuple[str, ...] = Field(default=(), description="outputs to keep, by the source's names")
    input: Literal["source", "uint8-nhwc"] = Field(default="source", description="what the graph takes")
    gradient: str = Field(default="", description="also answer the gradient, OUTPUT:INPUT by the source's names")
    softmax: bool = Field(default=False, description="answer probabilities")
    top_k: int = Field(default=0, ge=0, description="answer the k best scores and their indices; 0 for all")
    layout: Literal["nchw", "nhwc"] = Field(default="nchw", description="layout of images and feature maps")
    skip: tuple[str, ...] = Field(default=(), description="passes to leave out")
    precision: SavedPrecision = Field(default=Precision.FP32, description="element type")
    amp: Literal["O0", "O1", "O2", "O3"] = Field(default="O2", description="how much of the graph is lowered")
    lower_edges: bool = Field(default=False, description="fp16, bf16: inputs and outputs take the type, too")
    keep_fp32: tuple[str, ...] = Field(default=(), description="nodes that stay fp32, by pattern of name or type")
    search_keep: bool = Field(default=False, description="find the fewest nodes that must stay fp32")
    calibration: Path | None = Field(default=None, description="samples for int8, a folder or .npz")
    quantize_bias: bool = Field(default=True, description="int8: biases become INT32")
    quantize_ends: bool = Field(default=True, description="int8: the first and last product, too")
    calibration_method: Literal["minmax", "entropy", "percentile"] = Field(default="minmax")
    samples: Path | None = Field(default=None, description="samples for the proof, a folder or .npz")
    reference: Path | None = Field(default=None, description="the source's own answers, recorded: an .npz")
    preprocess: dict[str, Any] | None = Field(default=None, description="how an image becomes the input")
    labels: Path | None = Field(default=None, description="class names, one a line")
    max_batch_size: int = Field(default=32, ge=1, description="largest batch that Triton may form")
    relative_l2: float | None = Field(default=None, gt=0, description="looser limit of the proof, recorded")

    @field_validator("dynamic")
    @classmethod
    def _dynamic_reads(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not _DYNAMIC.fullmatch(value):
                raise ValueError(f"'{value}' is not NAME:AXIS=MIN..MAX, for example input_ids:1=8..512")
        return values

    @field_validator("shape")
    @classmethod
    def _shape_reads(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not _SHAPE.fullmatch(value):
                raise ValueError(f"'{value}' is not [NAME=]SIZExSIZE..., for example 3x224x224")
        return values

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Input name (or empty) -> sizes of one sample."""
        matches = filter(None, map(_SHAPE.fullmatch, self.shape))
        return {match["name"] or "": tuple(map(int, match["sizes"].split("x"))) for match in matches}

    @property
    def dynamic_axes(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Input name -> axis with the batch as 0 -> smallest and largest size."""
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for match in filter(None, map(_DYNAMIC.fullmatch, self.dynamic)):
            found.setdefault(match["name"], {})[int(match["axis"])] = int(match["least"]), int(match["most"])
        return found

    def frozen(self) -> dict[str, Any]:
        """As plain data that `read_recipe` reads back."""
        document: dict[str, Any] = json.loads(self.model_dump_json())
        return document


def read_recipe(path: Path | None, options: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """Puts a recipe together: the file (and those it is based on), then options, then `key=value` overrides.

    Args:
        path: YAML or JSON file, or a manifest of an earlier conversion; None for none.
        options: What the command line says, by field; what it leaves out is not in it.
        overrides: `key=value` with a value in YAML; `preprocess.mean=[0.5]` reaches inside.

    Raises:
        ConversionError: A file cannot be read, or a key or value is not one; the message names the nearest key.
    """
    document: dict[str, Any] = {}
    if path is not None:
        document = _load(path, ())
    document.update(options)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConversionError(f"'{override}' is not key=value")
        _set(document, key.split("."), _parse(text, override))
    try:
        return Recipe(**document)
    except ValidationError as error:
        raise _translated(error) from error


def _load(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConversionError(f"recipe {path} is based on itself: {' -> '.join(map(str, (*seen, path)))}")
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"cannot read recipe {path}: {error}") from error
    document = _parse(content, str(path))
    if not isinstance(document, dict):
        raise ConversionError(f"recipe {path} must be a mapping of keys to values")
    if "format_version" in document and isinstance(document.get("conversion"), dict):
        document = document["conversion"]["recipe"]  # a manifest
        document.pop("version", None)
    bases = document.pop(_BASE, [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        _merge(merged, _load(path.parent / base, (*seen, path)))
    _merge(merged, document)
    return merged


def _parse(text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConversionError(f"{what} is not YAML: {error}") from error


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _set(document: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ConversionError(f"'{key}' holds a value, not keys")
    document[keys[-1]] = value


def _translated(error: ValidationError) -> ConversionError:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return ConversionError(f"recipe: unknown key '{key}'", hint=did_you_mean(key, Recipe.model_fields))
    if first["type"] == "missing":
        return ConversionError(f"recipe: '{key}' is missing", hint=str(Recipe.model_fields[key].description))
    return ConversionError(f"recipe: '{key}': {first['msg'].removeprefix('Value error, ')}")
