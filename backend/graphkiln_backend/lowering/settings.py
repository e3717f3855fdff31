"""What a model's configuration requests, as one typed object: every key is honored or refused with a reason.

Where a setting is given more than once, this order decides: `--set MODEL.key=value`, `--enable-ENGINE MODEL`,
`parameters` of config.pbtxt, its `xrt` parameter, its execution accelerator. What lost is kept, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from graphkiln_backend.engines.base import SessionTuning
from graphkiln_backend.graph.device import Device, Parallelism
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import ACCEPT_IMAGES
from graphkiln_backend.lowering.setting_keys import (
    ACCELERATOR_ORIGIN,
    ACCELERATOR_SETTINGS,
    CONV_SEARCH_NUMBERS,
    CONV_SEARCHES,
    CPU_ACCELERATORS,
    CUDA_OPTIONS,
    ENGINE_FOR_ACCELERATOR,
    ENGINE_FOR_XRT,
    GPU_ACCELERATORS,
    GRAPH_LEVELS,
    KNOWN_KEYS,
    LAYOUTS,
    OWN_KEYS,
    PUBLISHED_KEYS,
    SESSION_KEYS,
    SESSION_PREFIX,
    TRITON_KEYS,
    check_known,
)
from graphkiln_backend.lowering.setting_values import (
    Choice,
    invalid_value,
    parse_choices,
    parse_count,
    parse_flag,
    parse_parallel,
    parse_precision,
    parse_switch,
)
from graphkiln_backend.repository.model_config import Accelerator, ModelConfig

# One value for each setting, where several sources may give it: the source of highest precedence wins.

T = TypeVar("T")


class Sourced(NamedTuple):
    """A value as written, and the key or flag that gives it."""

    value: str
    origin: str


class SettingResolver:
    """Keys with their values. Sources are added in the order of precedence: the first value of a key stays.

    Attributes:
        rejected: One line per value that has no effect, with the reason.
    """

    def __init__(self) -> None:
        self.rejected: list[str] = []
        self._values: dict[str, Sourced] = {}

    @property
    def values(self) -> Mapping[str, Sourced]:
        """Every key that a source gives, with the value that counts."""
        return self._values

    def add(self, key: str, value: str, origin: str) -> None:
        """Adds the value of a source; rejects it where a source before this one gives another."""
        held = self._values.setdefault(key, Sourced(value, origin))
        if held.value != value:
            self.reject(key, Sourced(value, origin), f"{held.origin} requests {held.value}")

    def get(self, key: str) -> str:
        """The value that counts, or empty."""
        return self._values[key].value if key in self._values else ""

    def parse(self, key: str, parser: Callable[[str, str], T], default: T) -> T:
        """The value that counts, read by `parser(origin, value)`.

        Raises:
            RepositoryError: The value is malformed.
        """
        if key not in self._values:
            return default
        value, origin = self._values[key]
        return parser(origin, value)

    def check(self, key: str, allowed: Sequence[str]) -> None:
        """Refuses a value that is not one of some words.

        Raises:
            RepositoryError: It is not.
        """
        if key in self._values and self.get(key) not in allowed:
            value, origin = self._values[key]
            raise invalid_value(origin, value, ", ".join(allowed))

    def reject_unused(self, keys: Iterable[str], reason: str) -> None:
        """Tells of keys that are there and change nothing."""
        for key in keys:
            if key in self._values:
                self.reject(key, self._values[key], reason)

    def remove(self, key: str, reason: str) -> None:
        """Takes a value out, and tells why."""
        self.reject(key, self._values.pop(key), reason)

    def reject(self, key: str, sourced: Sourced, reason: str) -> None:
        """Tells of a value that has no effect."""
        self.rejected.append(f"{key} {sourced.value} of {sourced.origin}: {reason}")


AUTO = "auto"
"""The engine that means: try all, take the fastest."""


class Override(NamedTuple):
    """A key of `parameters`, its value, and the flag of the command line that gives it."""

    key: str
    value: str
    flag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is requested of a model. Empty and 0 leave it to the plan.

    Attributes:
        engine: Name of an engine, or `auto`.
        precision: Element type that convolutions and matrix products must be computed in.
        layout: `nchw` or `nhwc`: the order in which a GPU keeps images (not yet run on one).
        conv_search: How cuDNN searches for convolution kernels (not yet run on a GPU).
        threads: Threads inside one operator.
        streams: Parts of a batch that are computed side by side.
        self_test: Whether the golden samples are replayed before the version may serve.
        fallback: What to try, in order, when the first choice fails.
        tuning: The rest of the session's options.
        options: Engine -> options in its own vocabulary, as written.
        origins: Setting -> the key or flag that gives it.
        rejected: One line per value that has no effect, with the reason.
        op_libraries: Libraries of custom operators.
        parallel: How the model is spread over devices; None where nothing is requested.
    """

    engine: str = ""
    precision: Precision | None = None
    layout: str = ""
    conv_search: str = ""
    threads: int = 0
    streams: int = 0
    self_test: bool = True
    fallback: tuple[Choice, ...] = ()
    tuning: SessionTuning = field(default_factory=SessionTuning)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()
    op_libraries: tuple[str, ...] = ()
    parallel: Parallelism | None = None

    @classmethod
    def from_config(cls, config: ModelConfig, device: Device, overrides: Sequence[Override] = ()) -> Settings:
        """Reads a model's configuration.

        Args:
            config: The configuration.
            device: Where the instance runs.
            overrides: What the command line gives; goes before the configuration, the first before the next.

        Raises:
            RepositoryError: A key is unknown, a value is malformed, or the instance cannot do what is requested.
        """
        resolver = SettingResolver()
        for key, value, flag in overrides:
            check_known([key], KNOWN_KEYS, flag)
            _add(resolver, key, value, flag)
        check_known(config.parameters, KNOWN_KEYS, "parameters")
        for key, value in sorted(config.parameters.items(), key=lambda item: item[0] not in OWN_KEYS):
            _add(resolver, key, value, f"parameters.{key}")
        options = _add_accelerator(resolver, _accelerator(config, device, resolver))
        _check_device(resolver, device)
        if device.is_gpu:
            cuda = {key: resolver.get(key) for key in CUDA_OPTIONS if key in resolver.values}
            options["onnxruntime"] = {**options.get("onnxruntime", {}), **cuda}
        return cls(
            engine=resolver.get("engine"),
            precision=resolver.parse("precision", parse_precision, None),
            layout=resolver.get("layout"),
            conv_search=resolver.get("conv_search"),
            threads=resolver.parse("threads", parse_count, 0),
            streams=resolver.parse("streams", parse_count, 0),
            self_test=resolver.parse("self_test", parse_switch, default=True),
            fallback=resolver.parse("fallback", parse_choices, ()),
            parallel=resolver.parse("parallel", parse_parallel, None),
            tuning=_tuning(resolver, config.graph_level),
            options={engine: given for engine, given in options.items() if given},
            origins={key: sourced.origin for key, sourced in resolver.values.items() if key in OWN_KEYS},
            rejected=tuple(resolver.rejected),
        )


_LINE = 'write there: parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def parse_override(text: str) -> Override:
    """Reads `KEY=VALUE` of a `--set` flag.

    Raises:
        RepositoryError: There is no `=`, the key is unknown, or it is none that the command line can set.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise RepositoryError(f"--set {text}: a value is missing", hint="--set KEY=VALUE")
    check_known([key], KNOWN_KEYS, "--set")
    if key == ACCEPT_IMAGES:
        raise RepositoryError(
            f"--set {text}: whether a model accepts images is read from its config.pbtxt alone",
            hint=_LINE.format(key=key, value=value),
        )
    if key in TRITON_KEYS:
        raise RepositoryError(
            f"--set {text}: Triton itself reads this, from config.pbtxt", hint=_LINE.format(key=key, value=value)
        )
    if key in PUBLISHED_KEYS:
        raise RepositoryError(
            f"--set {text}: '{key}' is what a version says of itself, and would not change what it does",
            hint="it is decided by graphkiln convert (--task, --preprocess, --labels, --top-k): convert again",
        )
    return Override(key, value, "--set")


def _add(resolver: SettingResolver, key: str, value: str, origin: str) -> None:
    """Adds a key, and the setting of ours that it means in another vocabulary.

    Raises:
        RepositoryError: A value is unknown.
    """
    resolver.add(key, value, origin)
    if key == "xrt":
        if value not in ENGINE_FOR_XRT:
            raise invalid_value(origin, value, ", ".join(ENGINE_FOR_XRT))
        resolver.add("engine", ENGINE_FOR_XRT[value], origin)
    if key == "intra_op_thread_count" and parse_count(origin, value):
        resolver.add("threads", value, origin)
    if key == "cudnn_conv_algo_search":
        resolver.add("conv_search", CONV_SEARCH_NUMBERS.get(value, value.lower()), origin)


def _accelerator(config: ModelConfig, device: Device, resolver: SettingResolver) -> Accelerator | None:
    """The execution accelerator of the instance's kind of device; the first one where there are several.

    Raises:
        RepositoryError: An accelerator or one of its keys is unknown, or it needs a GPU and the instance has none.
    """
    _check_accelerators(config.gpu_accelerators, GPU_ACCELERATORS, "gpu_execution_accelerator")
    _check_accelerators(config.cpu_accelerators, CPU_ACCELERATORS, "cpu_execution_accelerator")
    if config.gpu_accelerators and not device.is_gpu:
        raise RepositoryError(
            f"gpu_execution_accelerator '{config.gpu_accelerators[0].name}' is requested, but the instance runs on "
            "the CPU",
            hint="take the accelerator out of config.pbtxt, or serve it on a machine with a GPU",
        )
    first, *others = (config.gpu_accelerators if device.is_gpu else config.cpu_accelerators) or (None,)
    resolver.rejected += [f"execution accelerator {other.name}: one stands before it" for other in others if other]
    return first


def _check_accelerators(
    accelerators: Sequence[Accelerator], known: Mapping[str, tuple[str, ...] | None], where: str
) -> None:
    for accelerator in accelerators:
        check_known([accelerator.name], tuple(known), where)
        keys = known[accelerator.name]
        if keys is not None:
            check_known(accelerator.parameters, keys, f"{where} {accelerator.name}")


def _add_accelerator(resolver: SettingResolver, accelerator: Accelerator | None) -> dict[str, dict[str, str]]:
    """Adds the settings that an accelerator means.

    Where another engine is requested, its options stay for the case that it is a fallback; its settings do not count.

    Returns:
        Its engine -> its options that are no settings.
    """
    if accelerator is None:
        return {}
    name = accelerator.name
    engine, origin = ENGINE_FOR_ACCELERATOR[name], f"{ACCELERATOR_ORIGIN} {name}"
    resolver.add("engine", engine, origin)
    options = dict(accelerator.parameters)
    for precision in (Precision.FP16, Precision.BF16):
        if name == "tensorrt" and options.pop(f"trt_{precision}_enable", "0").lower() in ("1", "true"):
            options.setdefault("precision_mode", precision)
    for key, setting in ACCELERATOR_SETTINGS[name].items():
        value = options.pop(key, "").lower()
        if value in ("", "accuracy"):  # OpenVINO's word for: as saved
            continue
        if resolver.get("engine") in (AUTO, engine):
            resolver.add(setting, value, f"{origin}, {key}")
        else:
            resolver.reject(setting, Sourced(value, origin), "another engine is requested")
    return {engine: options}


def _check_device(resolver: SettingResolver, device: Device) -> None:
    """Refuses what the instance does not have, and tells of keys that its device or engine has no use for.

    Raises:
        RepositoryError: `layout` or `conv_search` is unknown, or requests something that a CPU does not have.
    """
    resolver.check("layout", LAYOUTS)
    resolver.check("conv_search", CONV_SEARCHES)
    if not device.is_gpu:
        _check_cpu(resolver)
    if resolver.get("engine") == "openvino":
        only_onnxruntime = set(SESSION_KEYS) - {"intra_op_thread_count"}
        keys = [key for key in resolver.values if key in only_onnxruntime or key.startswith(SESSION_PREFIX)]
        resolver.reject_unused(keys, "OpenVINO has no use for it")


def _check_cpu(resolver: SettingResolver) -> None:
    """What only a GPU has is refused on a CPU; the C++ backend's own key has no effect there, as with that backend.

    Raises:
        RepositoryError: `layout` or `conv_search` requests something that a CPU does not have.
    """
    resolver.reject_unused(CUDA_OPTIONS, "the instance runs on the CPU")
    if search := resolver.values.get("conv_search"):
        if search.origin != "parameters.cudnn_conv_algo_search":
            raise RepositoryError(f"{search.origin} is for GPUs, but the instance runs on the CPU", hint="take it out")
        resolver.remove("conv_search", "the instance runs on the CPU, which has no cuDNN")
    if resolver.get("layout") == "nhwc":
        raise RepositoryError(
            f"{resolver.values['layout'].origin} nhwc is for GPUs: on a CPU engines choose their own blocked layout",
            hint="take it out",
        )


def _tuning(resolver: SettingResolver, graph_level: int) -> SessionTuning:
    if graph_level not in GRAPH_LEVELS:
        expected = "0 (all), -1 (basic), 1 (extended) or 2 (off)"
        raise invalid_value("optimization.graph.level", str(graph_level), expected)
    entries = {key: sourced.value for key, sourced in resolver.values.items() if key.startswith(SESSION_PREFIX)}
    return SessionTuning(
        graph_level=GRAPH_LEVELS[graph_level],
        parallel=resolver.parse("execution_mode", parse_flag, default=False),
        inter_threads=resolver.parse("inter_op_thread_count", parse_count, 0),
        memory_arena=resolver.parse("enable_mem_arena", parse_flag, default=True),
        memory_pattern=resolver.parse("enable_mem_pattern", parse_flag, default=True),
        arena_shrinkage=resolver.get("memory.enable_memory_arena_shrinkage"),
        config_entries=entries,
    )
