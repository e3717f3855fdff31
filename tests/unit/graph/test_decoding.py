"""Strict decoding of JSON data into dataclasses, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.decoding import decode, decode_json, encode, encode_json
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.precision import Precision


@pytest.fixture
def document(digits: Path) -> Any:
    return json.loads((digits / "1" / "manifest.json").read_bytes())


def test_manifest_round_trip(document: Any) -> None:
    absent = {"conversion": None, "weights": {}, "ranking": None}  # what older manifests leave out
    assert json.loads(json.dumps(encode(decode(Manifest, document)))) == {**document, **absent}


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    flag: bool = False
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    size: int | tuple[int, int] | None = None
    mode: Literal["fast", "exact"] = "fast"
    table: dict[str, tuple[float, ...]] = field(default_factory=dict)
    anything: Any = None
    precision: Precision = Precision.FP32
    device: Device = CPU


def test_defaults() -> None:
    assert decode(Outer, {"count": 3}) == Outer(count=3)


def test_all_kinds_of_fields() -> None:
    found = decode(
        Outer,
        {
            "count": 1,
            "flag": True,
            "inner": {"name": "a"},
            "many": [{"name": "b", "share": 1}],
            "pair": [2, "c"],
            "size": [3, 4],
            "mode": "exact",
            "table": {"d": [1, 2.5]},
            "anything": {"e": [None]},
            "precision": "bf16",
            "device": {"kind": "gpu", "index": 2},
        },
    )
    assert found == Outer(
        count=1,
        flag=True,
        inner=Inner(name="a"),
        many=(Inner(name="b", share=1.0),),
        pair=(2, "c"),
        size=(3, 4),
        mode="exact",
        table={"d": (1.0, 2.5)},
        anything={"e": [None]},
        precision=Precision.BF16,
        device=Device.gpu(2),
    )
    assert isinstance(found.many[0].share, float), "an integer in a field of type float stays one"
    assert isinstance(found.precision, Precision)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "'the document' must be an object, got []"),
        ({}, "missing key 'count'"),
        ({"count": True}, "'count' must be a value of type int, got True"),
        ({"count": 1.0}, "'count' must be a value of type int, got 1.0"),
        ({"count": 1, "flag": 1}, "'flag' must be a value of type bool, got 1"),
        ({"count": 1, "inner": {"name": "a", "share": True}}, "'inner.share' must be a value of type float"),
        ({"count": 1, "inner": {}}, "missing key 'inner.name'"),
        ({"count": 1, "many": [{"name": "a"}, {"nam": "b"}]}, "unknown key 'many[1].nam' (did you mean 'name'?)"),
        ({"count": 1, "many": "ab"}, "'many' must be a list, got 'ab'"),
        ({"count": 1, "pair": [1]}, "'pair' must be a list of 2, got [1]"),
        ({"count": 1, "pair": ["c", 2]}, "'pair[0]' must be a value of type int, got 'c'"),
        ({"count": 1, "size": [1, 2, 3]}, "'size' must be a list of 2"),
        ({"count": 1, "mode": "Fast"}, "'mode' must be one of 'fast', 'exact', got 'Fast'"),
        ({"count": 1, "table": []}, "'table' must be an object, got []"),
        ({"count": 1, "table": {"d": [1, "x"]}}, "'table.d[1]' must be a value of type float, got 'x'"),
        ({"count": 1, "precision": "fp8"}, "'precision' must be one of fp32, tf32, fp16, bf16, int8, got 'fp8'"),
        ({"count": 1, "precision": ["fp16"]}, "'precision' must be one of fp32"),
        ({"count": 1, "device": "gpu:1"}, "'device' must be an object, got 'gpu:1'"),
        ({"count": 1, "device": {"kind": "tpu"}}, "'device.kind' must be one of cpu, gpu, got 'tpu'"),
    ],
)
def test_invalid_values(document: object, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(Outer, document)
    assert message in str(caught.value)


def test_path_prefix() -> None:
    with pytest.raises(ManifestError, match=r"'recipe\.inner\.name' must be a value of type str"):
        decode(Outer, {"count": 1, "inner": {"name": 7}}, path="recipe")


def test_unknown_key_without_a_near_name() -> None:
    with pytest.raises(ManifestError, match=r"unknown key 'zzz' \(known: name, share\)"):
        decode(Inner, {"name": "a", "zzz": 1})


_INNER = st.builds(Inner, name=st.text(), share=st.floats(allow_nan=False))


@given(
    st.builds(
        Outer,
        count=st.integers(),
        flag=st.booleans(),
        inner=st.none() | _INNER,
        many=st.lists(_INNER, max_size=3).map(tuple),
        pair=st.tuples(st.integers(), st.text()),
        size=st.none() | st.integers() | st.tuples(st.integers(), st.integers()),
        mode=st.sampled_from(["fast", "exact"]),
        table=st.dictionaries(st.text(), st.lists(st.floats(allow_nan=False), max_size=2).map(tuple), max_size=2),
        precision=st.sampled_from(Precision),
        device=st.just(CPU) | st.builds(Device.gpu, st.integers(0, 9)),
    )
)
def test_json_round_trip(value: Outer) -> None:
    assert decode_json(Outer, encode_json(value), what="the test", path="") == value


def test_encode_gives_plain_data() -> None:
    plain = encode(Outer(count=1, pair=(2, "x"), device=Device.gpu(1), precision=Precision.INT8))
    assert plain["pair"] == [2, "x"]
    assert plain["device"] == {"kind": "gpu", "index": 1}
    assert type(plain["device"]["kind"]) is str
    assert type(plain["precision"]) is str
    assert encode({"a": (DType.FP32, None)}) == {"a": ["FP32", None]}


def test_json_is_one_line() -> None:
    assert encode_json(Inner(name="größe\n", share=1.5)) == '{"name":"größe\\n","share":1.5}'


@pytest.mark.parametrize("text", ["", "{", "name: a", '{"name": "a"} x', "\x00"])
def test_invalid_json(text: str) -> None:
    with pytest.raises(ManifestError, match="the spec is not JSON"):
        decode_json(Inner, text, what="the spec", path="spec")
