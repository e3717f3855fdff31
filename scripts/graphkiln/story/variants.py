"""The request of a story, its platform, and its steps as variants of one inference.

The reported factors are those of the team whose model started this project: OneFlow on NVIDIA GPUs, ResNet-101.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version, release, system
from typing import Any, Literal

import psutil

from graphkiln_backend.cache.settings import user_cache_folder
from graphkiln_backend.engines.hardware import gpus, identity
from graphkiln_backend.graph.device import CPU, Device, DeviceKind
from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.graph.modules import installed_version
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.policy import BY_PRECISION, OTHER_ENGINE, Limits
from graphkiln_backend.repository.version import CONFIG_FILE

STORY_CACHE = "graphkiln-story"  # folder of stories and trained weights in the user's cache
# Distributions whose versions are reported.
_LIBRARIES = (
    "graphkiln",
    "torch",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "nvidia-pytriton",
    "numpy",
    "pillow",
)


def weights_path(architecture: str, image_size: int) -> Path:
    """Return the file to which `scripts/train-story` writes weights, and from which `graphkiln story` reads them."""
    return user_cache_folder(STORY_CACHE) / f"{architecture}-digits-{image_size}.safetensors"


def find_trained_weights(source: str, image_size: int) -> Path | None:
    """Find the weights that `scripts/train-story` wrote for a source, or None."""
    kind, _, architecture = source.partition(":")
    path = weights_path(architecture, image_size)
    return path if kind == "torchvision" and path.is_file() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryRequest:
    """The options of `graphkiln story` that decide what is measured.

    Attributes:
        source: Source of the model, as for `graphkiln convert`.
        image_size: Side of the images in pixels.
        weights: State dict, or None for random weights.
        gradient: Keep the gradient with respect to the image in the graph.
        samples: Folder of JPEGs for proof and measurement, or None for the held-out digits.
        preprocess: Preprocess spec as JSON data, for a source without one.
    """

    source: str
    image_size: int
    weights: Path | None
    gradient: bool
    samples: Path | None
    preprocess: dict[str, Any] | None = None

    @property
    def folder(self) -> Path:
        """Folder of the graphs and measurements of this request."""
        weights = "" if self.weights is None else f"{self.weights.resolve()} {self.weights.stat().st_mtime_ns}"
        facts = {"source": self.source, "size": self.image_size, "weights": weights, "gradient": self.gradient}
        facts |= {"samples": str(self.samples and self.samples.resolve()), "preprocess": self.preprocess or {}}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        return user_cache_folder(STORY_CACHE) / digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """Device and batch size of a story."""

    device: Device
    batch: int

    @property
    def mixed_precision(self) -> Precision:
        """The faster 16-bit type of the device."""
        return Precision.FP16 if self.device.is_gpu else Precision.BF16

    @property
    def instance_group(self) -> str:
        """Entry of config.pbtxt for two instances."""
        kind = "KIND_GPU" if self.device.is_gpu else "KIND_CPU"
        return f"instance_group {{ count: 2 kind: {kind} }}"

    @property
    def callers(self) -> int:
        """Concurrent requests: a full batch for each of two instances, and a third batch in the queue."""
        return 3 * self.batch


def this_platform() -> Platform:
    """Choose a GPU with batches of 64 (as in the source of the story), or the CPU with batches of 8."""
    device = Device.gpu() if gpus() else CPU
    return Platform(device=device, batch=64 if device.is_gpu else 8)


def story_facts(request: StoryRequest, platform: Platform) -> dict[str, Any]:
    """Return facts about a story for display."""
    return {
        "model": request.source,
        "image size": request.image_size,
        "weights": str(request.weights) if request.weights else "random, so that accuracy is meaningless",
        "gradient": "by the image, in every graph" if request.gradient else "none after step 1",
        "batches": f"up to {platform.batch}, two instances",
        **machine_facts(),
    }


def machine_facts() -> dict[str, Any]:
    """Return facts about this machine and its software, and the date."""
    processor = identity(CPU).partition(", instruction sets")[0]
    memory = psutil.virtual_memory().total / 2**30
    return {
        "machine": f"{processor}, {psutil.cpu_count()} cores, {memory:.0f} GiB",
        "gpu": ", ".join(str(gpu) for gpu in gpus()) or "none",
        "system": f"{system()} {release()}, Python {python_version()}",
        "versions": ", ".join(f"{name} {found}" for name in _LIBRARIES if (found := installed_version(name))),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


# PyTorch; a saved training step; a session in the process; a server with tensors or images as requests.
VariantKind = Literal["eager", "static", "session", "tensors", "images"]

TOP_K = 5
REPORTED_TOTAL = 25  # minimum factor of all steps together, as reported by the source
_FUSIONS = {"pad": "pad-into-conv", "add": "add-into-producer"}
FUSION_SWITCHES = tuple(_FUSIONS)
_LIMITS = {**BY_PRECISION, Precision.FP32: OTHER_ENGINE}
# Precisions that the compiled step tries to prove, in order. ONNX Runtime has no int8 kernels for GPUs.
LOWEST_PRECISIONS = {DeviceKind.CPU: (Precision.INT8, Precision.BF16), DeviceKind.GPU: (Precision.FP16,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSpec:
    """The saved graph of a variant.

    Attributes:
        name: Name of the model in the story's model store.
        options: Options of `graphkiln convert` in addition to the source, by field of the recipe.
        fusion: Pass that must change the graph, or empty.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    fusion: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One implementation of the same inference.

    Attributes:
        baseline: Key of the variant to which its own factor is relative.
        reported: Factor that the source reports, or empty.
        settings: Settings of the served model, `key=value`.
        precision: Row of the numeric policy.
        switch: True for a single optimization, outside of the chain of steps.
        unavailable: Reason why this platform cannot execute the variant, or empty.
    """

    key: str
    step: int
    title: str
    kind: VariantKind
    baseline: str = ""
    reported: str = ""
    graph: GraphSpec | None = None
    settings: tuple[str, ...] = ()
    precision: Precision = Precision.FP32
    switch: bool = False
    unavailable: str = ""

    @property
    def limits(self) -> Limits:
        """Row of the numeric policy."""
        return _LIMITS[self.precision]

    @property
    def graphs(self) -> tuple[GraphSpec, ...]:
        """Saved graphs that the variant runs."""
        if self.kind == "static":
            return (TRAINING_GRAPH, BASE_GRAPH)
        return (self.graph,) if self.graph else ()

    @property
    def is_served(self) -> bool:
        """True if a Triton server executes the variant."""
        return self.kind in ("tensors", "images")


# The saved graphs without the fusions of step 4: in fp32, with the backward pass, and in int8.
BASE_GRAPH = GraphSpec(name="base", options={"skip": tuple(_FUSIONS.values())})
TRAINING_GRAPH = GraphSpec(name="training")
_INT8_GRAPH = GraphSpec(name="int8", options={**BASE_GRAPH.options, "precision": Precision.INT8})


def initial_variants(platform: Platform) -> tuple[Variant, ...]:
    """Return steps 0 to 3, and the switches of step 4."""
    return (
        Variant(key="eager", step=0, title="eager, as found", kind="eager"),
        Variant(key="static", step=1, title="static graph", kind="static", baseline="eager", reported="1.25"),
        Variant(
            key="reduced", step=2, title="reduced", kind="session", baseline="static", reported="2.33", graph=BASE_GRAPH
        ),
        Variant(
            key="parallel", step=3, title="parallel", kind="tensors", baseline="reduced", reported="4.6",
            graph=BASE_GRAPH,
        ),
        *_switches(platform),
    )  # fmt: skip


def final_variants(precision: Precision, *, fused: bool = True) -> tuple[Variant, ...]:
    """Return step 4 with all optimizations, and step 5, in the lowest proven precision.

    Args:
        precision: Lowest proven precision.
        fused: False if no fusion changes the model, so that step 4 serves the graph of a switch.
    """
    saved = {"precision": precision} if precision is Precision.INT8 else {}
    settings = _settings(precision)
    compiled = GraphSpec(name="compiled", options=saved)
    if not fused:
        compiled = _INT8_GRAPH if precision is Precision.INT8 else BASE_GRAPH
    return (
        Variant(
            key="compiled",
            step=4,
            title=f"compiled ({precision})",
            kind="tensors",
            baseline="parallel",
            reported="1.6-1.64",
            graph=compiled,
            settings=settings,
            precision=precision,
        ),
        Variant(
            key="served",
            step=5,
            title="served end to end",
            kind="images",
            baseline="compiled",
            graph=GraphSpec(name="served", options={**saved, "input": "uint8-nhwc", "top_k": TOP_K}),
            settings=settings,
            precision=precision,
        ),
    )


def _settings(precision: Precision) -> tuple[str, ...]:
    """Return settings that force a precision: with `engine=auto` on a CPU, a precision is only a suggestion."""
    if precision is Precision.INT8:
        return ("engine=auto",)
    return (f"engine={'openvino' if precision is Precision.BF16 else 'auto'}", f"precision={precision}")


def _switches(platform: Platform) -> tuple[Variant, ...]:
    """Return each optimization of step 4 as a separate variant."""
    gpu, mixed = platform.device.is_gpu, platform.mixed_precision
    return (
        _switch(
            "search",
            "conv search",
            BASE_GRAPH,
            settings=("conv_search=exhaustive",),
            unavailable="" if gpu else "cuDNN's search needs a GPU",
        ),
        _switch(
            "engine",
            "engine OpenVINO",
            BASE_GRAPH,
            settings=("engine=openvino",),
            unavailable="OpenVINO runs on CPUs" if gpu else "",
        ),
        _switch("mixed", f"mixed ({mixed})", BASE_GRAPH, settings=_settings(mixed), precision=mixed),
        *(_fusion_switch(key, fusion) for key, fusion in _FUSIONS.items()),
        _switch(
            "int8",
            "int8",
            _INT8_GRAPH,
            precision=Precision.INT8,
            unavailable="ONNX Runtime has no int8 kernels for GPUs" if gpu else "",
        ),
    )


def _switch(key: str, title: str, graph: GraphSpec, **fields: Any) -> Variant:
    return Variant(
        key=key, step=4, title=title, kind="tensors", baseline="parallel", graph=graph, switch=True, **fields
    )


def _fusion_switch(key: str, fusion: str) -> Variant:
    others = tuple(name for name in _FUSIONS.values() if name != fusion)
    return _switch(key, f"{key} fusion", GraphSpec(name=f"{key}-fused", options={"skip": others}, fusion=fusion))


def repeat_commands(variant: Variant, request: StoryRequest, platform: Platform, derivative: str) -> tuple[str, ...]:
    """Return shell commands that execute one variant with the files of the story."""
    graph = variant.graph
    if graph is None:
        words = ["graphkiln", "story", "--model", request.source, "--image-size", str(request.image_size)]
        words += ["--weights", str(request.weights)] if request.weights else []
        words += ["--samples", str(request.samples)] if request.samples else []
        words += ["--preprocess", json.dumps(request.preprocess)] if request.preprocess else []
        words += ["--gradient"] if request.gradient else []
        return (shlex.join([*words, "--only", variant.key]),)
    store = request.folder / "try"
    options = convert_options(graph, request, platform, derivative)
    words = [word for name, value in options.items() for word in _option_words(name, value)]
    convert = shlex.join(
        ["graphkiln", "convert", request.source, "--name", graph.name, "--model-store", str(store), *words]
    )
    if not variant.is_served:
        return (convert, f"graphkiln verify {store / graph.name}")
    return (
        convert,
        f"echo {shlex.quote(platform.instance_group)} >> {store / graph.name / CONFIG_FILE}",
        shlex.join(["graphkiln", "serve", "--model-store", str(store), *setting_flags(graph.name, variant)]),
        f"graphkiln bench --model {graph.name} --url grpc://localhost:8001 --concurrency {platform.callers}",
    )


def convert_options(graph: GraphSpec, request: StoryRequest, platform: Platform, derivative: str) -> dict[str, Any]:
    """Return recipe fields except source, name and model store; `derivative` is the `OUTPUT:INPUT` of `--gradient`."""
    samples, calibration, labels = sample_paths(request.folder)
    options: dict[str, Any] = {
        "shape": (f"3x{request.image_size}x{request.image_size}",),
        "max_batch_size": platform.batch,
        "samples": samples,
        "keep_names": False,
        **graph.options,
    }
    if labels.exists():
        options["labels"] = labels
    if request.weights:
        options["weights"] = request.weights
    if request.preprocess:
        options["preprocess"] = request.preprocess
    if request.gradient:
        options["gradient"] = derivative
    if options.get("precision") is Precision.INT8:
        options["calibration"] = calibration
        if graph != _INT8_GRAPH and (quantizer := _fastest_quantizer(request.folder)):
            options["int8_by"] = quantizer
    return options


def _fastest_quantizer(folder: Path) -> str:
    """Return the quantizer that the conversion of the int8 switch chose; empty if it was not converted."""
    path = version_folder(folder, _INT8_GRAPH) / MANIFEST_FILE
    conversion = Manifest.read(path).conversion if path.exists() else None
    return str(conversion.recipe["int8_by"]) if conversion else ""


def setting_flags(model: str, variant: Variant) -> tuple[str, ...]:
    """Return the `--set` flags of `graphkiln serve` for a variant."""
    return tuple(word for setting in variant.settings for word in ("--set", f"{model}.{setting}"))


def sample_paths(folder: Path) -> tuple[Path, Path, Path]:
    """Return the folders of proof and calibration images, and the file of labels."""
    return folder / "samples", folder / "calibration", folder / "labels.txt"


def version_folder(folder: Path, graph: GraphSpec) -> Path:
    """Return the version folder of a graph, in a model store of its own."""
    return folder / "models" / graph.name / graph.name / "1"


def _option_words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is False:
        return [f"--no-{flag.removeprefix('--')}"]
    values = value if isinstance(value, tuple) else (json.dumps(value) if isinstance(value, dict) else value,)
    return [word for item in values for word in (flag, str(item))]
