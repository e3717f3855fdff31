"""Interface and registry of source models, suggestions for misspelled sources, and synthetic samples.

A source module has `open_source(location, recipe) -> SourceModel`. A source model can be run (as the reference of the
proof) and exported.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import logging
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import onnx_ir

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, EngineUnavailable
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Task
from graphkiln_backend.passes.edge import Arrays
from graphkiln_backend.system.closing import Closeable
from graphkiln_converters.recipe import Recipe, near_file
from graphkiln_converters.source_kinds import BY_SUFFIX, KINDS

# Batch size of exports if the source does not fix it. Not 1, because PyTorch specializes on 1 and would export a fixed
# batch.
EXPORT_BATCH = 2
USUAL_SIZE = 8  # default size of a dynamic dimension
CODE_HINT = "if you trust its author, add --allow-code; .onnx and .safetensors files contain no code"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One input of a source model.

    Attributes:
        name: Name in the source model.
        shape: Shape of one sample, without the batch; typical sizes for axes in `dynamic`.
        dynamic: Axis of the sample -> smallest and largest size.
        low: Least synthetic integer.
        high: Exclusive upper bound of synthetic integers.
        mask: The input is an attention mask: ones for tokens, then zeros.
        words: Vocabulary of synthetic text.
        known: Rows from which synthetic samples of this shape are taken, `[rows, *shape]`: as many for each input, in
            any precision. None to draw them at random.
    """

    name: str
    dtype: DType = DType.FP32
    shape: tuple[int, ...]
    dynamic: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    low: int = 0
    high: int = 2
    mask: bool = False
    words: tuple[str, ...] = ("", "text")
    known: AnyArray | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class SourceModel(Closeable):
    """A model to convert, which can be run and exported.

    Attributes:
        description: The source as the user wrote it, for the manifest and messages.
        libraries: Distributions whose versions are recorded in the manifest.
        inputs: Inputs in order.
        preprocess: Preprocessing of images, or None.
        labels: Class names; may be empty.
        task: Image task, with the source's output names; None for classification or if unknown.
        classes: Number of classes if no output has a dimension for them; 0 if unknown.
        notes: Remarks for the log and the manifest.
        batch_size: Batch size of exports; for a model saved with a fixed batch, that batch.
        whole: Reason why requests cannot be batched; empty if they can. If set, shapes of inputs and samples have no
            separate batch dimension.
        gradient: Name of the gradient output; may be empty.
        random_weights: The model is not trained, so its outputs are meaningless.
        named: Users know its inputs and outputs by name, so that these names are kept by default.
        advice: What a user can do if the proof fails; may be empty.
    """

    takes_fixed_batch: ClassVar[bool] = False  # supports `--batch fixed`
    fits_samples: ClassVar[bool] = False  # overrides `fitting`
    reference_batch: ClassVar[int] = 4  # rows that `run` computes at once

    description: str
    libraries: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()
    task: Task | None = None
    classes: int = 0
    notes: tuple[str, ...] = ()
    batch_size: int = EXPORT_BATCH
    whole: str = ""
    gradient: str = ""
    random_weights: bool = False
    named: bool = False
    advice: str = ""

    @abstractmethod
    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """Compute the reference outputs in fp32: output name -> array `[batch, ...]`."""

    @abstractmethod
    def export(self) -> onnx_ir.Model:
        """Export a graph with the source's names, a dynamic batch, and the dynamic axes of the inputs.

        Raises:
            ConversionError: The source cannot be exported.
        """

    def run_in_fp64(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:  # noqa: ARG002
        """Compute the outputs of `run` in fp64.

        Raises:
            ConversionError: The model does not support fp64.
        """
        raise ConversionError(f"{self.description} cannot be computed in fp64")

    def gradient_noise(self, feeds: Mapping[str, AnyArray]) -> float:  # noqa: ARG002
        """Return the relative change of the gradient if the input changes by one fp32 rounding error."""
        return 0.0

    def fitting(self, samples: Mapping[str, AnyArray]) -> SourceModel:  # noqa: ARG002
        """Return the model with input types that suit a user's samples, which have the source's names."""
        return self

    def close(self) -> None:
        """Release sessions and temporary files."""


# Kind -> export command to run in a separate environment. paddle2onnx needs an older ONNX than graphkiln; TensorFlow is
# larger than all other dependencies of a conversion together.
_ELSEWHERE = {
    "paddle": "paddle2onnx --model_dir DIR ... --save_file model.onnx",
    "tensorflow": "python -m tf2onnx.convert --saved-model DIR --opset 18 --output model.onnx",
}


def open_source(recipe: Recipe) -> SourceModel:
    """Open the source of a recipe: `KIND:LOCATION`, `FILE.pt2`, `FILE.onnx`, `FILE.skops` or `FILE.keras`.

    It is on this machine; `convert.local_source` fetches others.

    Raises:
        ConversionError: The kind, file or architecture does not exist, the model cannot be loaded, or it needs
            --allow-code.
        EngineUnavailable: The library for the kind is not installed.
    """
    source = recipe.source
    kind, separator, location = source.partition(":")
    suffix = Path(source).suffix.lower()
    if suffix in BY_SUFFIX and kind not in KINDS:
        found, location = BY_SUFFIX[suffix], source
        # torch.export.load evaluates text and loads pickles.
        if suffix == ".pt2" and not recipe.allow_code and Path(source).is_file():
            raise ConversionError(f"{source} is not loaded: a .pt2 file can run code", hint=CODE_HINT)
    elif separator and kind in KINDS:
        found = KINDS[kind]
    else:
        if kind in _ELSEWHERE:
            raise ConversionError(
                f"{kind} models are exported in a separate environment",
                hint=f"there: {_ELSEWHERE[kind]}; then: graphkiln convert model.onnx --reference FILE.npz, with "
                "inputs and outputs recorded there",
            )
        known = [*(f"{name}:..." for name in KINDS), *(f"FILE{ending}" for ending in BY_SUFFIX)]
        raise ConversionError(
            f"'{source}' is not a source: {_why_unknown(source)}",
            hint=suggest(source, KINDS) or f"known: {', '.join(known)}",
        )
    if recipe.weights and not found.takes_weights:
        raise ConversionError(f"{location} contains its own weights", hint="leave --weights out")
    module = "onnx_detector" if found.module == "onnx_file" and recipe.task == "detection" else found.module
    opener: Callable[[str, Recipe], SourceModel] = import_source(module, kind, found.extra).open_source
    return opener(location, recipe)


def import_source(name: str, kind: str = "", extra: str = "") -> Any:
    """Import a module of this room.

    Args:
        name: Name of the module.
        kind: Kind of its models, for the message; empty for the name.
        extra: Extra that installs its library; empty for the name.

    Raises:
        EngineUnavailable: The library is not installed.
    """
    try:
        return importlib.import_module(f"graphkiln_converters.sources.{name}")
    except ImportError as error:
        raise EngineUnavailable(
            f"{kind or name} models need a library that is not installed: {error}", extra=extra or name
        ) from error


# Suggestions for misspelled sources: `resnet18`, `hf:bert`, a folder, a weights file.

# Aliases of source kinds.
_ALIASES = {
    **dict.fromkeys(("tv", "torch", "pytorch", "torchvision.models", "flowvision"), "torchvision"),
    **dict.fromkeys(("hf", "transformers", "hub", "hf-hub", "hf_hub"), "huggingface"),
    **dict.fromkeys(("py", "module"), "python"),
    **dict.fromkeys(("flow", "of"), "oneflow"),
}
_WEIGHTS = {".pt", ".pth", ".bin", ".ckpt", ".safetensors"}
# Files that identify a folder as a source.
_IN_FOLDER = {"MLmodel": "mlflow", "config.json": "huggingface", "model.mlir": "oneflow"}
# Beginnings of MLflow's addresses.
_OF_MLFLOW = ("models:/", "runs:/")
_CUTOFF = 0.75
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def _why_unknown(source: str) -> str:
    path = Path(source)
    if not source.strip():
        return "it is empty"
    if path.is_dir():
        return "it is a folder"
    if path.is_file():
        return f"files named *{path.suffix} are not known" if path.suffix else "it is a file without a known suffix"
    if ":" in source:
        return f"'{source.partition(':')[0]}' is not a kind of model"
    return "there is no such file or folder, and it names no kind of model"


def suggest(source: str, kinds: Collection[str]) -> str:
    """Suggest a source for an invalid one; empty if nothing is similar."""
    path = Path(source)
    if not source.strip():
        return ""
    if source.startswith(_OF_MLFLOW):
        return f"did you mean 'mlflow:{source}'?"
    if path.is_file():  # not an architecture; skip the libraries, whose import takes seconds
        if path.suffix == ".py":
            return f"name the function that returns the model: python:{path}:FUNCTION"
        known = f"torchvision:ARCH --weights {path}, or your own: python:FILE.py:FUNCTION --weights {path}"
        return f"weights need an architecture: {known}" if path.suffix in _WEIGHTS else ""
    meant = _in_folder(path) if path.is_dir() else ""
    if source.partition(":")[0].endswith(".py"):
        meant = f"python:{source}"
    if not meant and path.suffix.lower() in BY_SUFFIX and (similar := near_file(path)):
        return similar
    if not meant and not source.startswith((".", "/", "~")):
        meant = _of_kind(source, kinds) or _of_architecture(source)
    return f"did you mean '{meant}'?" if meant else ""


def _in_folder(path: Path) -> str:
    for name, kind in _IN_FOLDER.items():
        if (path / name).exists():
            return f"{kind}:{path}"
    found = itertools.chain(*(path.glob(pattern) for pattern in ("*.onnx", "*/*.onnx", "*/*/*.onnx")))
    try:
        return max(map(str, found), default="")
    except OSError:  # a folder that is changed meanwhile, or cannot be read
        return ""


def _of_kind(source: str, kinds: Collection[str]) -> str:
    """Find a source for KIND:LOCATION or KIND/LOCATION with an alias of the kind."""
    for separator in ":/":
        kind, found, location = source.partition(separator)
        near = difflib.get_close_matches(kind.lower(), kinds, n=1)
        known = _ALIASES.get(kind.lower()) or (near[0] if near else "")
        if found and known and location:
            return f"{known}:{location}"
    return ""


def _of_architecture(source: str) -> str:
    """Find a source for an architecture of an installed library, or a model on the hub."""
    wanted = source.lower()
    names = {name: kind for kind in ("timm", "torchvision") for name in _architectures(kind)}
    for spelled in (wanted, wanted.replace("-", "_")):
        base, tag, _ = spelled.partition(".")
        if base in names:
            return f"{'timm' if tag else names[base]}:{spelled}"  # only timm has tags
    first, dash, _ = wanted.replace("_", "-").partition("-")
    if _HUB.fullmatch(source) or (dash and first in set(_architectures("huggingface"))):
        return f"huggingface:{source}"
    near = difflib.get_close_matches(wanted.replace("-", "_"), names, n=1, cutoff=_CUTOFF)
    return f"{names[near[0]]}:{near[0]}" if near else ""


def _architectures(kind: str) -> Iterable[str]:
    """List the architectures of a source module; empty if its library is not installed."""
    try:
        module = importlib.import_module(f"graphkiln_converters.sources.{kind}")
    except ImportError:
        return ()
    listed: Iterable[str] = module.list_architectures()
    return listed


def synthetic_samples(
    inputs: tuple[InputSpec, ...],
    count: int,
    sizes: Mapping[str, Mapping[int, int]],
    *,
    seed: int,
) -> dict[str, AnyArray]:
    """Generate random samples: input name -> array `[count, ...]`.

    Args:
        inputs: The inputs.
        count: Number of samples.
        sizes: Input name -> axis of the sample -> size, for dynamic axes.
        seed: Seed of the generator.
    """
    generator = np.random.default_rng(seed)
    feeds: dict[str, AnyArray] = {}
    for spec in inputs:
        overrides = sizes.get(spec.name, {})
        shape = (count, *(overrides.get(axis, size) for axis, size in enumerate(spec.shape)))
        if spec.known is not None and shape[1:] == spec.shape:
            array: AnyArray = np.resize(spec.known, (count, *spec.shape)).astype(spec.dtype.numpy)
        elif spec.mask:
            array = np.ones(shape, spec.dtype.numpy)
            array[count // 2 :, ..., shape[-1] - shape[-1] // 3 :] = 0  # pad half of the samples
        elif spec.dtype.is_float:
            array = generator.standard_normal(shape).astype(spec.dtype.numpy)
        elif spec.dtype is DType.BYTES:
            array = generator.choice(np.array(spec.words, np.object_), shape)
        else:
            array = generator.integers(spec.low, spec.high, shape).astype(spec.dtype.numpy)
            if array.size > 1:
                array.flat[0], array.flat[-1] = spec.high - 1, spec.low
        feeds[spec.name] = array
    return feeds


# Rows of tables: one array of each column, `[rows]`.


def joined(specs: Sequence[InputSpec], columns: Sequence[AnyArray]) -> list[AnyArray]:
    """Join columns to an array of each input; numbers keep their type."""
    arrays, first = [], 0
    for spec in specs:
        arrays.append(np.stack(columns[first : first + spec.shape[0]], axis=1))
        first += spec.shape[0]
    return arrays


def feeds_of(specs: Sequence[InputSpec], columns: Sequence[AnyArray]) -> dict[str, AnyArray]:
    """Join columns to inputs, in the inputs' types."""
    arrays = zip(specs, joined(specs, columns), strict=True)
    return {spec.name: array.astype(spec.dtype.numpy) for spec, array in arrays}


def known_columns(specs: Sequence[InputSpec]) -> list[AnyArray]:
    """Columns of the known rows."""
    return [column for spec in specs if spec.known is not None for column in spec.known.T]


def with_known(specs: Sequence[InputSpec], columns: Sequence[AnyArray]) -> tuple[InputSpec, ...]:
    """Let synthetic samples be taken from rows."""
    return tuple(replace(spec, known=array) for spec, array in zip(specs, joined(specs, columns), strict=True))


def image_shape(recipe: Recipe, usual: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return `(channels, height, width)` of an image input: the requested shape, or the model's default.

    Raises:
        ConversionError: The requested shape has another rank or number of channels.
    """
    shape = recipe.shapes.get("", usual)
    if len(shape) != 3 or shape[0] != usual[0]:
        raise ConversionError(
            f"the model takes images [{', '.join(map(str, usual))}], --shape is {list(shape)}",
            hint=f"--shape {'x'.join(map(str, usual))}",
        )
    return shape[0], shape[1], shape[2]


def sizes_of(name: str, dims: Sequence[object], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of an input, including the batch.

    Args:
        name: Name of the input.
        dims: Dimensions of the input; those that are not integers are dynamic.
        shapes: Input name (or empty for the only input) -> shape from the user, with or without the batch.

    Raises:
        ConversionError: The rank differs from that of the input.
    """
    usual = tuple(dim if isinstance(dim, int) else USUAL_SIZE for dim in dims)
    given = shapes.get(name) or shapes.get("") or usual[1:]
    if len(given) == len(usual):
        return given
    if len(given) != len(usual[1:]):
        spelled, expected = ("x".join(map(str, sizes)) for sizes in (given, usual[1:]))
        raise ConversionError(
            f"--shape: {spelled} does not fit input '{name}' [{', '.join(map(str, dims))}]",
            hint=f"give the sizes of one sample: {name}={expected or '...'}",
        )
    return (*usual[:1], *given)


# Seconds between two lines of progress.
PROGRESS_S = 5.0
_Step = TypeVar("_Step")
_log = logging.getLogger("graphkiln.converters")


def with_progress(steps: Sequence[_Step], what: str) -> Iterator[_Step]:
    """Yield steps, and log how many are done if they take long."""
    logged_s = time.monotonic()
    for number, step in enumerate(steps):
        if (now_s := time.monotonic()) - logged_s >= PROGRESS_S:
            logged_s = now_s
            _log.info("%s: %d of %d", what, number, len(steps))
        yield step


def run_in_batches(run: Callable[[Arrays], Arrays], feeds: Arrays, size: int) -> dict[str, AnyArray]:
    """Run samples in batches and concatenate the outputs; the last batch may be smaller.

    Raises:
        ConversionError: The rows of an output differ from the batch, or its shape depends on the values.
    """
    samples = len(next(iter(feeds.values())))
    batches = []
    for start in with_progress(range(0, samples, size), f"{samples} samples in batches of {size}"):
        batch = {name: array[start : start + size] for name, array in feeds.items()}
        rows, outputs = min(size, samples - start), run(batch)
        for name, array in outputs.items():
            if array.shape[:1] != (rows,):
                raise ConversionError(
                    f"output '{name}' has the shape {list(array.shape)} for a batch of {rows}",
                    hint="the model has a fixed batch or mixes rows: leave the output out, or change the model",
                )
        batches.append(outputs)
    return {name: _joined(name, [batch[name] for batch in batches]) for name in batches[0]}


def run_in_saved_batches(run: Callable[[Arrays], Arrays], feeds: Arrays, size: int) -> dict[str, AnyArray]:
    """Run any number of rows with a fixed batch size; the last batch is padded with copies of its last row.

    An output without a batch dimension is returned unchanged, and fails the proof.
    """
    rows = len(next(iter(feeds.values())))
    batches = []
    for start in range(0, rows, size):
        batch = {name: array[start : start + size] for name, array in feeds.items()}
        lacking = size - min(size, rows - start)
        padded = {name: np.concatenate([part, np.repeat(part[-1:], lacking, axis=0)]) for name, part in batch.items()}
        batches.append(run(padded))
    return {
        name: np.concatenate([batch[name] for batch in batches])[:rows]
        if first.shape[:1] == (size,)
        else np.atleast_1d(first)[:rows]
        for name, first in batches[0].items()
    }


def run_alone(run: Callable[[Arrays], Arrays], feeds: Arrays, size: int) -> dict[str, AnyArray]:
    """Run rows one by one with a fixed batch size, each repeated to fill the batch."""
    rows = [
        run({name: np.repeat(array[i : i + 1], size, axis=0) for name, array in feeds.items()})
        for i in range(len(next(iter(feeds.values()))))
    ]
    return {name: np.concatenate([row[name][:1] for row in rows]) for name in rows[0]}


def _joined(name: str, parts: Sequence[AnyArray]) -> AnyArray:
    sizes = {array.shape[1:] for array in parts}
    if len(sizes) > 1:
        raise ConversionError(
            f"the shape of output '{name}' depends on the values: {' and '.join(map(str, map(list, sorted(sizes))))} "
            "for different samples",
            hint="provide samples that agree (--samples), remove the output (--outputs), or serve the ONNX file itself "
            "as NAME/1/model.onnx with max_batch_size: 0",
        )
    return np.concatenate(parts)
