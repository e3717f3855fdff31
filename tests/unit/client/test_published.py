"""Parsing of published metadata, configurations and contracts."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_client.published import (
    ALL_CLASSES,
    ServedVersion,
    check_config,
    check_metadata,
    published_graph,
)
from graphkiln_client.tasks import parse_labels

RGB, BGR = Preprocess(resize=8), Preprocess(resize=8, color="BGR")
RANKING = Ranking(scores="best", indices="classes", labels=("ant", "bee"))
ONE = Contract(preprocess=RGB, labels=("a", "b"), output="y")
LABELED = [{"name": name, "data_type": "TYPE_FP32", "label_filename": "f"} for name in "yz"]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def tensor(name: Any = "X", datatype: Any = "FP32", shape: Any = (1, 3)) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


class TestCheckMetadata:
    def test_shapes_are_normalized(self) -> None:
        document = {"inputs": [tensor(shape=["-1", 3])], "outputs": [tensor("Y", shape=())]}
        checked = check_metadata(document)
        assert checked["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1, 3]}]
        assert checked["outputs"][0]["shape"] == []

    @pytest.mark.parametrize("side", ["inputs", "outputs"])
    @pytest.mark.parametrize(
        "row",
        [
            {},
            {"name": "X", "shape": [1]},
            tensor(datatype="FP31"),
            tensor(shape=None),
            tensor(shape=["wide"]),
            "X",
        ],
    )
    def test_malformed_tensor(self, side: str, row: Any) -> None:
        with pytest.raises(ProtocolError, match="metadata of a model is malformed") as caught:
            check_metadata({side: [row]})
        assert caught.value.body is not None

    @given(inputs=JSON, outputs=JSON)
    def test_only_own_errors_are_raised(self, inputs: Any, outputs: Any) -> None:
        with contextlib.suppress(ProtocolError):
            check_metadata({"inputs": inputs, "outputs": outputs})


class TestCheckConfig:
    @pytest.mark.parametrize(
        "document",
        [
            {"max_batch_size": "8"},
            {"parameters": []},
            {"parameters": {"preprocess": "{}"}},
            {"output": {}},
            {"output": ["Y"]},
        ],
    )
    def test_malformed_configuration(self, document: dict[str, Any]) -> None:
        with pytest.raises(ProtocolError, match="configuration of a model is malformed"):
            check_config(document)

    @given(size=JSON, parameters=JSON, output=JSON)
    def test_valid_configuration_is_usable(self, size: Any, parameters: Any, output: Any) -> None:
        with contextlib.suppress(ProtocolError):
            config = check_config({"max_batch_size": size, "parameters": parameters, "output": output})
            read("1", **config).known_labels("Y")


def parameters(**values: str) -> dict[str, Any]:
    return {"parameters": {key: {"string_value": value} for key, value in values.items()}}


def contracts(**by_version: Contract) -> dict[str, Any]:
    said = Contracts.of({name.removeprefix("v"): contract for name, contract in by_version.items()})
    return parameters(contracts=said.to_json())


def read(version: str = "", versions: Any = ("1", "2"), **config: Any) -> ServedVersion:
    rows = list(versions) if isinstance(versions, tuple) else versions
    return ServedVersion.read("m", version, {"versions": rows}, config)


class TestServedVersion:
    @pytest.mark.parametrize(
        ("version", "versions", "expected"),
        [
            ("", ["1", "2"], "2"),
            ("", ["9", "10"], "10"),
            ("1", ["1", "2"], "1"),
            ("", None, ""),
            ("", ["x", 3], "3"),
            ("", [], ""),
        ],
    )
    def test_version_in_use(self, version: str, versions: Any, expected: str) -> None:
        assert read(version, versions).version == expected

    def test_contract_overrides_configuration(self) -> None:
        ranking = Ranking(scores="s", indices="i")
        config = contracts(v1=ONE, v2=Contract(preprocess=BGR, ranking=ranking))
        config["parameters"] |= parameters(preprocess=RGB.to_json(), ranking=RANKING.to_json())["parameters"]
        assert (read(**config).preprocess, read(**config).ranking) == (BGR, ranking)
        assert (read("1", **config).preprocess, read("1", **config).ranking) == (RGB, RANKING)

    def test_server_without_contracts(self) -> None:
        found = read(**parameters(preprocess=RGB.to_json(), ranking=RANKING.to_json()))
        assert (found.contract, found.digest, found.preprocess, found.ranking) == (None, "", RGB, RANKING)

    def test_unpublished_version_has_empty_contract_digest(self) -> None:
        assert read(versions=["3"], **contracts(v1=ONE)).digest == Contract().digest

    def test_labels_of_an_output(self) -> None:
        found = read("1", output=LABELED, **contracts(v1=ONE))
        assert found.known_labels("y") == ("a", "b")
        assert found.known_labels("z") is None, "the server has a file for it"
        assert found.known_labels("other") == ()
        found.labels["z"] = ("c",)
        assert found.known_labels("z") == ("c",)
        assert found == read("1", output=LABELED, **contracts(v1=ONE))

    @pytest.mark.parametrize("dtype", list(DType))
    def test_rankable_types(self, dtype: DType) -> None:
        found = read(output=[{"name": "y", "data_type": dtype.config_name, "label_filename": "f"}])
        ranked = dtype not in (DType.BOOL, DType.BYTES, DType.FP16, DType.BF16)
        assert (found.known_labels("y") is None) == ranked

    @pytest.mark.parametrize(
        ("key", "text"),
        [
            ("preprocess", ""),
            ("preprocess", '{"colour": "RGB"}'),
            ("preprocess", '{"std": [0, 1, 1]}'),
            ("ranking", "null"),
            ("ranking", '{"scores": 1, "indices": "i"}'),
            ("task", "{}"),
        ],
    )
    def test_malformed_parameter(self, key: str, text: str) -> None:
        with pytest.raises(ProtocolError, match="publishes an invalid"):
            getattr(read(**parameters(**{key: text})), key)

    @pytest.mark.parametrize(
        ("published", "named", "expected"),
        [
            ({}, "", ""),
            ({"image_model": "m.images"}, "m.images", "m.images"),
            ({"accept_images": "true"}, "", "m.images"),
            ({"accept_images": "false"}, "", ""),
        ],
    )
    def test_companion_model_name(self, published: dict[str, str], named: str, expected: str) -> None:
        found = read(name="m", **parameters(**published))
        assert found.image_model() == named
        assert found.image_model(expected=True) == expected


class TestParseLabels:
    @pytest.mark.parametrize(
        ("elements", "labels"),
        [
            ([b"9.5:2:cat", b"1:0:ant", b"0.1:1:bee"], ("ant", "bee", "cat")),  # in whatever order the server ranks
            ([[b"1:0:ant"], [b"1:0:other"]], ("ant",)),  # of a batch the first sample is read
            ([b"1:2:cat", b"0:0"], ("", "", "cat")),
            (["1:0:a:b \u00e9".encode(), b"1:1:\xff"], ("a:b \u00e9", "\ufffd")),
            ([], ()),
        ],
    )
    def test_parse_labels(self, elements: list[Any], labels: tuple[str, ...]) -> None:
        assert parse_labels(np.array(elements, object)) == labels

    @pytest.mark.parametrize("index", [-1, ALL_CLASSES, 10**12])
    def test_invalid_class_index(self, index: int) -> None:
        with pytest.raises(ProtocolError, match=f"class index {index}"):
            parse_labels(np.array([f"1:{index}:x".encode()], object))


def test_published_graph() -> None:
    config = parameters(graphs='{"1": "aa", "2": "bb"}')
    assert [published_graph("m", config, version) for version in ("1", "2", "3")] == ["aa", "bb", ""]
    assert published_graph("m", {}, "1") == ""
    with pytest.raises(ProtocolError, match="invalid list of graphs"):
        published_graph("m", parameters(graphs="{"), "1")
