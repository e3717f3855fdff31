"""Interface of the source modules: `open_source(location, options) -> SourceModel`.

A source model is opened, not yet converted: it can be run (the reference of the proof) and exported.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import onnx_ir

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, EngineUnavailable
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Task
from graphkiln_backend.system.closing import Closeable
from graphkiln_converters.detection.options import DetectorOptions
from graphkiln_converters.recipe import near_file

# Suggestions for a text that is not a source: `resnet18`, `hf:bert`, a folder, a file of weights.
#
# The libraries of the sources are asked for their architectures, as far as they are installed: after a wrong
# name there is time for that.

# Other words for the kinds of sources.
_ALIASES = {
    **dict.fromkeys(("tv", "torch", "pytorch", "torchvision.models", "flowvision"), "torchvision"),
    **dict.fromkeys(("hf", "transformers", "hub", "hf-hub", "hf_hub"), "huggingface"),
    **dict.fromkeys(("py", "module"), "python"),
    **dict.fromkeys(("flow", "of"), "oneflow"),
}
_WEIGHTS = {".pt", ".pth", ".bin", ".ckpt", ".safetensors"}
# A file that makes a folder a source.
_IN_FOLDER = {"config.json": "huggingface", "model.mlir": "oneflow"}
_CUTOFF = 0.75
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_LISTS = {"torchvision": "list_architectures", "timm": "list_all_architectures"}
_MODEL_TYPES = "list_model_types"


def suggest(source: str, kinds: Collection[str]) -> str:
    """Suggest a source for a text that is not one.

    Args:
        source: The text.
        kinds: The kinds of sources.

    Returns:
        The hint; empty where nothing is near.
    """
    if Path(source).is_file():  # no name of an architecture: nobody need wait for the libraries
        return _of_path(Path(source))
    finders: tuple[Callable[[], str], ...] = (
        lambda: _of_path(Path(source)),
        lambda: near_file(Path(source)) if Path(source).suffix else "",
        lambda: _of_kind(source, kinds),
        lambda: _of_architecture(source),
    )
    return next((hint for find in finders if (hint := find())), "") if source.strip() else ""


def _meant(source: str) -> str:
    return f"did you mean '{source}'?"


def _of_path(path: Path) -> str:
    """For a file or folder that is there."""
    if path.is_dir():
        kinds = [kind for name, kind in _IN_FOLDER.items() if (path / name).exists()]
        graphs = sorted(path.glob("**/*.onnx"))
        return _meant(f"{kinds[0]}:{path}") if kinds else _meant(str(graphs[-1])) if graphs else ""
    if not path.is_file():
        return ""
    if path.suffix == ".py":
        return f"name the function that returns the model: python:{path}:FUNCTION"
    if path.suffix in _WEIGHTS:
        return f"weights alone are no model: name its architecture, for example torchvision:ARCH --weights {path}"
    return ""


def _of_kind(source: str, kinds: Collection[str]) -> str:
    """For KIND:LOCATION, or KIND/LOCATION, with another word for the kind."""
    for separator in ":/":
        kind, found, location = source.partition(separator)
        near = difflib.get_close_matches(kind.lower(), kinds, n=1)
        known = _ALIASES.get(kind.lower()) or (near[0] if near else "")
        if found and known and location:
            return _meant(f"{known}:{location}")
    return ""


def _of_architecture(source: str) -> str:
    """For the name of an architecture, or of a model on the hub."""
    wanted = source.lower()
    names = {name: kind for kind in reversed(_LISTS) for name in _names(kind, _LISTS[kind])}
    for spelled in (wanted, wanted.replace("-", "_")):
        base, tag, _ = spelled.partition(".")
        if base in names:
            return _meant(f"{'timm' if tag else names[base]}:{spelled}")  # only timm has tags
    first, dash, _ = wanted.replace("_", "-").partition("-")
    if _HUB.fullmatch(source) or (dash and first in set(_names("huggingface", _MODEL_TYPES))):
        return _meant(f"huggingface:{source}")
    near = difflib.get_close_matches(wanted.replace("-", "_"), names, n=1, cutoff=_CUTOFF)
    return _meant(f"{names[near[0]]}:{near[0]}") if near else ""


def _names(kind: str, function: str) -> Iterable[str]:
    """The architectures that a source module lists; none where its library is not installed."""
    try:
        module = importlib.import_module(f"graphkiln_converters.sources.{kind}")
    except ImportError:
        return ()
    listed: Iterable[str] = getattr(module, function)()
    return listed


# in the description of a source without trained weights
RANDOM_WEIGHTS = "with random weights"
# The batch size of exports where the source leaves the choice. Never 1: PyTorch specializes on it, and a baked-in
# batch is the commonest silent failure of an export.
EXPORT_BATCH = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One input of a source model.

    Attributes:
        name: The source's own name.
        dtype: Element type.
        shape: Sizes of one sample, without the batch; of an axis in `dynamic`, its usual size.
        dynamic: Axis of the sample -> smallest and largest size.
        high: Synthetic integers are drawn from 0 up to this, exclusive.
        mask: Whether it is an attention mask: ones where the other inputs hold tokens, then zeros.
        words: Synthetic text is drawn from these.
    """

    name: str
    dtype: DType = DType.FP32
    shape: tuple[int, ...]
    dynamic: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    high: int = 2
    mask: bool = False
    words: tuple[str, ...] = ("", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """The options of any source.

    Attributes:
        weights: A state dict (`.pth`, `.pt`, `.safetensors`) to load, or None for the source's own.
        pretrained: Load published weights; needs the internet.
        features_only: A backbone that returns feature maps (timm).
        out_indices: Which feature maps.
        shapes: Input name (or empty for the only one) -> sizes of one sample, where the source does not know them.
        allow_code: Open files that can run code.
        free_batch: Let a batch vary that a graph was saved with.
        samples: The user's samples, for sources that do not know their inputs.
        task: Requested image task; `auto` for the source's.
        detection: Options for a detector's graph.
    """

    weights: Path | None = None
    pretrained: bool = False
    features_only: bool = False
    out_indices: tuple[int, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    allow_code: bool = False
    free_batch: bool = True
    samples: Path | None = None
    task: str = "auto"
    detection: DetectorOptions = field(default_factory=DetectorOptions)


class SourceModel(Protocol):
    """A source model: describes itself, can be run, and can be exported."""

    @property
    def description(self) -> str:
        """The source as the user named it."""
        ...

    @property
    def libraries(self) -> tuple[str, ...]:
        """Distributions whose versions go into the manifest."""
        ...

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """Its inputs, in order."""
        ...

    @property
    def preprocess(self) -> Preprocess | None:
        """Preprocessing of an image, or None."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names, or empty."""
        ...

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """The reference outputs, fp32: `[batch, ...]` arrays by the source's own names."""
        ...

    def export(self, dynamic: Mapping[str, Mapping[int, tuple[int, int]]]) -> onnx_ir.Model:
        """The graph, with the source's own names and a dynamic first dimension.

        Args:
            dynamic: Input -> axis of the sample -> smallest and largest size, besides the batch.

        Raises:
            ConversionError: The source cannot be exported.
        """
        ...

    def close(self) -> None:
        """Release its session and temporary files."""
        ...


@runtime_checkable
class GradientSource(Protocol):
    """A source model that returns a gradient, too."""

    @property
    def gradient(self) -> str:
        """Names of the output that is a gradient."""
        ...

    def gradient_noise(self, feeds: Mapping[str, AnyArray]) -> float:
        """Change of the gradient when its input changes by fp32's own error, as a share of its length."""
        ...


@runtime_checkable
class PreciseSource(Protocol):
    """A source model that can be computed in fp64, too."""

    def run_in_fp64(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """Compute `run` in fp64, and return fp64 in place of fp32.

        Raises:
            ConversionError: The model computes in no other type than its own.
        """
        ...


@runtime_checkable
class FixedBatchSource(Protocol):
    """A source model that was saved with one batch size; the graph's is dynamic all the same."""

    @property
    def batch_size(self) -> int:
        """The size that it was saved with."""
        ...


@runtime_checkable
class NotedSource(Protocol):
    """A source model of which a person should know more."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A line each, for the log and the manifest."""
        ...


@runtime_checkable
class TaskSource(Protocol):
    """A source model that knows what it answers about an image."""

    @property
    def task(self) -> Task | None:
        """The task, by the source's own names of outputs; None where it is not known."""
        ...


@runtime_checkable
class WholeSource(Protocol):
    """A source model whose inputs may have no batch: the shapes of its inputs are then whole, and so is each sample."""

    @property
    def whole(self) -> str:
        """Reason why requests cannot be batched; empty where they can."""
        ...


@dataclass(frozen=True, kw_only=True)
class OpenModel(Closeable):
    """A source model that is ready to be exported, with the recipe's additions.

    Attributes:
        source: The model.
        inputs: Its inputs, with all dimensions that vary.
        preprocess: How an image becomes its input, or None.
        labels: Class names; empty for none.
        task: Its image task by the source's names of outputs; None until the graph is known.
    """

    source: SourceModel
    inputs: tuple[InputSpec, ...]
    preprocess: Preprocess | None
    labels: tuple[str, ...]
    task: Task | None = None

    @property
    def whole(self) -> str:
        """Reason why its requests cannot be batched; empty where they can."""
        return self.source.whole if isinstance(self.source, WholeSource) else ""

    def close(self) -> None:
        """Close the source."""
        self.source.close()


_KINDS = {
    "torchvision": ("torchvision", "torchvision"),
    "timm": ("timm", "timm"),
    "huggingface": ("huggingface", "huggingface"),
    "decoder": ("decoder", "huggingface"),
    "python": ("python_module", "convert"),
    "oneflow": ("oneflow_graph", "convert"),
    "torchscript": ("torchscript", "convert"),
    "sklearn": ("sklearn", "sklearn"),
    "keras": ("keras", "keras"),
}
# Kinds that are exported elsewhere: kind -> what its own environment runs. paddle2onnx needs an older ONNX than ours;
# tf2onnx would not, but TensorFlow beside it is larger than everything else that a conversion needs.
_ELSEWHERE = {
    "paddle": "paddle2onnx --model_dir DIR ... --save_file model.onnx",
    "tensorflow": "python -m tf2onnx.convert --saved-model DIR --opset 18 --output model.onnx",
}
_SUFFIXES = {".pt2": "exported_program", ".onnx": "onnx_file", ".skops": "sklearn", ".keras": "keras"}
# Modules that open what others open, for `--task detection`.
_DETECTORS = {"onnx_file": "onnx_detector"}
CODE_HINT = "if you trust whoever made it, give --allow-code; an .onnx or .safetensors file runs none"
# Its loader runs what the file says: it evaluates text and loads pickles.
_RUNS_CODE = ".pt2"


def described(name: str, options: SourceOptions) -> str:
    """Describe an architecture, and note random weights."""
    return name if options.weights or options.pretrained else f"{name} {RANDOM_WEIGHTS}"


def open_source(source: str, options: SourceOptions) -> SourceModel:
    """Open `KIND:LOCATION`, `FILE.pt2`, `FILE.onnx`, `FILE.skops` or `FILE.keras`.

    Raises:
        ConversionError: There is no such kind, file or architecture, it cannot be loaded, or it could run code
            without --allow-code.
        EngineUnavailable: The library of that kind is not installed.
    """
    kind, separator, location = source.partition(":")
    suffix = Path(source).suffix.lower()
    if suffix in _SUFFIXES and kind not in _KINDS:
        module_name, location = _SUFFIXES[suffix], source
        extra = module_name if module_name in _KINDS else "convert"
        module_name = _DETECTORS.get(module_name, module_name) if options.task == "detection" else module_name
        if suffix == _RUNS_CODE and not options.allow_code and Path(source).is_file():
            raise ConversionError(f"{source} is not loaded: a {_RUNS_CODE} file can run code", hint=CODE_HINT)
    elif separator and kind in _KINDS:
        module_name, extra = _KINDS[kind]
    else:
        if kind in _ELSEWHERE:
            raise ConversionError(
                f"{kind} models are exported in an environment of their own",
                hint=f"there: {_ELSEWHERE[kind]}; then: graphkiln convert model.onnx --reference FILE.npz, with "
                "inputs and outputs that were recorded there",
            )
        known = [*(f"{name}:..." for name in _KINDS), *(f"FILE{ending}" for ending in _SUFFIXES)]
        raise ConversionError(
            f"'{source}' is not a source", hint=suggest(source, _KINDS) or f"known: {', '.join(known)}"
        )
    try:
        module = importlib.import_module(f"graphkiln_converters.sources.{module_name}")
    except ImportError as error:
        raise EngineUnavailable(f"{kind} models need a library that is not installed: {error}", extra=extra) from error
    opener: Callable[[str, SourceOptions], SourceModel] = module.open_source
    return opener(location, options)


def synthetic_samples(
    inputs: tuple[InputSpec, ...],
    count: int,
    sizes: Mapping[str, Mapping[int, int]],
    *,
    seed: int,
) -> dict[str, AnyArray]:
    """Seeded random samples `[count, ...]` by input name.

    Args:
        inputs: The inputs.
        count: Number of samples.
        sizes: Input -> axis of the sample -> size, for dynamic axes.
        seed: Of the generator.
    """
    generator = np.random.default_rng(seed)
    feeds: dict[str, AnyArray] = {}
    for spec in inputs:
        overrides = sizes.get(spec.name, {})
        shape = (count, *(overrides.get(axis, size) for axis, size in enumerate(spec.shape)))
        if spec.mask:
            array: AnyArray = np.ones(shape, spec.dtype.numpy)
            array[count // 2 :, ..., shape[-1] - shape[-1] // 3 :] = 0  # half of the samples are padded
        elif spec.dtype.is_float:
            array = generator.standard_normal(shape).astype(spec.dtype.numpy)
        elif spec.dtype is DType.BYTES:
            array = generator.choice(np.array(spec.words, np.object_), shape)
        else:
            array = generator.integers(0, spec.high, shape).astype(spec.dtype.numpy)
        feeds[spec.name] = array
    return feeds


USUAL_SIZE = 8  # of a dimension that varies and whose size is not given


def sizes_of(name: str, dims: Sequence[object], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Sizes of all dimensions of an input, the batch among them.

    Args:
        name: Name of the input.
        dims: Its dimensions; one that is no integer varies.
        shapes: Input name (or empty for the only one) -> sizes that the user gives: of one sample, or of all
            dimensions.

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
