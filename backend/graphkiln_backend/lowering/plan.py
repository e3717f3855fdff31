"""Which steps to try for a graph, in order, and which were rejected and why. Pure: nothing is built here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.engines.base import SessionConfig, Support
from graphkiln_backend.graph.device import Device, DeviceKind
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import AUTO, Choice, Settings

_CANDIDATES = {DeviceKind.CPU: ("onnxruntime", "openvino"), DeviceKind.GPU: ("onnxruntime", "tensorrt")}
"""The engines of a kind of device; the first one that can compute in the precision serves where none is asked for."""
_CANNOT = {
    (DeviceKind.CPU, "onnxruntime", Precision.BF16): "ONNX Runtime has no bf16 kernels for CPUs",
    (DeviceKind.CPU, "onnxruntime", Precision.FP16): "ONNX Runtime computes fp16 graphs in fp32 on a CPU",
}
_NOISE = 1.05
"""Times that are less than this apart count as equal."""
_UNHEEDED = {
    ("onnxruntime", "streams"): "ONNX Runtime computes a batch as a whole; more instances compute side by side",
    ("tensorrt", "streams"): "TensorRT computes a batch as a whole; more instances compute side by side",
    ("tensorrt", "layout"): "TensorRT chooses layouts itself",
    ("tensorrt", "conv_search"): "TensorRT times its kernels itself",
}
"""Settings that an engine has no use for: an error, since who asks for one expects something of it."""
_RECOMMENDED = "on a CPU, bf16 is the precision that pays: precision: bf16 with engine: openvino"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What a plan depends on beside the settings.

    Attributes:
        device: Where the instances run.
        cores: Cores that all instances of the model may use together.
        probe: Says whether an engine is there and can run on a device.
        instances: How many instances share the cores.
        shared_folder: Where instances can put what they share, or None.
    """

    device: Device
    cores: int
    probe: Callable[[str, Device], Support]
    instances: int = 1
    shared_folder: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringPlan:
    """The steps to try.

    Attributes:
        candidates: What may serve; where there are several the fastest one that proves itself does.
        fallback: What to try when no candidate works, in the user's order.
        rejected: One line per choice that was not taken, with the reason.
    """

    candidates: tuple[SessionConfig, ...]
    fallback: tuple[SessionConfig, ...] = ()
    rejected: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[SessionConfig, ...]:
        """All steps in the order in which they are tried."""
        return (*self.candidates, *self.fallback)

    def explain(self) -> str:
        """Every choice and every rejection, a line each."""
        lines = [_line(number, step) for number, step in enumerate(self.steps, start=1)]
        return "\n".join((*lines, *(f"rejected: {line}" for line in self.rejected)))


def plan(
    settings: Settings, machine: Resources, *, saved: Precision = Precision.FP32, largest_batch: int = 1
) -> LoweringPlan:
    """Plans a saved graph.

    Args:
        settings: What the configuration asks for.
        machine: Where it will run.
        saved: Precision that the graph was saved in.
        largest_batch: The largest batch that will be asked for.

    Raises:
        LoweringError: Nothing can run the graph as it is asked for; `attempts` says why.
    """
    kind = machine.device.kind
    choices, rejected = _choices(settings, machine, kind, _computed(settings.precision, saved, kind))
    for choice in (*choices, *settings.fallback):
        _check_precision(choice, saved, kind)
    for choice in choices:
        if reason := _unheeded(choice.engine, settings):
            raise LoweringError(f"{choice} cannot do what is asked", attempts=(reason,))

    def step(choice: Choice, why: str) -> SessionConfig:
        return _step(choice, why, settings, machine, largest_batch)

    asked = settings.origins.get("engine", "")
    reason = f"asked for by {asked}" if asked else "the default"
    return LoweringPlan(
        candidates=tuple(step(choice, reason) for choice in choices),
        fallback=tuple(step(choice, f"asked for by {settings.origins['fallback']}") for choice in settings.fallback),
        rejected=(*settings.rejected, *rejected),
    )


def _choices(
    settings: Settings, machine: Resources, kind: DeviceKind, computed: Precision
) -> tuple[tuple[Choice, ...], tuple[str, ...]]:
    """The engines that may serve, and one line for each that may not."""
    unable = {name: _CANNOT[kind, name, computed] for name in _CANDIDATES[kind] if (kind, name, computed) in _CANNOT}
    able = [name for name in _CANDIDATES[kind] if name not in unable]
    rejected = [f"{name}: {reason}" for name, reason in unable.items()]
    if settings.engine and settings.engine != AUTO:
        return (Choice(engine=settings.engine, precision=settings.precision),), ()
    if not settings.engine:
        rejected += [f"{name}: not asked for (engine: auto tries it, too)" for name in able[1:]]
        return (Choice(engine=able[0], precision=settings.precision),), tuple(rejected)
    unheeded = {name: reason for name in able if (reason := _unheeded(name, settings))}
    rejected += [f"{name}: {reason}" for name, reason in unheeded.items()]
    found = [(name, machine.probe(name, machine.device)) for name in able if name not in unheeded]
    rejected += [f"{name}: {support.reason}" for name, support in found if not support.ok]
    choices = tuple(Choice(engine=name, precision=settings.precision) for name, support in found if support.ok)
    if not choices:
        raise LoweringError(f"no engine can serve this graph in {computed}", attempts=tuple(rejected))
    return choices, tuple(rejected)


def _unheeded(engine: str, settings: Settings) -> str:
    """Why an engine has no use for something that is asked for, or empty."""
    asked = {
        "streams": settings.streams > 1,
        "layout": bool(settings.layout),
        "conv_search": bool(settings.conv_search),
    }
    reasons = (f"{name}: {_UNHEEDED[engine, name]}" for name in asked if asked[name] and (engine, name) in _UNHEEDED)
    return next(reasons, "")


def _computed(asked: Precision | None, saved: Precision, kind: DeviceKind) -> Precision:
    """The precision to compute in. fp16 that was saved and not asked for is served in fp32 on a CPU, which is said."""
    return asked or (Precision.FP32 if saved is Precision.FP16 and kind is DeviceKind.CPU else saved)


def _check_precision(choice: Choice, saved: Precision, kind: DeviceKind) -> None:
    """Refuses what no build could make true.

    Raises:
        LoweringError: The graph cannot be brought to the precision, or the engine does not compute in it.
    """
    asked = choice.precision
    refused = ""
    hint = ""
    if asked is Precision.TF32 and kind is DeviceKind.CPU:
        refused = "tf32 is for NVIDIA GPUs"
        hint = _RECOMMENDED
    elif asked is Precision.INT8 and saved is not Precision.INT8:
        refused = f"the graph was saved in {saved}, and int8 needs samples to calibrate on"
        hint = "graphkiln convert FILE.onnx --precision int8 --calibration SAMPLES"
    elif asked and saved not in (Precision.FP32, asked):
        refused = f"the graph was saved in {saved}, which loading does not change"
        hint = f"leave `precision` out, or convert the source model again with --precision {asked}"
    elif reason := _CANNOT.get((kind, choice.engine, _computed(asked, saved, kind))):
        refused = reason
        hint = _RECOMMENDED
    if refused:
        raise LoweringError(f"{choice} cannot serve this graph", attempts=(refused,), hint=hint)


def _step(choice: Choice, why: str, settings: Settings, machine: Resources, largest_batch: int) -> SessionConfig:
    shared = f"{machine.cores} cores shared by {machine.instances} instance{'s' if machine.instances > 1 else ''}"
    return SessionConfig(
        engine=choice.engine,
        device=machine.device,
        threads=settings.threads or max(1, machine.cores // machine.instances),
        # Threads that spin answer sooner (ResNet-50 +2%, MobileNetV3-small +37% at one request a time), but instances
        # that share cores would take them from each other.
        spin=machine.instances == 1,
        reason=f"{why}, {shared}",
        precision=choice.precision,
        layout=settings.layout,
        conv_search=settings.conv_search,
        streams=settings.streams or 1,
        largest_batch=largest_batch,
        tuning=settings.tuning,
        shared_folder=machine.shared_folder if machine.instances > 1 else None,
        options=settings.options.get(choice.engine, {}),
    )


def _line(number: int, step: SessionConfig) -> str:
    facts = [f"{step.threads} threads", f"idle threads {'spin' if step.spin else 'sleep'}"]
    facts += [f"layout {step.layout}"] if step.layout else []
    facts += [f"{step.conv_search} search for convolutions"] if step.conv_search else []
    facts += [f"{step.streams} streams"] if step.streams > 1 else []
    return f"{number}. {step}, {', '.join(facts)}: {step.reason}"


def best(times_s: Sequence[float]) -> int:
    """The index of the fastest candidate; the first one within 5% of it, so that noise does not change engines."""
    fastest = min(times_s)
    return next(index for index, seconds in enumerate(times_s) if seconds <= fastest * _NOISE)
