"""Execution providers of other packages: wheels `onnxruntime-ep-*`, whose libraries ONNX Runtime loads as plugins.

Such a wheel has a module `onnxruntime_ep_NAME`, which knows the path of its library and the names of its providers. A
plugin computes its part of a graph as a few fused kernels, so that the profile shows neither nodes nor types:
nodes are counted in ONNX Runtime's own record of the partition.

Only OpenVINO's plugin was run so far, on a CPU. It has the options of engine openvino, and the same graphs and values
are refused; so is what that engine corrects, and what the plugin itself does wrong.

Source: ONNX Runtime, "Plugin Execution Provider Libraries" (usage, packaging).
"""

from __future__ import annotations

import functools
import json
import pkgutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime

from graphkiln_backend.engines.base import KernelType, Placement, SessionConfig
from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.engines.onnxruntime.loading import CPU, ERRORS, session_options
from graphkiln_backend.engines.onnxruntime.session import PRODUCTS, OnnxRuntimeSession
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import EngineUnavailable, LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.repository.onnx_file import read_precision

if TYPE_CHECKING:
    from graphkiln_backend.engines.openvino_numbers import Checks

_SUFFIX = "ExecutionProvider"
_MODULES = "onnxruntime_ep_"
# Wheels on PyPI by the name of their provider, in small letters.
_WHEELS = {
    "mlx": "onnxruntime-ep-mlx",
    "nvtensorrtrtx": "onnxruntime-ep-nv-tensorrt-rtx",
    "openvino": "onnxruntime-ep-openvino",
    "webgpu": "onnxruntime-ep-webgpu",
}
_OPENVINO = "OpenVINOExecutionProvider"
_RECORD = "session.record_ep_graph_assignment_info"
_READ_RECORD = "get_provider_graph_assignment_info"  # method of a session, since ONNX Runtime 1.24


@dataclass(frozen=True, slots=True)
class Plugin:
    """A provider on one device.

    Attributes:
        name: Its name in ONNX Runtime.
        device: The provider on a device, as ONNX Runtime lists it.
        options: Options that graphkiln sets.
    """

    name: str
    device: Any
    options: Mapping[str, str]

    def __str__(self) -> str:
        facts, hardware = self.device.ep_metadata, self.device.device
        model = facts.get("FULL_DEVICE_NAME", hardware.vendor)
        return f"{self.name} {facts.get('version', '')} on {hardware.type.name.lower()} ({model})"


def build_with_plugins(graph_path: Path, config: SessionConfig) -> PluginSession:
    """Load a graph with the providers of its configuration.

    Raises:
        EngineUnavailable: A wheel is not installed, its library does not load, or it has no such device.
        LoweringError: ONNX Runtime or a provider refuses the graph, or no node runs on the first provider.
    """
    if not hasattr(onnxruntime.InferenceSession, _READ_RECORD):
        raise EngineUnavailable(
            f"ONNX Runtime {onnxruntime.__version__} does not tell which nodes a plugin computes",
            hint="pip install --upgrade onnxruntime",
        )
    requested = [name for name in config.providers if name != "CPU"]
    options = session_options(config)
    options.add_session_config_entry(_RECORD, "1")
    plugins = [_find(name, config) for name in requested]
    for plugin in plugins:
        options.add_provider_for_devices([plugin.device], dict(plugin.options))
    return PluginSession(graph_path, options, plugins, config)


class PluginSession(OnnxRuntimeSession):
    """A session of which other packages compute a part.

    Args:
        graph_path: The graph.
        options: Session options to which the plugins were added.
        plugins: The plugins in order.
        config: The configuration.

    Raises:
        LoweringError: ONNX Runtime or a plugin refuses the graph, or no node runs on the first plugin.
    """

    def __init__(
        self,
        graph_path: Path,
        options: onnxruntime.SessionOptions,
        plugins: Sequence[Plugin],
        config: SessionConfig,
    ) -> None:
        precision = read_precision(graph_path)
        on_cpu = plugins[0].device.device.type == onnxruntime.OrtHardwareDeviceType.CPU
        if on_cpu and precision is Precision.INT8 and saturates_products_of_bytes():
            raise LoweringError(
                f"{plugins[0].name} is not used for int8 on a CPU without VNNI instructions",
                attempts=("sums of products of bytes may overflow there",),
                hint="leave providers out: ONNX Runtime's own kernels are exact",
            )
        self._checks = _examine(graph_path, plugins)
        super().__init__(graph_path, options, [(plugin.name, dict(plugin.options)) for plugin in plugins])
        note = "checked" if self._checks else "not checked"
        listed = ", ".join(map(str, plugins))
        self.notes = (*self.notes, f"providers: {listed}: {note} for deviations from ONNX that the self-test may miss")
        # The types that a plugin computes in cannot be read back. They are known where it was told to keep FP32.
        certain = bool(plugins[0].options) and len(plugins) == 1 and precision is Precision.FP32
        self._type: KernelType = Precision.FP32 if certain else "unknown"
        self._allowed = {*(plugin.name for plugin in plugins), *([CPU] if "CPU" in config.providers else [])}
        nodes: dict[str, list[tuple[str, str]]] = {}
        for part in self._session.get_provider_graph_assignment_info():
            nodes.setdefault(part.ep_name, []).extend((node.name, node.op_type) for node in part.get_nodes())
        self._nodes = nodes
        # The checks are of the graph as a whole: memory that passes between its parts is not seen.
        parts = [part.ep_name for part in self._session.get_provider_graph_assignment_info()]
        if plugins[0].name not in nodes or (self._checks and len(parts) > 1):
            self.close()
            raise LoweringError(
                f"{plugins[0].name} does not compute {'the whole' if self._checks else 'a node of the'} graph",
                attempts=(", ".join(f"{len(found)} nodes on {name}" for name, found in nodes.items()),),
                hint="leave providers out",
            )

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs; see `engines.base.Session.run`.

        Raises:
            SignatureError: As the base class; or OpenVINO would change a value.
        """
        if self._checks:
            for name, array in feeds.items():
                self._checks.check(name, array)
        return super().run(feeds, outputs)

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds once; count the nodes of plugins as assigned, those of the CPU as they ran."""
        ran = super().placement(feeds)
        assigned = {name: nodes for name, nodes in self._nodes.items() if name != CPU}
        count = sum(operator in PRODUCTS for nodes in assigned.values() for _, operator in nodes)
        products = Counter[KernelType]({self._type: count} if count else {}) + Counter(ran.products)
        elsewhere = (nodes for name, nodes in self._nodes.items() if name not in self._allowed)
        return replace(
            ran,
            nodes={**ran.nodes, **{name: len(nodes) for name, nodes in assigned.items()}},
            precision=products.most_common(1)[0][0] if products else ran.precision,
            products=dict(products),
            elsewhere=tuple(name for nodes in elsewhere for name, operator in nodes if operator in PRODUCTS),
        )


def _examine(graph_path: Path, plugins: Sequence[Plugin]) -> Checks | None:
    """Return the checks of requests that OpenVINO's plugin needs, or None without it.

    Raises:
        EngineUnavailable: OpenVINO's plugin is used, and the package that analyzes graphs for it is not installed.
        LoweringError: OpenVINO deviates from ONNX for this graph.
    """
    if all(plugin.name != _OPENVINO for plugin in plugins):
        return None
    try:
        from graphkiln_backend.engines.openvino import examine
    except ImportError as error:
        raise EngineUnavailable(
            f"graphs for OpenVINO's plugin are analyzed by the package openvino: {error}", extra="openvino"
        ) from error
    try:
        return examine(graph_path)
    except LoweringError as error:
        message = error.message.removesuffix("".join(f"; {each}" for each in error.attempts))
        raise LoweringError(message, attempts=error.attempts, hint="leave providers out") from error


def _find(requested: str, config: SessionConfig) -> Plugin:
    """Find a provider by `NAME` or `NAME:DEVICE`, with the options that graphkiln sets for it."""
    name, _, device = requested.partition(":")
    provider = _load(name)
    kind, _, index = (device or str(config.device)).partition(":")
    listed = [each for each in onnxruntime.get_ep_devices() if each.ep_name == provider]
    fitting = [each for each in listed if each.device.type.name.lower() == kind]
    if len(fitting) <= int(index or 0):
        found = ", ".join(each.device.type.name.lower() for each in listed) or "none"
        raise EngineUnavailable(
            f"{provider} has no device {kind}:{index or 0} on this machine; its devices: {found}",
            hint=f"install the driver of the device, or write providers: {name}:DEVICE with another one",
        )
    return Plugin(provider, fitting[int(index or 0)], _own_options(provider, kind, config))


def _own_options(provider: str, kind: str, config: SessionConfig) -> dict[str, str]:
    """Return the same options as of engine openvino, unless the user gives options of the provider."""
    prefix = f"ep.{provider.lower()}."
    own = any(name.startswith(prefix) for name in config.tuning.config_entries)
    if provider != _OPENVINO or kind != "cpu" or own:
        return {}
    # OpenVINO computes in bf16 where the CPU can, and pins the threads of all processes to the same cores.
    properties = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": str(config.threads),
        "NUM_STREAMS": "1",
        "ENABLE_CPU_PINNING": "NO",
    }
    return {"load_config": json.dumps({"CPU": properties})}


def _load(name: str) -> str:
    """Load the library of a provider, and return its name in ONNX Runtime.

    Raises:
        EngineUnavailable: No installed wheel has the provider, or its library does not load.
    """
    wanted = name.lower().removesuffix(_SUFFIX.lower())
    modules = {
        each.name.removeprefix(_MODULES).replace("_", ""): each.name
        for each in pkgutil.iter_modules()
        if each.name.startswith(_MODULES)
    }
    if wanted not in modules:
        wheel = _WHEELS.get(wanted)
        known = sorted({*modules, *_WHEELS})
        raise EngineUnavailable(
            f"provider '{name}' is not installed" if wheel else f"unknown provider '{name}'",
            hint=f"pip install {wheel}" if wheel else did_you_mean(name.lower(), known),
        )
    providers = _register(modules[wanted])
    return next((each for each in providers if each.removesuffix(_SUFFIX).lower() == wanted), providers[0])


@functools.cache  # a library is registered once in a process
def _register(module_name: str) -> tuple[str, ...]:
    """Register the library of a wheel, and return the names of its providers."""
    wheel = module_name.replace("_", "-")
    try:
        module = import_module(module_name)
        onnxruntime.register_execution_provider_library(module_name, module.get_library_path())
        return tuple(map(str, module.get_ep_names()))
    except (*ERRORS, AttributeError, ImportError, OSError) as error:
        raise EngineUnavailable(
            f"the library of {wheel} does not load in ONNX Runtime {onnxruntime.__version__}: {error}",
            hint=f"install the driver that it needs, or releases that fit: pip install --upgrade {wheel} onnxruntime",
        ) from error
