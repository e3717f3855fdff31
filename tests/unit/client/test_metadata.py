"""What a server publishes about a model: read where it is right, refused where it is not."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_client.metadata import (
    ALL_CLASSES,
    check_config,
    check_metadata,
    has_labels,
    parse_labels,
    published_graph,
    published_image_model,
    published_ranking,
    published_spec,
    published_tensor_model,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def tensor(name: Any = "X", datatype: Any = "FP32", shape: Any = (1, 3)) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


class TestCheckMetadata:
    def test_shapes_become_lists_of_integers(self) -> None:
        document = {"inputs": [tensor(shape=["-1", 3])], "outputs": [tensor("Y", shape=())]}
        checked = check_metadata(document)
        assert checked["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1, 3]}]
        assert checked["outputs"][0]["shape"] == []

    def test_a_model_without_tensors_has_empty_lists(self) -> None:
        assert check_metadata({"name": "m"}) == {"name": "m", "inputs": [], "outputs": []}

    @pytest.mark.parametrize("side", ["inputs", "outputs"])
    @pytest.mark.parametrize(
        "row",
        [
            {},
            {"name": "X", "shape": [1]},
            {"name": "X", "datatype": "FP32"},
            {"datatype": "FP32", "shape": [1]},
            tensor(datatype="FP31"),
            tensor(datatype=None),
            tensor(shape=None),
            tensor(shape=["wide"]),
            tensor(shape=3),
            "X",
            None,
        ],
    )
    def test_a_malformed_tensor(self, side: str, row: Any) -> None:
        with pytest.raises(ProtocolError, match="metadata of a model is malformed") as caught:
            check_metadata({side: [row]})
        assert caught.value.body is not None

    @given(inputs=JSON, outputs=JSON)
    def test_whatever_it_is_the_error_is_ours(self, inputs: Any, outputs: Any) -> None:
        with contextlib.suppress(ProtocolError):
            check_metadata({"inputs": inputs, "outputs": outputs})


class TestCheckConfig:
    @pytest.mark.parametrize(
        "document",
        [
            {},
            {"max_batch_size": 8},
            {"parameters": {"preprocess": {"string_value": "{}"}}},
            {"output": [{"name": "Y", "label_filename": "labels.txt"}], "unknown": None},
        ],
    )
    def test_a_good_one_is_returned_as_it_is(self, document: dict[str, Any]) -> None:
        before = json.dumps(document)
        assert check_config(document) is document
        assert json.dumps(document) == before

    @pytest.mark.parametrize(
        "document",
        [
            {"max_batch_size": "8"},
            {"max_batch_size": None},
            {"parameters": []},
            {"parameters": {"preprocess": "{}"}},
            {"parameters": None},
            {"output": {}},
            {"output": ["Y"]},
            {"output": 1},
        ],
    )
    def test_a_malformed_one(self, document: dict[str, Any]) -> None:
        with pytest.raises(ProtocolError, match="configuration of a model is malformed"):
            check_config(document)

    @given(size=JSON, parameters=JSON, output=JSON)
    def test_what_passes_can_be_used(self, size: Any, parameters: Any, output: Any) -> None:
        try:
            config = check_config({"max_batch_size": size, "parameters": parameters, "output": output})
        except ProtocolError:
            return
        assert has_labels(config, "Y") in (True, False)
        with contextlib.suppress(ProtocolError):
            published_ranking("m", config)


def published(key: str, text: str) -> dict[str, Any]:
    return {"parameters": {key: {"string_value": text}}}


class TestPublishedSpec:
    def test_it_is_what_was_written(self) -> None:
        spec = Preprocess(resize=256, crop=(224, 224), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
        assert published_spec("m", published("preprocess", spec.to_json())) == spec

    @pytest.mark.parametrize("config", [{}, {"parameters": {}}, published("other", "{}")])
    def test_a_model_that_publishes_none(self, config: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match="'m' does not say how images become its input") as caught:
            published_spec("m", config)
        assert 'key: "preprocess"' in caught.value.hint
        assert "infer()" in caught.value.hint

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"colour": "RGB"}', '{"resize": "large"}', '{"std": [0, 1, 1]}'])
    def test_an_invalid_one(self, text: str) -> None:
        with pytest.raises(ProtocolError, match="'m' publishes an invalid preprocess spec"):
            published_spec("m", published("preprocess", text))


class TestPublishedRanking:
    def test_it_is_what_was_written(self) -> None:
        ranking = Ranking(scores="best", indices="classes", labels=("ant", "bee"))
        assert published_ranking("m", published("ranking", ranking.to_json())) == ranking

    def test_most_models_publish_none(self) -> None:
        assert published_ranking("m", {}) is None

    @pytest.mark.parametrize("text", ["", "null", '{"scores": "best"}', '{"scores": 1, "indices": "i"}'])
    def test_an_invalid_one(self, text: str) -> None:
        with pytest.raises(ProtocolError, match="'m' publishes an invalid ranking"):
            published_ranking("m", published("ranking", text))


class TestHasLabels:
    ROW = {"name": "Y", "data_type": "TYPE_FP32", "label_filename": "labels.txt"}  # noqa: RUF012

    def test_of_an_output_with_a_file(self) -> None:
        assert has_labels({"output": [{"name": "X"}, self.ROW]}, "Y")

    @pytest.mark.parametrize(
        "change", [{"name": "Z"}, {"label_filename": ""}, {"data_type": "TYPE_FP16"}, {"data_type": "TYPE_BF16"}]
    )
    def test_of_no_other(self, change: dict[str, str]) -> None:
        assert not has_labels({"output": [{**self.ROW, **change}]}, "Y")

    def test_without_outputs(self) -> None:
        assert not has_labels({}, "Y")

    @pytest.mark.parametrize("dtype", list(DType))
    def test_triton_ranks_numbers_but_no_halves(self, dtype: DType) -> None:
        ranked = has_labels({"output": [{**self.ROW, "data_type": dtype.config_name}]}, "Y")
        assert ranked == (dtype not in (DType.BOOL, DType.BYTES, DType.FP16, DType.BF16))


class TestParseLabels:
    def test_in_whatever_order_the_server_ranks(self) -> None:
        assert parse_labels(np.array([b"9.5:2:cat", b"1:0:ant", b"0.1:1:bee"], object)) == ("ant", "bee", "cat")

    def test_of_a_batch_the_first_sample_is_read(self) -> None:
        assert parse_labels(np.array([[b"1:0:ant"], [b"1:0:other"]], object)) == ("ant",)

    def test_a_class_without_a_label_is_empty(self) -> None:
        assert parse_labels(np.array([b"1:2:cat", b"0:0"], object)) == ("", "", "cat")

    def test_no_classes(self) -> None:
        assert parse_labels(np.array([], object)) == ()
        assert parse_labels(np.zeros((0, 3), object)) == ()

    def test_labels_may_hold_colons_and_are_utf8(self) -> None:
        assert parse_labels(np.array(["1:0:a:b \u00e9".encode(), b"1:1:\xff"], object)) == ("a:b \u00e9", "\ufffd")

    @pytest.mark.parametrize("index", [-1, ALL_CLASSES, 10**12])
    def test_an_index_that_no_model_has(self, index: int) -> None:
        with pytest.raises(ProtocolError, match=f"class of index {index}"):
            parse_labels(np.array([f"1:{index}:x".encode()], object))

    @pytest.mark.parametrize("element", [b"", b"cat", b"1:x:cat", b"one:1:cat"])
    def test_what_is_no_classification(self, element: bytes) -> None:
        with pytest.raises(ProtocolError, match=r"score:index\[:label\]"):
            parse_labels(np.array([element], object))


@pytest.mark.parametrize(
    ("told", "named", "expected"),
    [({}, "", ""), ({"image_model": "m.images"}, "m.images", "m.images"), ({"accept_images": "true"}, "", "m.images"),
     ({"accept_images": "false"}, "", "")],
)  # fmt: skip
def test_the_model_that_takes_the_images(told: dict[str, str], named: str, expected: str) -> None:
    config = {"name": "m", "parameters": {key: {"string_value": value} for key, value in told.items()}}
    assert published_image_model(config) == named
    assert published_image_model(config, expected=True) == expected


def test_the_digest_of_a_graph_is_that_of_its_version() -> None:
    config = {"parameters": {"graphs": {"string_value": '{"1": "aa", "2": "bb"}'}}}
    assert [published_graph("m", config, version) for version in ("1", "2", "3")] == ["aa", "bb", ""]
    assert published_graph("m", {}, "1") == ""
    with pytest.raises(ProtocolError, match="'m' publishes an invalid list of graphs"):
        published_graph("m", {"parameters": {"graphs": {"string_value": "{"}}}, "1")


def test_the_model_whose_images_a_model_takes() -> None:
    assert published_tensor_model({"parameters": {"tensor_model": {"string_value": "m"}}}) == "m"
    assert published_tensor_model({}) == ""
