"""HTTP requests: valid ones, whose answer is checked, and such that are nearly valid or not at all."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from soaking.fuzz_values import EDGES, anything, damaged, integers, mutations, names, plain, requests
from soaking.models import MODELS, Arrays, SoakModel
from soaking.senders import binary_request, json_request, to_bytes

_HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, kw_only=True)
class HttpCase:
    """One request.

    Attributes:
        kind: Which strategy made it.
        method: HTTP method.
        path: With the query.
        body: Of the request.
        headers: Of the request.
        model: What a valid request is for, else None.
        version: Which version a valid request names, or empty.
        feeds: Inputs of a valid request.
        class_count: How many classes a valid request asks for; 0 for the tensors.
    """

    kind: str
    method: str = "POST"
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    model: SoakModel | None = None
    version: str = ""
    feeds: Arrays = field(default_factory=dict)
    class_count: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.method} {self.path[:200]} {dict(self.headers)} {self.body[:500]!r}"


def infer_path(model: str, version: str) -> str:
    """Where a model is asked."""
    return f"/v2/models/{model}{'/versions/' + version if version else ''}/infer"


@st.composite
def valid_cases(draw: st.DrawFn) -> HttpCase:
    """Requests that must be answered rightly: JSON or binary, some with parameters, ids, and classification."""
    model, version, rows, seed = draw(requests())
    feeds = model.feeds(np.random.default_rng(seed), rows)
    body, headers = (binary_request if draw(st.booleans()) else json_request)(model, feeds)
    length = int(headers.get(_HEADER_LENGTH, len(body)))
    document, rest = json.loads(body[:length]), body[length:]
    class_count = draw(st.integers(0, 10)) if model.name == "digits" else 0
    document |= draw(st.fixed_dictionaries({}, optional={"id": st.text(max_size=30)}))
    if class_count:
        document["outputs"] = [{"name": "OUTPUT_0", "parameters": {"classification": class_count}}]
    header = json.dumps(document).encode()
    if rest or _HEADER_LENGTH in headers:
        headers |= {_HEADER_LENGTH: str(len(header))}
    headers |= draw(st.sampled_from(({}, {}, {"Accept-Encoding": "gzip"}, {"Accept-Encoding": "deflate"})))
    encoding = draw(st.sampled_from(("", "", "gzip", "deflate")))
    headers |= {"Content-Encoding": encoding} if encoding else {}
    return HttpCase(
        kind="HTTP valid",
        path=infer_path(model.name, version),
        body=_compress(header + rest, encoding),
        headers=headers,
        model=model,
        version=version,
        feeds=feeds,
        class_count=class_count,
    )


def _compress(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.compress(body)
    return zlib.compress(body) if encoding else body


@st.composite
def raw_bodies(draw: st.DrawFn) -> HttpCase:
    """The body is the only input, without any JSON: valid for a model with one input of one fixed shape."""
    rows = draw(st.integers(1, 1))
    model = next(each for each in MODELS if each.name == "fixed")
    feeds = model.feeds(np.random.default_rng(draw(st.integers(0, 2**16))), rows)
    return HttpCase(
        kind="HTTP raw body",
        path=infer_path(model.name, ""),
        body=draw(st.one_of(st.just(to_bytes(feeds["x"])), st.binary(max_size=64), damaged(to_bytes(feeds["x"])))),
        headers={_HEADER_LENGTH: "0"},
    )


@st.composite
def _documents(draw: st.DrawFn) -> tuple[SoakModel, dict[str, Any], bytes]:
    """A valid request as JSON and the binary data behind it."""
    model, _, rows, seed = draw(requests())
    feeds = model.feeds(np.random.default_rng(seed), min(rows, 3))
    body, headers = (binary_request if draw(st.booleans()) else json_request)(model, feeds)
    length = int(headers.get(_HEADER_LENGTH, len(body)))
    return model, json.loads(body[:length]), body[length:]


@st.composite
def mutated_json(draw: st.DrawFn) -> HttpCase:
    """Valid requests with some values of the JSON changed."""
    model, document, rest = draw(_documents())
    if draw(st.booleans()):
        document["outputs"] = [{"name": draw(names), "parameters": draw(_parameters())}]
    if draw(st.booleans()):
        document.setdefault("parameters", {}).update(draw(_parameters()))
    header = json.dumps(draw(mutations(document))).encode()
    headers = {_HEADER_LENGTH: str(len(header))} if rest else {}
    return HttpCase(kind="HTTP mutated JSON", path=infer_path(model.name, ""), body=header + rest, headers=headers)


def _parameters() -> st.SearchStrategy[dict[str, Any]]:
    """What Triton's extensions know, with any value."""
    known = (
        "classification", "binary_data", "binary_data_size", "binary_data_output", "shared_memory_region",
        "shared_memory_offset", "shared_memory_byte_size", "sequence_id", "sequence_start", "sequence_end",
        "priority", "timeout", "triton_enable_empty_final_response",
    )  # fmt: skip
    return st.dictionaries(st.one_of(st.sampled_from(known), names), plain, max_size=3)


@st.composite
def extreme_json(draw: st.DrawFn) -> HttpCase:
    """Valid JSON at the edges of what a parser takes: shapes of huge numbers, deep lists, long numbers and texts."""
    model, document, _ = draw(_documents())
    tensor = document["inputs"][0] | {"parameters": {}}
    tensor["shape"] = draw(st.lists(st.sampled_from(EDGES), min_size=1, max_size=3))
    data = draw(st.sampled_from(("[1.0]", "[]", '["a"]', "1", "1e400", "-0.0", "9" * 400, '"' + "a" * 5000 + '"')))
    depth = draw(st.sampled_from((0, 1, 3, 100, 1000)))
    header = json.dumps({**document, "inputs": [tensor | {"data": "HERE"}, *document["inputs"][1:]]})
    body = header.replace('"HERE"', "[" * depth + data + "]" * draw(st.sampled_from((depth, 0)))).encode()
    return HttpCase(kind="HTTP extreme JSON", path=infer_path(model.name, ""), body=body)


@st.composite
def wrong_lengths(draw: st.DrawFn) -> HttpCase:
    """Binary requests whose lengths do not fit."""
    model, document, rest = draw(_documents())
    for tensor in document["inputs"]:
        if draw(st.booleans()):
            tensor.setdefault("parameters", {})["binary_data_size"] = draw(integers)
    header = json.dumps(document).encode()
    length = draw(st.one_of(st.just(len(header)), integers, st.integers(0, len(header) + len(rest) + 4)))
    cut = draw(st.integers(0, len(rest)))
    headers = {_HEADER_LENGTH: str(length)}
    return HttpCase(kind="HTTP lengths", path=infer_path(model.name, ""), body=header + rest[:cut], headers=headers)


@st.composite
def damaged_bodies(draw: st.DrawFn) -> HttpCase:
    """Valid requests with some bytes changed, and bytes that never were one; some say that they are compressed."""
    model, document, rest = draw(_documents())
    header = json.dumps(document).encode()
    body = draw(st.one_of(damaged(header + rest), st.binary(max_size=200), anything.map(_to_json)))
    headers = {_HEADER_LENGTH: str(len(header))} if rest else {}
    encoding = draw(st.sampled_from(("", "", "", "gzip", "deflate", "br")))
    if encoding:
        headers["Content-Encoding"] = encoding
        if encoding == "gzip" and draw(st.booleans()):
            body = gzip.compress(body)
    return HttpCase(kind="HTTP damaged body", path=infer_path(model.name, ""), body=body, headers=headers)


def _to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


_PARTS = (
    "v2", "models", "health", "ready", "live", "versions", "1", "2", "99", "-1", "infer", "config", "stats", "generate",
    "generate_stream", "repository", "index", "load", "unload", "systemsharedmemory", "cudasharedmemory", "region",
    "status", "register", "unregister", "trace", "setting", "logging", "digits", "scaled", "several", "fixed",
)  # fmt: skip


@st.composite
def other_paths(draw: st.DrawFn) -> HttpCase:
    """Every other endpoint, and paths of their parts, with any JSON."""
    parts = draw(st.lists(st.one_of(st.sampled_from(_PARTS), names.map(_quoted)), min_size=1, max_size=7))
    known = draw(st.sampled_from(_ENDPOINTS))
    path = draw(st.sampled_from(("/v2/" + "/".join(parts), known.format(name=_quoted(draw(names))))))
    method = draw(st.sampled_from(("GET", "POST", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH")))
    body = draw(st.one_of(st.just(b""), anything.map(_to_json), _registrations().map(_to_json)))
    return HttpCase(kind="HTTP other paths", method=method, path=path, body=body)


_ENDPOINTS = (
    "/v2", "/v2/models/{name}", "/v2/models/{name}/config", "/v2/models/{name}/stats", "/v2/models/{name}/versions/1",
    "/v2/models/{name}/ready", "/v2/repository/index", "/v2/repository/models/{name}/load",
    "/v2/repository/models/{name}/unload", "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/{name}/register", "/v2/systemsharedmemory/region/{name}/unregister",
    "/v2/cudasharedmemory/region/{name}/register", "/v2/trace/setting", "/v2/models/{name}/trace/setting",
    "/v2/logging", "/v2/models/{name}/generate",
)  # fmt: skip


def _registrations() -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of the shared-memory endpoints."""
    return st.fixed_dictionaries({"key": names, "offset": integers, "byte_size": integers})


def _quoted(name: str) -> str:
    """A name as a part of a path that `http.client` agrees to send."""
    return "".join(letter if " " < letter < "\x7f" else "%00" for letter in name) or "%20"


def _seldom(rare: st.SearchStrategy[HttpCase], often: st.SearchStrategy[HttpCase]) -> st.SearchStrategy[HttpCase]:
    """One time in eight: what ends the server costs seconds."""
    return st.integers(0, 7).flatmap(lambda number: often if number else rare)


http_cases: st.SearchStrategy[HttpCase] = st.one_of(
    valid_cases(), valid_cases(), raw_bodies(), mutated_json(), mutated_json(), wrong_lengths(), damaged_bodies(),
    other_paths(), _seldom(extreme_json(), mutated_json()),
)  # fmt: skip
