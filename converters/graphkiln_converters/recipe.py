"""The recipe: all options of `graphkiln convert` as one checked object.

Given on the command line, in a YAML file, or both; stored in the manifest, so that a conversion can be repeated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.text import MAX_LENGTH, fault_in_name, nearest
from graphkiln_converters.source_kinds import FILE_SUFFIXES

# Triton uses 32 bits.
_MOST = (1 << 31) - 1
_MOST_DETECTIONS = 10_000
_DYNAMIC = re.compile(r"(?P<name>[^:]+):(?P<axis>\d{1,9})=(?P<least>\d{1,9})\.\.(?P<most>\d{1,9})")
_SHAPE = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<sizes>\d{1,18}(?:x\d{1,18})*)")
# Key in manifests of earlier releases -> key.
_OLD_SPELLINGS = {"quantise_bias": "quantize_bias", "quantise_ends": "quantize_ends"}
# Precisions of saved graphs.
SavedPrecision = Literal[Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8]
_SOURCE = "Source"
_EDGE = "Inputs and outputs"
_BOXES = "Detectors of FILE.onnx"
_GRAPH = "Rewriting and precision"
_PROOF = "Proof"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """Declaration of a field as an option of `graphkiln convert`; name, type and help are the field's.

    Attributes:
        panel: Heading in the help; empty for the first.
        metavar: Placeholder of the value in the help; empty for the type's name.
        default: Default in the help, if it is not that of the field.
        minimum: Smallest accepted number.
        variable: Environment variable of the option.
    """

    panel: str = ""
    metavar: str = ""
    default: str = ""
    minimum: int | None = None
    variable: str = ""


class Head(StrEnum):
    """Output format of a detector's graph, recognized by the shapes of the outputs."""

    YOLOV8 = "yolov8"
    YOLOV5 = "yolov5"
    END_TO_END = "end-to-end"
    SELECTED = "selected"


class BoxFormat(StrEnum):
    """Meaning of the four numbers of a box: pixels, or with `unit` relative to the input, from 0 to 1."""

    CORNERS = "xyxy"
    ROWS_FIRST = "yxyx"
    CENTER = "cxcywh"
    UNIT_CORNERS = "xyxy-unit"
    UNIT_ROWS_FIRST = "yxyx-unit"
    UNIT_CENTER = "cxcywh-unit"


class Recipe(BaseModel):
    """Source, options and target of a conversion.

    A field with a `Flag` is an option of `graphkiln convert`; the others are for recipe files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description="KIND:LOCATION, FILE.pt2, FILE.onnx, FILE.skops or FILE.keras")
    name: Annotated[str, Flag(default="the source's")] = Field(default="", description="Model name.")
    model_store: Annotated[Path, Flag(variable="GRAPHKILN_MODEL_STORE")] = Field(
        default=Path("model_repository"), description="Folder of models."
    )
    version: Annotated[int | None, Flag(default="the next free one", minimum=1)] = Field(
        default=None, ge=1, lt=1 << 63, description="Version number."
    )

    weights: Annotated[Path | None, Flag(panel=_SOURCE)] = Field(
        default=None, description="State dict: .pth, .pt or .safetensors."
    )
    pretrained: Annotated[bool, Flag(panel=_SOURCE)] = Field(default=False, description="Published weights (internet).")
    features_only: Annotated[bool, Flag(panel=_SOURCE)] = Field(
        default=False, description="A backbone: feature maps (timm)."
    )
    out_indices: Annotated[tuple[int, ...], Flag(panel=_SOURCE, metavar="1,2,3")] = Field(
        default=(), description="Which feature maps."
    )
    allow_code: Annotated[bool, Flag(panel=_SOURCE)] = Field(
        default=False,
        exclude=True,
        description="Open files that can run code: .pt2, some of torch.jit, skops, Keras; python: in a recipe.",
    )
    shape: Annotated[tuple[str, ...], Flag(panel=_SOURCE, metavar="[NAME=]3x224x224")] = Field(
        default=(), description="Sizes of one sample."
    )

    keep_names: Annotated[
        bool | None, Flag(panel=_EDGE, default="kept for ONNX, scikit-learn, transformers, and several inputs")
    ] = Field(default=None, description="The source's tensor names, or INPUT_<i> and OUTPUT_<i>.")
    dynamic: Annotated[tuple[str, ...], Flag(panel=_EDGE, metavar="NAME:AXIS=MIN..MAX")] = Field(
        default=(), description="Another dimension that varies."
    )
    outputs: Annotated[tuple[str, ...], Flag(panel=_EDGE)] = Field(
        default=(), description="Keep this output, by the source's name."
    )
    input: Annotated[Literal["source", "uint8-nhwc", "encoded"], Flag(panel=_EDGE)] = Field(
        default="source", description="uint8-nhwc: raw pixels; encoded: the same, and NAME.images takes JPEG, PNG, ..."
    )
    layout: Annotated[Literal["nchw", "nhwc"], Flag(panel=_EDGE)] = Field(default="nchw", description="nchw or nhwc.")
    softmax: Annotated[bool, Flag(panel=_EDGE)] = Field(default=False, description="Return probabilities.")
    task: Annotated[Literal["auto", "classification", "detection", "segmentation", "embedding"], Flag(panel=_EDGE)] = (
        Field(default="auto", description="Image task; auto: that of the source.")
    )
    score_threshold: Annotated[float | None, Flag(panel=_EDGE, default="the model's")] = Field(
        default=None, ge=0, le=1, description="Score above which clients show detections by default."
    )
    normalize: Annotated[bool, Flag(panel=_EDGE)] = Field(
        default=False, description="Clients divide vectors by their length."
    )
    head: Annotated[Head | None, Flag(panel=_BOXES, metavar="KIND", default="by shape")] = Field(
        default=None, description=f"How the file returns boxes: {', '.join(Head)}."
    )
    boxes: Annotated[BoxFormat | None, Flag(panel=_BOXES, metavar="FORMAT", default="the kind's")] = Field(
        default=None, description=f"{', '.join(BoxFormat)}."
    )
    iou_threshold: Annotated[float | None, Flag(panel=_BOXES, default="the kind's")] = Field(
        default=None, gt=0, le=1, description="Largest overlap (IoU) of two boxes of a class."
    )
    max_detections: Annotated[int | None, Flag(panel=_BOXES, default="300")] = Field(
        default=None, ge=1, le=_MOST_DETECTIONS, description="Largest number of boxes per image."
    )
    top_k: Annotated[int, Flag(panel=_EDGE)] = Field(
        default=0, ge=0, le=_MOST, description="Return the k best and their indices."
    )
    gradient: Annotated[str, Flag(panel=_EDGE, metavar="OUTPUT:INPUT")] = Field(
        default="", description="Return a gradient, too."
    )
    preprocess: Annotated[dict[str, Any] | None, Flag(panel=_EDGE, metavar="JSON")] = Field(
        default=None, description="Preprocessing of images."
    )
    labels: Annotated[Path | None, Flag(panel=_EDGE)] = Field(default=None, description="Class names, one per line.")
    batch: Annotated[Literal["free", "fixed"], Flag(panel=_EDGE)] = Field(
        default="free", description="free: let a fixed batch vary; fixed: leave it."
    )
    max_batch_size: Annotated[int, Flag(panel=_EDGE)] = Field(
        default=32, ge=1, le=_MOST, description="Largest batch that Triton forms."
    )

    skip: Annotated[tuple[str, ...], Flag(panel=_GRAPH, metavar="PASS")] = Field(
        default=(), description="Leave a pass out (see --explain)."
    )
    precision: Annotated[SavedPrecision, Flag(panel=_GRAPH)] = Field(
        default=Precision.FP32, description="fp32, fp16, bf16 or int8."
    )
    amp: Annotated[Literal["O0", "O1", "O2", "O3"], Flag(panel=_GRAPH)] = Field(
        default="O2",
        description="O0 all fp32; O1 products only; O2 all but normalization and reductions; O3 all.",
    )
    keep_fp32: Annotated[tuple[str, ...], Flag(panel=_GRAPH, metavar="PATTERN")] = Field(
        default=(), description="Nodes that stay fp32."
    )
    lower_edges: Annotated[bool, Flag(panel=_GRAPH)] = Field(
        default=False, description="fp16, bf16: inputs and outputs, too."
    )
    search_keep: Annotated[bool, Flag(panel=_GRAPH)] = Field(
        default=False, description="Find the smallest set of nodes that must stay fp32."
    )
    calibration: Annotated[Path | None, Flag(panel=_GRAPH)] = Field(
        default=None, description="Samples for int8: folder of images, or .npz."
    )
    quantize_bias: bool = Field(default=True, description="int8: biases become INT32.")
    quantize_ends: bool = Field(default=True, description="int8: the first and last product, too.")
    calibration_method: Annotated[Literal["minmax", "entropy", "percentile"], Flag(panel=_GRAPH)] = Field(
        default="minmax", description="minmax, entropy or percentile."
    )
    int8_by: Annotated[Literal["onnxruntime", "nncf", "modelopt", "fastest"], Flag(panel=_GRAPH)] = Field(
        default="fastest", description="Quantizer: onnxruntime, nncf, modelopt; fastest of the first two on this CPU."
    )

    samples: Annotated[Path | None, Flag(panel=_PROOF, default="synthetic")] = Field(
        default=None, description="Folder of images or of recorded requests, or .npz."
    )
    reference: Annotated[Path | None, Flag(panel=_PROOF)] = Field(
        default=None, description="The source's own outputs, recorded: .npz of INPUT_<i>, OUTPUT_<i>."
    )
    relative_l2: Annotated[float | None, Flag(panel=_PROOF)] = Field(
        default=None, gt=0, description="Limit of the error in each proof of this conversion; recorded."
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        source = document.get("source")
        named = {"name": name_of(source)} if isinstance(source, str) and document.get("name") is None else {}
        return {**respelled(document), **named}

    @model_validator(mode="after")
    def _check_box_flags(self) -> Recipe:
        given = self.box_flags
        if given and not (self.task == "detection" and self.source.lower().endswith(".onnx")):
            raise ValueError(f"{given[0]} is for FILE.onnx with --task detection: other sources define their boxes")
        return self

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if fault := fault_in_name(name):
            raise ValueError(fault)
        return name

    @field_validator("dynamic")
    @classmethod
    def _check_dynamic(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not _DYNAMIC.fullmatch(value):
                raise ValueError(f"'{value}' is not NAME:AXIS=MIN..MAX, for example input_ids:1=8..512")
        return values

    @field_validator("shape")
    @classmethod
    def _check_shape(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not _SHAPE.fullmatch(value):
                raise ValueError(f"'{value}' is not [NAME=]SIZExSIZE..., for example 3x224x224")
            if not (elements := math.prod(map(int, value.rpartition("=")[2].split("x")))):
                raise ValueError(f"'{value}' has no elements: sizes are at least 1, for example 3x224x224")
            if elements > _MOST:
                raise ValueError(f"'{value}' is more than {_MOST} elements a sample")
        return values

    @property
    def box_flags(self) -> tuple[str, ...]:
        """Flags for boxes that were given."""
        fields = ("head", "boxes", "iou_threshold", "max_detections")
        return tuple(f"--{name.replace('_', '-')}" for name in fields if getattr(self, name) is not None)

    @property
    def has_random_weights(self) -> bool:
        """True if an architecture has no trained weights."""
        return not (self.weights or self.pretrained)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Input name (or empty) -> sizes of one sample."""
        matches = filter(None, map(_SHAPE.fullmatch, self.shape))
        return {match["name"] or "": tuple(map(int, match["sizes"].split("x"))) for match in matches}

    @property
    def dynamic_axes(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Input name -> axis (0 is the batch) -> smallest and largest size."""
        found: dict[str, dict[int, tuple[int, int]]] = {}
        for match in filter(None, map(_DYNAMIC.fullmatch, self.dynamic)):
            found.setdefault(match["name"], {})[int(match["axis"])] = int(match["least"]), int(match["most"])
        return found

    def frozen(self) -> dict[str, Any]:
        """Convert to plain data for `read_recipe`."""
        return self.model_dump(mode="json")


def respelled(document: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of earlier releases."""
    return {_OLD_SPELLINGS.get(key, key): value for key, value in document.items()}


# Default model name for a source.

_KIND = re.compile(r"[a-z]{2,}(?=:)")
_ILLEGAL = re.compile(r"[^A-Za-z0-9_.-]+")
# Meaningless names, for which the name of the folder is used.
_GENERIC = {"model", "saved", "graph", "network", "weights"}


def name_of(source: str) -> str:
    """Valid model name for a source: its architecture, factory, file or folder; may be empty.

    The name of `NAME/1/model.onnx` in a model repository is NAME, like that of MLflow's `models:/NAME/1` and
    `models:/NAME@ALIAS`.
    """
    source = source.replace("://", "/")  # addresses of files are like paths
    kind = _KIND.match(source)
    location = source.partition(":")[2] if kind else source
    if kind and kind[0] == "mlflow":
        location = location.partition("@")[0]
    if kind and kind[0] == "python":
        return _legal(location.rpartition(":")[2])
    if kind and PurePath(location).suffix in FILE_SUFFIXES:
        location = location.removesuffix(PurePath(location).suffix)  # not of `timm:resnet34.a1_in1k`
    if kind and "/" not in location:
        return _legal(location)
    path = PurePath(location)
    parts = [*path.parts[:-1], path.name if kind else path.stem]
    names = [name for name in map(_legal, parts) if name]
    descriptive = [name for name in names if name.lower() not in _GENERIC and not name.isdecimal()]
    return next(reversed(descriptive or names), "")


def _legal(text: str) -> str:
    """Replace characters that are invalid in model names."""
    return _ILLEGAL.sub("-", text).strip("-.")[:MAX_LENGTH]


def check_file(path: Path | str, *, what: str = "", expected: str = "") -> None:
    """Check that a path is a file; `what` is its purpose (`weights`), `expected` its kind, for the message.

    Raises:
        ConversionError: The path does not exist, or is a folder.
    """
    path = Path(path)
    prefix, fallback = f"{what}: " if what else "", f"expected {expected}" if expected else ""
    if path.is_dir():
        inside = sorted(each.name for each in path.glob(f"*{path.suffix}") if each.is_file()) if path.suffix else []
        hint = f"did you mean '{path / inside[0]}'?" if len(inside) == 1 else fallback or "name a file in it"
        raise ConversionError(f"{prefix}{path} is a folder, not a file", hint=hint)
    if not path.exists():
        kind = "file" if path.suffix and "folder" not in expected else "file or folder"
        raise ConversionError(f"{prefix}there is no {kind} {path}", hint=near_file(path) or fallback)


def near_file(path: Path) -> str:
    """Suggest a file with a similar name in the same folder; may be empty."""
    files = [each.name for each in path.parent.iterdir() if each.is_file()] if path.parent.is_dir() else []
    near = nearest(path.name, files)
    return f"did you mean '{path.parent / near}'?" if near else ""


def first_line(error: BaseException) -> str:
    """First line of a library's error, or its type if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
