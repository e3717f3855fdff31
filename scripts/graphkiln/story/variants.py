"""The steps of the story as variants of one inference: what each executes, its baseline, its precision.

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
from graphkiln_backend.graph.modules import installed_version
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.policy import BY_PRECISION, OTHER_ENGINE, Limits
from graphkiln_backend.repository.version import CONFIG_FILE

# Request of a story, the platform that it runs on, and facts about both.

# Folder of all stories and of the trained weights, in the user's cache.
STORY_CACHE = "graphkiln-story"
# Distributions whose versions are facts of a figure.
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
    """File that `scripts/train-story` writes the weights of an architecture to, and `graphkiln story` reads."""
    return user_cache_folder(STORY_CACHE) / f"{architecture}-digits-{image_size}.safetensors"


def find_trained_weights(source: str, image_size: int) -> Path | None:
    """The weights that `scripts/train-story` left for a source, or None."""
    kind, _, architecture = source.partition(":")
    path = weights_path(architecture, image_size)
    return path if kind == "torchvision" and path.is_file() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryRequest:
    """The options of `graphkiln story` that decide what is measured.

    Attributes:
        source: The model, as `graphkiln convert` takes it.
        image_size: Side of its images in pixels.
        weights: State dict, or None for random weights.
        gradient: Keep the gradient with respect to the image in the graph.
        samples: Folder of JPEGs to prove and measure on, or None for the held-out digits.
        preprocess: Preprocessing of an image, as JSON data, for a source without one.
    """

    source: str
    image_size: int
    weights: Path | None
    gradient: bool
    samples: Path | None
    preprocess: dict[str, Any] | None = None

    @property
    def folder(self) -> Path:
        """Folder of the graphs and measurements of this request; another request has another folder."""
        weights = "" if self.weights is None else f"{self.weights.resolve()} {self.weights.stat().st_mtime_ns}"
        facts = {"source": self.source, "size": self.image_size, "weights": weights, "gradient": self.gradient}
        facts |= {"samples": str(self.samples and self.samples.resolve()), "preprocess": self.preprocess or {}}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        return user_cache_folder(STORY_CACHE) / digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """Device and batch size of a story.

    Attributes:
        device: Device.
        batch: Largest batch that Triton forms.
    """

    device: Device
    batch: int

    @property
    def mixed_precision(self) -> Precision:
        """The 16-bit type in which the device computes products fastest."""
        return Precision.FP16 if self.device.is_gpu else Precision.BF16

    @property
    def instance_group(self) -> str:
        """Two instances, as config.pbtxt writes it."""
        kind = "KIND_GPU" if self.device.is_gpu else "KIND_CPU"
        return f"instance_group {{ count: 2 kind: {kind} }}"

    @property
    def callers(self) -> int:
        """Concurrent requests: a full batch for each of two instances, and a third that is being formed."""
        return 3 * self.batch


def this_platform() -> Platform:
    """A GPU where there is one; batches of 64 there (as the source of the story), of 8 on a CPU."""
    device = Device.gpu() if gpus() else CPU
    return Platform(device=device, batch=64 if device.is_gpu else 8)


def story_facts(request: StoryRequest, platform: Platform) -> dict[str, Any]:
    """Facts about a story, for people, as plain data."""
    return {
        "model": request.source,
        "image size": request.image_size,
        "weights": str(request.weights) if request.weights else "random: nothing is decided by them",
        "gradient": "by the image, in every graph" if request.gradient else "none after step 1",
        "batches": f"up to {platform.batch}, two instances",
        **machine_facts(),
    }


def machine_facts() -> dict[str, Any]:
    """Facts about this machine and its software, and the date."""
    processor = identity(CPU).partition(", instruction sets")[0]
    memory = psutil.virtual_memory().total / 2**30
    return {
        "machine": f"{processor}, {psutil.cpu_count()} cores, {memory:.0f} GiB",
        "gpu": ", ".join(str(gpu) for gpu in gpus()) or "none",
        "system": f"{system()} {release()}, Python {python_version()}",
        "versions": ", ".join(f"{name} {found}" for name in _LIBRARIES if (found := installed_version(name))),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


# What executes: PyTorch; a saved training step; a session in the process; a server that gets tensors, or images.
VariantKind = Literal["eager", "static", "session", "tensors", "images"]

TOP_K = 5
# The source reports this factor and more for all steps together.
REPORTED_TOTAL = 25
_FUSIONS = {"pad": "pad-into-conv", "add": "add-into-producer"}
_LIMITS = {**BY_PRECISION, Precision.FP32: OTHER_ENGINE}
# What the compiled step tries to prove, in order, by kind of device. ONNX Runtime has no int8 kernels for GPUs.
LOWEST_PRECISIONS = {DeviceKind.CPU: (Precision.INT8, Precision.BF16), DeviceKind.GPU: (Precision.FP16,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSpec:
    """The saved graph that a variant needs.

    Attributes:
        name: Name of the model in the story's model store.
        options: Options of `graphkiln convert` beside the source, by field of its recipe.
        fusion: The pass that must change this graph, or the variant shows nothing; empty where none must.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    fusion: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One implementation of the same inference.

    Attributes:
        key: Name in results.
        step: Number of the step that it belongs to.
        title: A few words.
        kind: Kind of workload.
        baseline: Key of the variant that its own factor is relative to.
        reported: Factor that the source reports, or empty.
        graph: The saved graph, or None.
        settings: Settings of the served model, `key=value`.
        precision: Row of the numeric policy.
        switch: True for one optimization by itself, outside of the chain of steps.
        unavailable: Reason why this platform cannot execute it, or empty.
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
        """The row of the policy that it must pass."""
        return _LIMITS[self.precision]

    @property
    def is_served(self) -> bool:
        """True where a Triton server executes it."""
        return self.kind in ("tensors", "images")


# The saved graph in fp32, without the fusions of step 4.
BASE_GRAPH = GraphSpec(name="base", options={"skip": tuple(_FUSIONS.values())})


def initial_variants(platform: Platform) -> tuple[Variant, ...]:
    """Steps 0 to 3, and the switches of step 4: all that is known before anything was proven."""
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


def final_variants(precision: Precision) -> tuple[Variant, ...]:
    """Step 4 with all optimizations, and step 5, in the lowest precision that was proven."""
    saved = {"precision": precision} if precision is Precision.INT8 else {}
    settings = _settings(precision)
    return (
        Variant(
            key="compiled",
            step=4,
            title=f"compiled ({precision})",
            kind="tensors",
            baseline="parallel",
            reported="1.6-1.64",
            graph=GraphSpec(name="compiled", options=saved),
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
    """Settings that force a precision, even a slower one: for `engine=auto` on a CPU a precision is only an offer."""
    if precision is Precision.INT8:
        return ("engine=auto",)
    return (f"engine={'openvino' if precision is Precision.BF16 else 'auto'}", f"precision={precision}")


def _switches(platform: Platform) -> tuple[Variant, ...]:
    """Each optimization of step 4 by itself."""
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
        *(
            _switch(key, f"{key} fusion", GraphSpec(name=f"{key}-fused", options=_skip_all_but(fusion), fusion=fusion))
            for key, fusion in _FUSIONS.items()
        ),
        _switch(
            "int8",
            "int8",
            GraphSpec(name="int8", options={**BASE_GRAPH.options, "precision": Precision.INT8}),
            precision=Precision.INT8,
            unavailable="ONNX Runtime has no int8 kernels for GPUs" if gpu else "",
        ),
    )


def _switch(key: str, title: str, graph: GraphSpec, **fields: Any) -> Variant:
    return Variant(
        key=key, step=4, title=title, kind="tensors", baseline="parallel", graph=graph, switch=True, **fields
    )


def _skip_all_but(fusion: str) -> dict[str, Any]:
    return {"skip": tuple(name for name in _FUSIONS.values() if name != fusion)}


# The commands that repeat a step by hand, and the conversion options behind them.


def repeat_commands(variant: Variant, request: StoryRequest, platform: Platform, derivative: str) -> tuple[str, ...]:
    """Shell commands that execute one variant by itself, with the files that the story left."""
    graph = variant.graph
    if graph is None:
        return (_story_command(variant, request),)
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
    """Fields of the recipe beside source, name and model store; `derivative` is the `OUTPUT:INPUT` of `--gradient`."""
    samples, calibration, labels = sample_paths(request.folder)
    options: dict[str, Any] = {
        "shape": (f"3x{request.image_size}x{request.image_size}",),
        "max_batch_size": platform.batch,
        "samples": samples,
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
        options |= {"calibration": calibration, "calibration_method": "entropy"}
    return options


def setting_flags(model: str, variant: Variant) -> tuple[str, ...]:
    """The `--set` flags of `graphkiln serve` for a variant."""
    return tuple(word for setting in variant.settings for word in ("--set", f"{model}.{setting}"))


def sample_paths(folder: Path) -> tuple[Path, Path, Path]:
    """The folders of images that conversions are proven on and calibrated with, and the file of labels."""
    return folder / "samples", folder / "calibration", folder / "labels.txt"


def _story_command(variant: Variant, request: StoryRequest) -> str:
    words = ["graphkiln", "story", "--model", request.source, "--image-size", str(request.image_size)]
    words += ["--weights", str(request.weights)] if request.weights else []
    words += ["--samples", str(request.samples)] if request.samples else []
    words += ["--preprocess", json.dumps(request.preprocess)] if request.preprocess else []
    words += ["--gradient"] if request.gradient else []
    return shlex.join([*words, "--only", variant.key])


def _option_words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    values = value if isinstance(value, tuple) else (json.dumps(value) if isinstance(value, dict) else value,)
    return [word for item in values for word in (flag, str(item))]
