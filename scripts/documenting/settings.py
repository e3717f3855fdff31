"""docs/reference/settings.md: the keys of a model's configuration, and what other backends' keys mean here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from documenting.text import attributes_of, code, table
from graphkiln_backend.engines.registry import BUILT_IN
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering import settings as keys
from graphkiln_backend.lowering.settings import AUTO, Settings

_INTRODUCTION = """# Settings of a model

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


def render() -> str:
    """The page."""
    return "".join(
        (
            _INTRODUCTION, table(["key", "values", "says"], own_settings()),
            _SESSION, table(["key"], ((code(key),) for key in (*keys.SESSION_KEYS, *keys.CUDA_KEYS))),
            _LEVELS, table(["level", "ONNX Runtime rewrites the graph"], _levels()),
            _ACCELERATORS, table(["accelerator", "its key", "is our setting"], _meanings()), "\n",
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


def _meanings() -> Iterable[tuple[str, str, str]]:
    for accelerator, known in keys.ACCELERATOR_SETTINGS.items():
        yield from ((code(accelerator), code(theirs), code(ours)) for theirs, ours in known.items())


def _known(accelerator: str, known: Iterable[str] | None) -> str:
    listed = _listed(known) if known else "ONNX Runtime's own options, which refuses what it does not know"
    return f"- `{accelerator}`: {listed}\n"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(code(str(word)) for word in words)
