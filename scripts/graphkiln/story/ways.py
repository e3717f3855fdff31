"""The steps of the story as ways to answer the same images: what each runs, what it is compared with, how to repeat.

The factors of the source are those of the team whose model started this project: OneFlow on NVIDIA GPUs, ResNet-101.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from graphkiln.story.requests import Machine, Request
from graphkiln_backend.graph.device import DeviceKind
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.policy import BY_PRECISION, OTHER_ENGINE, Limits

Kind = Literal["eager", "static", "session", "tensors", "images"]
"""What runs: PyTorch; a saved training step; a session in the process; a server that gets tensors, or images."""

TOP_K = 5
SOURCE_TOTAL = 25
"""The source reports this factor and more for all steps together."""
_FUSIONS = {"pad": "pad-into-conv", "add": "add-into-producer"}
_LIMITS = {**BY_PRECISION, Precision.FP32: OTHER_ENGINE}
LOWEST = {DeviceKind.CPU: (Precision.INT8, Precision.BF16), DeviceKind.GPU: (Precision.FP16,)}
"""What the compiled step tries to prove, in order, by kind of device. ONNX Runtime has no int8 kernels for GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A saved graph that a way needs.

    Attributes:
        name: In the story's own model store.
        options: What `graphkiln convert` is told beside the source, by field of its recipe.
        fusion: The pass that makes this model another one than the base; empty where that is not the point.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    fusion: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to answer images.

    Attributes:
        key: Its name in results.
        step: Number of the step that it belongs to.
        title: A few words.
        kind: What runs.
        beside: Key of the way that its own factor is relative to.
        source: Factor that the source reports, or empty.
        model: The saved graph, or None.
        settings: What the server is told of the model, `key=value`.
        precision: Row of the numeric policy.
        switch: Whether it shows one switch by itself, and is no part of the chain of steps.
        unavailable: Why this machine cannot do it, or empty.
    """

    key: str
    step: int
    title: str
    kind: Kind
    beside: str = ""
    source: str = ""
    model: Model | None = None
    settings: tuple[str, ...] = ()
    precision: Precision = Precision.FP32
    switch: bool = False
    unavailable: str = ""

    @property
    def limits(self) -> Limits:
        """The row of the policy that it must pass."""
        return _LIMITS[self.precision]

    @property
    def served(self) -> bool:
        """Whether a Triton server answers."""
        return self.kind in ("tensors", "images")


BASE = Model(name="base", options={"skip": tuple(_FUSIONS.values())})
"""The saved graph, neither fused nor lowered."""


def first_ways(machine: Machine) -> tuple[Way, ...]:
    """Steps 0 to 3, and the switches of step 4: all that is known before anything was proven."""
    gpu = machine.device.is_gpu
    return (
        Way(key="eager", step=0, title="eager, as found", kind="eager"),
        Way(key="static", step=1, title="static graph", kind="static", beside="eager", source="1.25"),
        Way(key="reduced", step=2, title="reduced", kind="session", beside="static", source="2.33", model=BASE),
        Way(key="parallel", step=3, title="parallel", kind="tensors", beside="reduced", source="4.6", model=BASE),
        _switch(
            "search",
            "conv search",
            BASE,
            settings=("conv_search=exhaustive",),
            unavailable="" if gpu else "cuDNN's search needs a GPU",
        ),
        _switch(
            "engine",
            "engine OpenVINO",
            BASE,
            settings=("engine=openvino",),
            unavailable="OpenVINO runs on CPUs" if gpu else "",
        ),
        _switch(
            "mixed",
            f"mixed ({machine.mixed})",
            BASE,
            settings=("engine=auto", f"precision={machine.mixed}"),
            precision=machine.mixed,
        ),
        *(
            _switch(key, f"{key} fusion", Model(name=f"{key}-fused", options=_all_but(passes), fusion=passes))
            for key, passes in _FUSIONS.items()
        ),
        _switch(
            "int8",
            "int8",
            Model(name="int8", options={**BASE.options, "precision": Precision.INT8}),
            precision=Precision.INT8,
            unavailable="ONNX Runtime has no int8 kernels for GPUs" if gpu else "",
        ),
    )


def last_ways(precision: Precision) -> tuple[Way, ...]:
    """Step 4 with all switches, and step 5, in the lowest precision that was proven."""
    saved = {"precision": precision} if precision is Precision.INT8 else {}
    settings = ("engine=auto",) if precision is Precision.INT8 else ("engine=auto", f"precision={precision}")
    return (
        Way(
            key="compiled",
            step=4,
            title=f"compiled ({precision})",
            kind="tensors",
            beside="parallel",
            source="1.6-1.64",
            model=Model(name="compiled", options=saved),
            settings=settings,
            precision=precision,
        ),
        Way(
            key="served",
            step=5,
            title="served end to end",
            kind="images",
            beside="compiled",
            model=Model(name="served", options={**saved, "input": "uint8-nhwc", "top_k": TOP_K}),
            settings=settings,
            precision=precision,
        ),
    )


def commands(way: Way, request: Request, machine: Machine, derivative: str) -> tuple[str, ...]:
    """What a person types to do this step alone, with the files that the story left."""
    if way.model is None:
        return (_story_command(way, request),)
    folder = request.folder
    options = convert_options(way.model, request, machine, derivative)
    words = [option for name, value in options.items() for option in _flag(name, value)]
    store = folder / "try"
    convert = shlex.join(
        ["graphkiln", "convert", request.source, "--name", way.model.name, "--model-store", str(store), *words]
    )
    if not way.served:
        return (convert, f"graphkiln verify {store / way.model.name}")
    config = store / way.model.name / "config.pbtxt"
    flags = [word for setting in way.settings for word in ("--set", f"{way.model.name}.{setting}")]
    return (
        convert,
        f"echo {shlex.quote(machine.instance_group)} >> {config}",
        shlex.join(["graphkiln", "serve", "--model-store", str(store), *flags]),
        f"graphkiln bench --model {way.model.name} --url grpc://localhost:8001 --concurrency {callers(machine)}",
    )


def _story_command(way: Way, request: Request) -> str:
    words = ["graphkiln", "story", "--model", request.source, "--image-size", str(request.image_size)]
    words += ["--weights", str(request.weights)] if request.weights else []
    words += ["--samples", str(request.samples)] if request.samples else []
    words += ["--preprocess", json.dumps(request.preprocess)] if request.preprocess else []
    words += ["--gradient"] if request.gradient else []
    return shlex.join([*words, "--only", way.key])


def convert_options(model: Model, request: Request, machine: Machine, derivative: str) -> dict[str, Any]:
    """The recipe's fields beside source, name and store; `derivative` is the `OUTPUT:INPUT` of `--gradient`."""
    samples, calibration, labels = image_files(request.folder)
    options: dict[str, Any] = {
        "shape": (f"3x{request.image_size}x{request.image_size}",),
        "max_batch_size": machine.batch,
        "samples": samples,
        **model.options,
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


def callers(machine: Machine) -> int:
    """Enough for a full batch in each of two instances, and another one that is being made."""
    return 3 * machine.batch


def _switch(key: str, title: str, model: Model, **facts: Any) -> Way:
    return Way(key=key, step=4, title=title, kind="tensors", beside="parallel", model=model, switch=True, **facts)


def _all_but(only: str) -> dict[str, Any]:
    return {"skip": tuple(name for name in _FUSIONS.values() if name != only)}


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    values = value if isinstance(value, tuple) else (json.dumps(value) if isinstance(value, dict) else value,)
    return [word for each in values for word in (flag, str(each))]


def image_files(folder: Path) -> tuple[Path, Path, Path]:
    """Folders of the images to prove and to calibrate conversions on, and the file of labels, if there is one."""
    return folder / "samples", folder / "calibration", folder / "labels.txt"
