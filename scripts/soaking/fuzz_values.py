"""Strategies for values that a careless or hostile client sends: numbers at the edges, wrong types, odd names."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from soaking.models import MODELS, SoakModel

EDGES = (0, 1, -1, 7, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**61 + 1, 2**63 - 1, -(2**63), 2**64, 10**30)
_KNOWN = sorted({name for model in MODELS for name in (model.name, *model.inputs)})
DATATYPES = ("BOOL", "UINT8", "INT8", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64", "BYTES", "", "FP33", "fp32")
_ODD_NAMES = ("", ".", "..", "/", "../../etc/passwd", "a" * 300, "\x00", "%2e%2e", "x y", "\N{SNOWMAN}", "x\n", "*")

integers = st.one_of(st.sampled_from(EDGES), st.integers(-3, 300), st.integers())
names = st.one_of(st.sampled_from(_KNOWN), st.sampled_from(_ODD_NAMES), st.text(max_size=20))
floats = st.floats(allow_nan=False, allow_infinity=False)
plain = st.one_of(st.none(), st.booleans(), integers, floats, names, st.sampled_from(DATATYPES))
anything = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=8
)
"""Any JSON value."""
shapes = st.lists(st.one_of(st.integers(0, 8), integers), max_size=5)


@st.composite
def requests(draw: st.DrawFn) -> tuple[SoakModel, str, int, int]:
    """A model, a version or none, a number of rows, and the seed of the inputs, of a request that must be answered."""
    model = draw(st.sampled_from([each for each in MODELS if each.name != "looped"]))  # it may take for ever
    version = draw(st.sampled_from(["", *map(str, model.versions)]))
    rows = draw(st.one_of(st.integers(1, min(4, model.largest_batch)), st.integers(1, model.largest_batch)))
    return model, version, rows, draw(st.integers(0, 2**16))


@st.composite
def mutations(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document with one to three of its values replaced, removed, doubled or renamed."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(changed))
        if places:
            parent, key = draw(st.sampled_from(places))
            _mutate(draw, parent, key)
    return changed


def _places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Where a document can be changed: containers with a key; of long lists only the beginning."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(min(3, len(value))))
    found = [(value, key) for key in keys]
    return found + [place for key in keys if depth < 6 for place in _places(value[key], depth + 1)]


def _mutate(draw: st.DrawFn, parent: Any, key: Any) -> None:
    match draw(st.sampled_from(("replace", "edge", "remove", "double", "rename"))):
        case "replace":
            parent[key] = draw(anything)
        case "edge":
            parent[key] = draw(integers)
        case "remove":
            del parent[key]
        case "double" if isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        case _ if isinstance(parent, dict):
            parent[draw(names)] = parent.pop(key)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes of which some were changed, cut out, doubled or cut off."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(result) - 1)))
        length = draw(st.integers(0, 16))
        match draw(st.sampled_from(("change", "cut out", "double", "cut off", "insert"))):
            case "change":
                result[start : start + 1] = bytes([draw(st.integers(0, 255))])
            case "cut out":
                del result[start : start + length]
            case "double":
                result[start:start] = result[start : start + length]
            case "cut off":
                del result[start:]
            case _:
                result[start:start] = draw(st.binary(max_size=16))
    return bytes(result)
