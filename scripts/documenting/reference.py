"""Pages of docs/reference that are made from code: errors, metrics, policy, settings, manifest."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from documenting.text import attributes_of, code, summary_of, table
from graphkiln_backend.engines.registry import BUILT_IN
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.manifest import FORMAT_VERSION, Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering import settings as keys
from graphkiln_backend.lowering.settings import AUTO, Settings
from graphkiln_backend.proof import policy
from graphkiln_backend.proof.policy import Limits, TaskLimits
from graphkiln_backend.scoring.errors import RunInterrupted
from graphkiln_backend.triton.metric_catalog import METRICS, PublishedMetric

# Where errors are defined, in the order of the page.
MODULES = (
    "graphkiln_backend.graph.errors",
    "graphkiln_backend.graph.contract",
    "graphkiln_backend.repository.overlay",
    "graphkiln_backend.storage.address",
    "graphkiln_backend.storage.objects",
    "graphkiln_backend.scoring.errors",
    "graphkiln_backend.triton.executor",
    "graphkiln_backend.triton.sequences",
    "graphkiln.story.server",
)

_ERRORS_INTRODUCTION = """# Errors and exit codes

Written by `scripts/docs` from the classes themselves. Every error says what happened, what was expected,
and in parentheses what to do. `from graphkiln import GraphkilnError, ClientError` catches all of them, or all of a
client's; `error.message` and `error.hint` are its two parts.

| exit code | means |
| --- | --- |
| 0 | done; of `serve`: it was asked to stop |
| 1 | it could not be done, or what was asked about is not so: a request, a proof, a target, a finding of `doctor` |
| 2 | the command, a file or a configuration is wrong; one line says what to change |
| 129, 130, 143 | a closed terminal (SIGHUP), Ctrl-C, SIGTERM; `serve` ends with 0 |

What the machine refuses (a full disk, a file that may not be read, too little memory) is reported in the system's
words, with code 1.

An instance reports an error to Triton with the code below; over HTTP that is the status beside it, over gRPC the status
of the same name.

"""
# What an instance says, and no class.
_OTHER_CODES: Mapping[type[GraphkilnError], str] = {RunInterrupted: "128 and the number of the signal"}
_STATUS = {
    "INVALID_ARG": "400, INVALID_ARGUMENT",
    "NOT_FOUND": "404, NOT_FOUND",
    "UNAVAILABLE": "503, UNAVAILABLE",
    "CANCELLED": "499, CANCELLED",
    "INTERNAL": "500, INTERNAL",
}


def render_errors() -> str:
    """The page."""
    for name in MODULES:
        import_module(name)
    rows = [(code(each.__name__), code(_parent(each)), _exit(each), _triton(each), _text(each)) for each in tree()]
    return _ERRORS_INTRODUCTION + table(["error", "is a", "exit code", "to Triton: HTTP, gRPC", "when"], rows)


def tree(root: type[GraphkilnError] = GraphkilnError) -> Iterator[type[GraphkilnError]]:
    """The base and all that derive from it in these modules, each before those below it."""
    found = [each for each in root.__subclasses__() if each.__module__ in MODULES]
    yield root
    for each in sorted(found, key=lambda each: MODULES.index(each.__module__)):
        yield from tree(each)


def _exit(error: type[GraphkilnError]) -> str:
    return _OTHER_CODES.get(error, str(error.exit_code))


def _parent(error: type[Any]) -> str:
    return "" if error is GraphkilnError else str(error.__bases__[0].__name__)


def _triton(error: type[GraphkilnError]) -> str:
    return f"{error.triton_code}: {_STATUS[error.triton_code]}"


def _text(error: type[GraphkilnError]) -> str:
    more = [
        f"`{name}`: {text}" for name, text in attributes_of(error, "Args").items() if name not in ("message", "hint")
    ]
    return " ".join([summary_of(error), *more])


# docs/metrics.md: what the metrics port publishes, ours by its catalog and Triton's beside it.

_METRICS_INTRODUCTION = """# Metrics

What a server publishes on its metrics port (8002), in Prometheus' format: ours, written by `scripts/docs` from
`graphkiln_backend.triton.metric_catalog`, and Triton's, in one table. A test compares it with a running server, in both
directions. [`deploy/prometheus/rules.yml`](../deploy/prometheus/rules.yml) has recording
and alert rules for them, [`deploy/grafana/dashboard.json`](../deploy/grafana/dashboard.json) a dashboard. Those of
`graphkiln score` are in [scoring.md](scoring.md). Those of HAProxy, where it is
in front, are at `/edge/metrics` of the same port.

Prometheus calls our label `instance` (of a model: `digits_0`) `exported_instance`, because `instance` is the target.

"""
_END = """
With a GPU Triton adds `nv_gpu_*` (utilization, memory, power) and `nv_energy_consumption`, which no test here can
compare.
A summary's quantiles are those of one server, and cannot be added up over several: the dashboard shows the slowest
one's.
"""
_COLUMNS = ("metric", "kind", "labels beside `model`, `version`", "says")
# Triton's: name, kind, labels, meaning. Source: its "Metrics" page, and what its port says of them.
TRITONS: tuple[tuple[str, str, str, str], ...] = (
    (
        "nv_inference_request_success", "counter", "-",
        "requests that were answered, cached ones too, and those that an instance answered with an error",
    ),
    (
        "nv_inference_request_failure", "counter", "`reason`: OTHER, BACKEND, CANCELED, REJECTED",
        (
            "requests that failed before an instance had them. CANCELED: the client gave up; REJECTED: their time was "
            "over. What a full queue, or its own shape, keeps out is not counted"
        ),
    ),
    ("nv_inference_count", "counter", "-", "samples that were computed"),
    ("nv_inference_exec_count", "counter", "-", "batches that were computed"),
    ("nv_inference_request_duration_us", "counter, us", "-", "time of all requests together, the warm-up's too"),
    ("nv_inference_queue_duration_us", "counter, us", "-", "of it, waiting: its rate / 10^6 is how many wait"),
    ("nv_inference_compute_input_duration_us", "counter, us", "-", "of it, preparing inputs"),
    ("nv_inference_compute_infer_duration_us", "counter, us", "-", "of it, in the backend"),
    ("nv_inference_compute_output_duration_us", "counter, us", "-", "of it, handing outputs over"),
    ("nv_inference_pending_request_count", "gauge", "-", "requests that wait now"),
    (
        "nv_inference_request_summary_us", "summary, us", "`quantile`",
        "latency, with `--metrics-config=summary_latencies=true`; Triton (24.10) leaves out models with a cache",
    ),
    ("nv_inference_queue_summary_us", "summary, us", "`quantile`", "waiting; likewise"),
    ("nv_inference_compute_input_summary_us", "summary, us", "`quantile`", "likewise"),
    ("nv_inference_compute_infer_summary_us", "summary, us", "`quantile`", "likewise"),
    ("nv_inference_compute_output_summary_us", "summary, us", "`quantile`", "likewise"),
    ("nv_cache_num_hits_per_model", "counter", "-", "answers from the response cache, with `--cache-config`"),
    ("nv_cache_num_misses_per_model", "counter", "-", "requests that it did not know; likewise"),
    ("nv_cache_hit_duration_per_model", "counter, us", "-", "time of looking up hits; likewise"),
    ("nv_cache_miss_duration_per_model", "counter, us", "-", "time of looking up and inserting misses; likewise"),
    ("nv_cache_hit_summary_per_model", "summary, us", "`quantile`", "likewise, with both options"),
    ("nv_cache_miss_summary_per_model", "summary, us", "`quantile`", "likewise, with both options"),
    ("nv_cache_num_hits", "counter", "none", "of all models together, as are those below"),
    ("nv_cache_num_misses", "counter", "none", "requests that it did not know"),
    ("nv_cache_num_lookups", "counter", "none", "hits and misses"),
    ("nv_cache_num_evictions", "counter", "none", "answers that made room for others"),
    ("nv_cache_num_entries", "gauge", "none", "answers that it holds"),
    ("nv_cache_util", "gauge, 0 to 1", "none", "how full it is"),
    ("nv_cache_lookup_duration", "counter, us", "none", "time of looking up"),
    ("nv_cache_insertion_duration", "counter, us", "none", "time of inserting"),
    ("nv_pinned_memory_pool_total_bytes", "gauge", "none", "pinned memory, with a GPU"),
    ("nv_pinned_memory_pool_used_bytes", "gauge", "none", "of it, in use"),
    ("nv_cpu_utilization", "gauge, 0 to 1", "none", "of the machine, not of the container"),
    ("nv_cpu_memory_total_bytes", "gauge", "none", "of the machine"),
    ("nv_cpu_memory_used_bytes", "gauge", "none", "of the machine"),
)  # fmt: skip


def render_metrics() -> str:
    """The page."""
    tritons = ((code(name), *rest) for name, *rest in TRITONS)
    return "".join((_METRICS_INTRODUCTION, table(_COLUMNS, (*_ours(), *tritons)), _END))


def _ours() -> Iterable[tuple[str, ...]]:
    return ((code(each.name), each.kind, _labels(each), each.says) for each in METRICS)


def _labels(metric: PublishedMetric) -> str:
    return ", ".join(map(code, metric.labels)) + (" only" if metric.of_server else "")


# docs/reference/policy.md: the rows of the numeric policy.

_POLICY_INTRODUCTION = """# Numeric policy

Written by `scripts/docs` from `graphkiln_backend.proof.policy`. A saved or lowered graph answers users only within
these limits; `--relative-l2` loosens the first of them for one conversion, which the manifest records. Why there are
limits, and what else is compared: [numeric policy, explained](../explanation/numerics.md).

"""
_BESIDE = """
Gradients may be off by {gradient:g} times the row of their precision. Two computations of one value, each rounded
once, may be {roundings:g} unit roundoffs of the output's type apart, whatever the row.
"""
_ROWS = {
    "a saved graph beside its source, fp32": policy.EXPORT,
    "another engine, fp32": policy.OTHER_ENGINE,
    "fp16": policy.FP16,
    "bf16": policy.BF16,
    "int8": policy.INT8,
    **{f"golden samples, {precision}": row for precision, row in policy.REPLAY.items()},
}


def render_policy() -> str:
    """The page."""
    shown = {name: f"{text}" for name, text in attributes_of(Limits).items() if name not in ("name", "tasks")}
    return "".join(
        (
            _POLICY_INTRODUCTION, table(["what changed", *map(code, shown)], _limits()), "\n", _meanings(shown),
            "\n## What is read from the outputs of a task\n\n",
            table(["precision", *map(code, _task_columns())], _tasks()), "\n", _meanings(attributes_of(TaskLimits)),
            _BESIDE.format(gradient=policy.GRADIENT_FACTOR, roundings=policy.ROUNDINGS),
        )
    )  # fmt: skip


def _limits() -> Iterable[tuple[str, ...]]:
    for what, row in _ROWS.items():
        figures = (row.relative_l2, row.worst_element, row.top1_agreement, row.metric_drop)
        yield (what, *map(_figure, figures))


def _tasks() -> Iterable[tuple[str, ...]]:
    rows = {"fp32": policy.FP32_TASKS, "fp16": policy.FP16_TASKS, "bf16": policy.BF16_TASKS, "int8": policy.INT8_TASKS}
    for precision, row in rows.items():
        yield (precision, *(_figure(getattr(row, name)) for name in _task_columns()))


def _task_columns() -> list[str]:
    return list(attributes_of(TaskLimits))


def _figure(value: float | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.10g}"


def _meanings(said: dict[str, str]) -> str:
    return "".join(f"- `{name}`: {text}\n" for name, text in said.items())


# docs/reference/settings.md: the keys of a model's configuration, and what other backends' keys mean here.

_SETTINGS_INTRODUCTION = """# Settings of a model

Written by `scripts/docs` from `graphkiln_backend.lowering`. They stand in `config.pbtxt`

```text
parameters { key: "precision" value { string_value: "bf16" } }
```

or after `serve --set`, as `--set MODEL.KEY=VALUE`. Where one is given more than once, this order decides: `--set`,
`--enable-openvino` and `--enable-tensorrt`, `parameters`, its `xrt` parameter, its execution accelerator. Every
key is honored or refused with a reason; an unknown one is an error that names the nearest known one. `graphkiln explain
STORE/NAME` tells where each setting comes from. What they do: [engines](../how-to/engines.md),
[precisions](../how-to/precision.md).

## graphkiln's own

"""
_SESSION = """
## Of Triton's `onnxruntime` backend

In `parameters`, with the meaning that they have there. Keys that begin with `session.` are ONNX Runtime's own
session entries,
handed on as they are.

"""
_LEVELS = """
`optimization { graph { level: N } }`:

"""
_ACCELERATORS = """
## Execution accelerators

`optimization { execution_accelerators { ... } }`, with the `parameters` of each that are known. Some mean a
setting of ours:

"""
_XRT = """
## Of oneflow-serving

`parameters { key: "xrt" ... }` chooses the engine:

"""
_READ_BY_TRITON = """
## Read by Triton, or written by graphkiln

Nothing for `--set`: {triton} are read by Triton's Python backend; {published} are what a version publishes, written by
`graphkiln convert` and the server; {unread} is of a backend that is no more, and ignored.
"""


def render_settings() -> str:
    """The page."""
    return "".join(
        (
            _SETTINGS_INTRODUCTION, table(["key", "values", "says"], own_settings()),
            _SESSION, table(["key"], ((code(key),) for key in (*keys.SESSION_KEYS, *keys.CUDA_KEYS))),
            _LEVELS, table(["level", "ONNX Runtime rewrites the graph"], _levels()),
            _ACCELERATORS, table(["accelerator", "its key", "is our setting"], _accelerator_settings()), "\n",
            *(_known(name, known) for name, known in {**keys.GPU_ACCELERATORS, **keys.CPU_ACCELERATORS}.items()),
            _XRT, table(["value", "engine"], ((code(one), code(other)) for one, other in keys.ENGINE_FOR_XRT.items())),
            _READ_BY_TRITON.format(
                triton=_listed(keys.TRITON_KEYS), published=_listed(keys.PUBLISHED_KEYS),
                unread=_listed(keys.UNREAD_KEYS),
            ),
        )
    )  # fmt: skip


def own_settings() -> list[tuple[str, str, str]]:
    """Key, values and text of each setting of ours."""
    values = _values()
    said = attributes_of(Settings)
    return [(code(key), values[key], said[key]) for key in keys.OWN_KEYS]


def _values() -> Mapping[str, str]:
    count, engines = "a number; 0 leaves it to the engine", _listed((*BUILT_IN, AUTO))
    return {
        "engine": engines,
        "precision": _listed(Precision),
        "layout": _listed(keys.LAYOUTS),
        "conv_search": _listed(keys.CONV_SEARCHES),
        "threads": count,
        "streams": count,
        "self_test": _listed(("on", "off")),
        "fallback": "engines in order, each with a precision or without: `openvino:fp32, onnxruntime`",
        "parallel": "`data=2, pipeline=2, tensor=1`, or `auto, memory=2GiB` ([parallel](../parallel.md))",
    }


def _levels() -> Iterable[tuple[str, str]]:
    return ((code(str(number)), level) for number, level in keys.GRAPH_LEVELS.items())


def _accelerator_settings() -> Iterable[tuple[str, str, str]]:
    for accelerator, known in keys.ACCELERATOR_SETTINGS.items():
        yield from ((code(accelerator), code(theirs), code(ours)) for theirs, ours in known.items())


def _known(accelerator: str, known: Iterable[str] | None) -> str:
    listed = _listed(known) if known else "ONNX Runtime's own options, which refuses what it does not know"
    return f"- `{accelerator}`: {listed}\n"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(code(str(word)) for word in words)


# docs/reference/manifest.md and manifest.schema.json: the format of `manifest.json`, from the types that read it.

_MANIFEST_INTRODUCTION = f"""# The manifest

Written by `scripts/docs` from the types that read and write it (`graphkiln_backend.graph.manifest`).
`manifest.json` is beside the graph of each version, in format {FORMAT_VERSION}; unknown keys are refused, and the
error names the path of the bad one. The same as JSON Schema: [manifest.schema.json](manifest.schema.json).

"""
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def render_manifest() -> str:
    """The page."""
    return _MANIFEST_INTRODUCTION + "\n".join(map(_section, parts()))


def render_schema() -> str:
    """The JSON Schema, as a file."""
    return json.dumps(schema(), indent=1) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a manifest."""
    definitions = {part.__name__: _object(part) for part in parts()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "graphkiln manifest",
        "$ref": f"#/$defs/{Manifest.__name__}",
        "$defs": definitions,
    }


def parts(root: type[Any] = Manifest) -> list[type[Any]]:
    """The dataclasses that a document is made of, outer ones first."""
    found: list[type[Any]] = []
    waiting = [root]
    while waiting:
        part = waiting.pop(0)
        if part not in found:
            found.append(part)
            waiting += [each for hint in _hints(part).values() for each in _leaves(hint) if _is_part(each)]
    return found


def _hints(part: type[Any]) -> dict[str, Any]:
    known = get_type_hints(part)
    return {field.name: known[field.name] for field in dataclasses.fields(part)}


def _leaves(hint: Any) -> Iterator[Any]:
    inner = get_args(hint)
    if get_origin(hint) is Literal or not inner:
        yield hint
    for each in inner if get_origin(hint) is not Literal else ():
        yield from _leaves(each)


def _is_part(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _section(part: type[Any]) -> str:
    said, hints = attributes_of(part), _hints(part)
    rows = [
        (code(field.name), _in_words(hints[field.name]), _left_out(field), said.get(field.name, ""))
        for field in dataclasses.fields(part)
    ]
    return f"## {part.__name__}\n\n{summary_of(part)}\n\n{table(['key', 'value', '', 'says'], rows)}"


def _left_out(field: dataclasses.Field[Any]) -> str:
    return "" if _is_required(field) else "may be left out"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _in_words(hint: Any) -> str:
    inner = get_args(hint)
    if _is_union(hint):
        return " or ".join(_in_words(each) for each in inner)
    if get_origin(hint) is Literal:
        return ", ".join(code(str(each)) for each in inner)
    if get_origin(hint) is tuple:
        count = "list of" if inner[-1] is Ellipsis else f"{len(inner)}:"
        return f"{count} {_in_words(inner[0])}"
    if get_origin(hint) is dict:
        return f"object: name to {_in_words(inner[1])}"
    return _plain_words(hint)


def _plain_words(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if _is_part(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(code(str(each.value)) for each in hint)
    return _PLAIN.get(hint, "any")


def _object(part: type[Any]) -> dict[str, Any]:
    properties = {name: _schema_of(hint) for name, hint in _hints(part).items()}
    required = [field.name for field in dataclasses.fields(part) if _is_required(field)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema_of(hint: Any) -> dict[str, Any]:
    inner = get_args(hint)
    if _is_union(hint):
        return {"anyOf": [_schema_of(each) for each in inner]}
    if get_origin(hint) is Literal:
        return {"enum": list(inner)}
    if get_origin(hint) is tuple:
        items = {"type": "array", "items": _schema_of(inner[0])}
        return items if inner[-1] is Ellipsis else {**items, "minItems": len(inner), "maxItems": len(inner)}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _schema_of(inner[1])}
    return _plain_schema(hint)


def _plain_schema(hint: Any) -> dict[str, Any]:
    if hint is type(None):
        return {"type": "null"}
    if _is_part(hint):
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [each.value for each in hint]}
    return {"type": _PLAIN[hint]} if hint in _PLAIN else {}


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)
