"""Plan the sessions to try for a graph, in order, with the reason for each rejection. Nothing is built here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.engines.base import SessionConfig, Support
from graphkiln_backend.engines.hardware import missing_instructions
from graphkiln_backend.graph.device import Device, DeviceKind, Place
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import AUTO, Choice, Settings
from graphkiln_backend.repository.version import GraphFormat

# Engines by kind of device; the default is the first one that supports the precision.
_ENGINES = {DeviceKind.CPU: ("onnxruntime", "openvino"), DeviceKind.GPU: ("onnxruntime", "tensorrt")}
# Engines that read another format than ONNX.
_READERS = {GraphFormat.OPENVINO_IR: ("openvino",)}
_UNSUPPORTED_PRECISIONS = {
    (DeviceKind.CPU, "onnxruntime", Precision.BF16): "ONNX Runtime has no bf16 kernels for CPUs",
    (DeviceKind.CPU, "onnxruntime", Precision.FP16): "ONNX Runtime computes fp16 graphs in fp32 on a CPU",
}
# Settings that an engine does not support: errors, since the user expects them to have an effect.
_UNSUPPORTED_SETTINGS = {
    ("onnxruntime", "streams"): "ONNX Runtime computes a batch as a whole; use more instances instead",
    ("openvino", "op_library_filename"): "OpenVINO cannot call operators that were built for ONNX Runtime",
    ("openvino", "providers"): "execution providers are ONNX Runtime's: use engine: onnxruntime",
    ("openvino", "parallel"): "its threads cannot be pinned to the cores of a stage: use engine: onnxruntime",
    ("tensorrt", "parallel"): "TensorRT graphs cannot be cut into parts: use engine: onnxruntime",
    ("tensorrt", "providers"): "execution providers are ONNX Runtime's: use engine: onnxruntime",
    ("tensorrt", "streams"): "TensorRT computes a batch as a whole; use more instances instead",
    ("tensorrt", "layout"): "TensorRT chooses layouts itself",
    ("tensorrt", "conv_search"): "TensorRT times its kernels itself",
}
_ON_GPUS = "not yet run on a GPU: the GPU engines were built from the documentation"
_BF16_HINT = "on a CPU use bf16 instead: precision: bf16 with engine: openvino"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """Resources of the instances of a model.

    Attributes:
        device: Device of the instances.
        cores: CPU cores of all instances together.
        probe: Checks whether an engine is installed and can run on a device.
        instances: Number of instances that share the cores.
        shared_folder: Folder for shared files such as weights, or None.
        lacks: Returns the reason why the CPU does not compute in a precision natively, or empty.
        works_beside: Whether other work runs on the same cores; idle threads then sleep.
        instance: Number of this instance, from 0.
        places: With `parallel`: place of each shard of each stage, stage by stage.
        cuts: Position of the first node of each stage except the first.
    """

    device: Device
    cores: int
    probe: Callable[[str, Device], Support]
    instances: int = 1
    shared_folder: Path | None = None
    lacks: Callable[[Precision], str] = missing_instructions
    works_beside: bool = False
    instance: int = 0
    places: tuple[Place, ...] = ()
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringPlan:
    """The sessions to try.

    Attributes:
        candidates: Sessions that may serve; the fastest verified one does.
        baselines: With `engine: auto`: fp32 sessions that a candidate of lower precision must beat.
        fallback: Sessions to try if no candidate works, in the user's order.
        rejected: One line per rejected choice, with the reason.
        spread: Description of the spread over devices, or empty.
    """

    candidates: tuple[SessionConfig, ...]
    baselines: tuple[SessionConfig, ...] = ()
    fallback: tuple[SessionConfig, ...] = ()
    rejected: tuple[str, ...] = ()
    spread: str = ""

    @property
    def configs(self) -> tuple[SessionConfig, ...]:
        """All sessions, in the order of `explain`."""
        return (*self.candidates, *self.baselines, *self.fallback)

    def explain(self) -> str:
        """Describe the choices and rejections, a line each."""
        lines = [_line(number, config) for number, config in enumerate(self.configs, start=1)]
        notes = [_ON_GPUS] if any(config.device.is_gpu for config in self.configs) else []
        return "\n".join((*lines, *self.spread.splitlines(), *(f"rejected: {line}" for line in self.rejected), *notes))


def plan(
    settings: Settings,
    resources: Resources,
    *,
    saved: Precision = Precision.FP32,
    largest_batch: int = 1,
    graph_format: GraphFormat = GraphFormat.ONNX,
) -> LoweringPlan:
    """Plan the sessions of a saved graph.

    Args:
        settings: Settings of the model.
        resources: Cores and devices.
        saved: Precision of the saved graph.
        largest_batch: Largest batch that Triton will form.
        graph_format: Format of the saved graph.

    Raises:
        LoweringError: No engine can run the graph as requested; `attempts` has the reasons.
    """
    kind = resources.device.kind
    choices, rejected = _choices(settings, resources, _compute_precision(settings.precision, saved, kind), graph_format)
    for choice in (*choices, *settings.fallback):
        _check_format(choice, graph_format)
        _check_precision(choice, saved, kind)
    for choice in (*choices, *(settings.fallback if _splits(settings) else ())):
        if reason := _unsupported_setting(choice.engine, settings):
            raise LoweringError(f"{choice} does not support a setting", attempts=(reason,))

    baselines = _baselines(settings, resources, saved, graph_format)
    if baselines and settings.precision and (reason := resources.lacks(settings.precision)):
        rejected += tuple(f"{choice}: {reason}, which makes it slower than fp32" for choice in choices)
        choices, baselines = baselines, ()

    if settings.providers and _splits(settings):
        raise LoweringError(
            "providers does not support a setting", attempts=("parallel: graphs for plugins cannot be cut into parts",)
        )

    def config(choice: Choice, reason: str, providers: tuple[str, ...] = ()) -> SessionConfig:
        return replace(_session_config(choice, reason, settings, resources, largest_batch), providers=providers)

    origins = settings.origins
    requested = f"requested by {origin}" if (origin := origins.get("engine", "")) else "the default"
    return LoweringPlan(
        candidates=tuple(config(choice, requested, settings.providers) for choice in choices),
        baselines=tuple(config(choice, f"baseline that {settings.precision} must beat") for choice in baselines),
        fallback=tuple(config(choice, f"requested by {origins['fallback']}") for choice in settings.fallback),
        rejected=(*settings.rejected, *rejected),
    )


def _baselines(
    settings: Settings, resources: Resources, saved: Precision, graph_format: GraphFormat
) -> tuple[Choice, ...]:
    """Return the fp32 sessions that a 16-bit precision on a CPU must beat with `engine: auto`."""
    precision, kind = settings.precision, resources.device.kind
    if settings.engine != AUTO or kind is not DeviceKind.CPU or not (precision and saved.lowers_to(precision)):
        return ()
    engines = [engine for engine in _ENGINES[kind] if _reads(engine, graph_format)]
    rejected = _rejected_by_auto(engines, settings, resources)
    return tuple(Choice(engine=name, precision=Precision.FP32) for name in engines if name not in rejected)


def _choices(
    settings: Settings, resources: Resources, precision: Precision, graph_format: GraphFormat
) -> tuple[tuple[Choice, ...], tuple[str, ...]]:
    """Return the engines to try, and the reason against each of the others.

    Raises:
        LoweringError: No engine is left with `engine: auto`.
    """
    if settings.engine and settings.engine != AUTO:
        return (Choice(engine=settings.engine, precision=settings.precision),), ()
    kind = resources.device.kind
    rejected: dict[str, str] = {}
    for engine in _ENGINES[kind]:
        if not _reads(engine, graph_format):
            rejected[engine] = f"it does not read {graph_format}"
        elif reason := _UNSUPPORTED_PRECISIONS.get((kind, engine, precision)):
            rejected[engine] = reason
    engines = [engine for engine in _ENGINES[kind] if engine not in rejected]
    if settings.engine == AUTO:
        rejected |= _rejected_by_auto(engines, settings, resources)
    else:
        rejected |= dict.fromkeys(engines[1:], "not requested (engine: auto would try it)")
    lines = tuple(f"{engine}: {reason}" for engine, reason in rejected.items())
    choices = tuple(Choice(engine=name, precision=settings.precision) for name in engines if name not in rejected)
    if not choices:
        raise LoweringError(f"no engine can serve this graph in {precision}", attempts=lines)
    return choices, lines


def _reads(engine: str, graph_format: GraphFormat) -> bool:
    return engine in _READERS.get(graph_format, (engine,))


def _check_format(choice: Choice, graph_format: GraphFormat) -> None:
    """Check that an engine reads the format of the graph.

    Raises:
        LoweringError: It does not.
    """
    if not _reads(choice.engine, graph_format):
        raise LoweringError(
            f"{choice} cannot serve this graph",
            attempts=(f"it does not read {graph_format}",),
            hint="leave the engine out, or serve the ONNX file that the graph was made from",
        )


def _rejected_by_auto(engines: Sequence[str], settings: Settings, resources: Resources) -> dict[str, str]:
    """Return the reason against each engine that lacks a setting or is not installed."""
    rejected = {engine: reason for engine in engines if (reason := _unsupported_setting(engine, settings))}
    for engine in engines:
        if engine not in rejected and not (support := resources.probe(engine, resources.device)).ok:
            rejected[engine] = support.reason
    return rejected


def _unsupported_setting(engine: str, settings: Settings) -> str:
    """Return the first setting that an engine does not support, with the reason, or empty."""
    requested = {
        "streams": settings.streams > 1,
        "layout": bool(settings.layout),
        "conv_search": bool(settings.conv_search),
        "op_library_filename": bool(settings.op_libraries),
        "providers": bool(settings.providers),
        "parallel": _splits(settings),
    }
    names = (name for name in requested if requested[name] and (engine, name) in _UNSUPPORTED_SETTINGS)
    return next((f"{name}: {_UNSUPPORTED_SETTINGS[engine, name]}" for name in names), "")


def _splits(settings: Settings) -> bool:
    return settings.parallel is not None and settings.parallel.splits


def _compute_precision(requested: Precision | None, saved: Precision, kind: DeviceKind) -> Precision:
    """Return the precision to compute in. By default a CPU serves a graph saved in fp16 in fp32."""
    return requested or (Precision.FP32 if saved is Precision.FP16 and kind is DeviceKind.CPU else saved)


def _check_precision(choice: Choice, saved: Precision, kind: DeviceKind) -> None:
    """Check that the graph can be lowered to a precision, and that the engine computes in it.

    Raises:
        LoweringError: It cannot, or the engine does not.
    """
    requested = choice.precision
    computed = _compute_precision(requested, saved, kind)
    refused = hint = ""
    if requested is Precision.TF32 and kind is DeviceKind.CPU:
        refused = "tf32 is for NVIDIA GPUs"
        hint = _BF16_HINT
    elif requested is Precision.INT8 and saved is not Precision.INT8:
        refused = f"the graph was saved in {saved}, and int8 needs samples to calibrate on"
        hint = "graphkiln convert FILE.onnx --precision int8 --calibration SAMPLES"
    elif requested and saved not in (Precision.FP32, requested):
        refused = f"the graph was saved in {saved}, which loading does not change"
        hint = f"leave `precision` out, or convert the source model again with --precision {requested}"
    elif reason := _UNSUPPORTED_PRECISIONS.get((kind, choice.engine, computed)):
        refused = reason
        hint = _BF16_HINT
    if refused:
        raise LoweringError(f"{choice} cannot serve this graph", attempts=(refused,), hint=hint)


def _session_config(
    choice: Choice, reason: str, settings: Settings, resources: Resources, largest_batch: int
) -> SessionConfig:
    cores, instances, places = resources.cores, resources.instances, resources.places
    pinned = len(places[0].cores) if places else 0
    return SessionConfig(
        engine=choice.engine,
        device=resources.device,
        threads=settings.threads or pinned or max(1, cores // instances),
        # Spinning threads respond sooner (ResNet-50 +2%, MobileNetV3-small +37% with one request at a time), but take
        # the cores from other instances and from other work on them.
        spin=(instances == 1 or pinned > 0) and not resources.works_beside,
        reason=f"{reason}, {cores} cores shared by {instances} instance{'s' if instances > 1 else ''}",
        precision=choice.precision,
        layout=settings.layout,
        conv_search=settings.conv_search,
        streams=min(settings.streams or 1, largest_batch),  # a batch cannot have more parts than rows
        largest_batch=largest_batch,
        tuning=settings.tuning,
        shared_folder=resources.shared_folder if instances > 1 else None,
        options=settings.options.get(choice.engine, {}),
        op_libraries=settings.op_libraries,
        parallel=settings.parallel,
        places=places,
        cuts=resources.cuts,
    )


def _line(number: int, config: SessionConfig) -> str:
    facts = [f"{config.threads} threads", f"idle threads {'spin' if config.spin else 'sleep'}"]
    facts += [f"layout {config.layout}"] if config.layout else []
    facts += [f"{config.conv_search} search for convolutions"] if config.conv_search else []
    facts += [f"{config.streams} streams"] if config.streams > 1 else []
    return f"{number}. {config}, {', '.join(facts)}: {config.reason}"
