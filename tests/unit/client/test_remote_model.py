"""Requests to one model."""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport, echo

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_client.client import run
from graphkiln_client.connection import Connection
from graphkiln_client.remote_model import RemoteModel, new_request_id
from graphkiln_client.transports.base import PLAIN, InferResponse

METADATA = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1]}], "outputs": []}


def remote(transport: FakeTransport, version: str = "") -> RemoteModel:
    return RemoteModel(Connection(transport, 10.0, 0), "m", version)


def test_metadata_is_requested_once() -> None:
    transport = FakeTransport({"model_metadata": METADATA, "model_config": {"max_batch_size": 8}})
    model = remote(transport, "3")
    assert run(model.metadata()) is run(model.metadata())
    assert run(model.config()) is run(model.config())
    assert [request.arguments for request in transport.sent("model_metadata")] == [("m", "3")]
    assert len(transport.sent("model_config")) == 1


def test_no_configuration_request_without_extension() -> None:
    transport = FakeTransport({"server_metadata": {"extensions": ["binary_tensor_data"]}})
    assert run(remote(transport).config()) == {}
    assert transport.sent("model_config") == []


@pytest.mark.parametrize("document", [{}, {"model_stats": []}, {"model_stats": None}, {"model_stats": ["x"]}])
def test_empty_statistics(document: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="statistics"):
        run(remote(FakeTransport({"model_statistics": document})).statistics())


def test_request_ids_are_unique() -> None:
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.extend(new_request_id() for _ in range(500))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 4000
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_scalar_becomes_one_dimension() -> None:
    """Triton rejects tensors without dimensions."""
    transport = FakeTransport({"infer": echo})
    run(remote(transport).infer({"X": np.asarray(21.0, np.float32)}, {}, "id"))
    assert np.asarray(transport.inferred()[0].inputs["X"]).shape == (1,)


@pytest.mark.parametrize("shape", [(0, 1 << 31), (1 << 20, 0, 1 << 12)])
def test_huge_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    transport = FakeTransport({"infer": echo})
    empty = np.zeros(shape, np.float32)
    with pytest.raises(InvalidInput, match="too large to send"):
        run(remote(transport).infer({"X": empty}, {}, "id"))
    with pytest.raises(InvalidInput, match="too large to send"):
        run(remote(transport).encode_once({"X": empty}))
    assert transport.inferred() == []


def test_nested_lists_of_different_lengths() -> None:
    ragged: Any = [[1, 2], [3]]
    with pytest.raises(InvalidInput, match="is not an array"):
        run(remote(FakeTransport({"infer": echo})).infer({"X": ragged}, {}, "id"))


@pytest.mark.parametrize(
    ("name", "wrong", "requested"),
    [
        ("Y", np.zeros((1, 3)), ("Y",)),
        ("Y", np.zeros((1, 2), np.float32), ()),
        ("Y", np.zeros(3, np.float32), ("Y",)),
        ("X", np.zeros((1, 3), np.float32), ()),
    ],
)
def test_response_that_does_not_fit_the_metadata(name: str, wrong: Any, requested: tuple[str, ...]) -> None:
    """The metadata are read again: the model may have been replaced."""
    old = {"inputs": [], "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 3]}]}
    new = {"inputs": [], "outputs": [{"name": name, "datatype": DType.from_numpy(wrong.dtype).value, "shape": [-1]}]}
    new["outputs"][0]["shape"] *= wrong.ndim
    answer = InferResponse(model="m", version="1", outputs={name: wrong})
    good = InferResponse(model="m", version="1", outputs={"Y": np.zeros((2, 3), np.float32)})
    model = remote(FakeTransport({"model_metadata": [old, old, new], "infer": [good, answer, answer]}))
    outputs = dict.fromkeys(requested, PLAIN)
    run(model.infer({}, outputs, "before"))
    run(model.metadata())
    with pytest.raises(ProtocolError, match="does not fit its metadata"):
        run(model.infer({}, outputs, "wrong"))
    model.forget()
    run(model.infer({}, outputs, "replaced"))


def test_a_response_is_not_kept() -> None:
    """It may be large, and an idle client would hold it until the next one."""
    made: list[weakref.ref[np.ndarray[Any, Any]]] = []

    def answer(*_: object) -> InferResponse:
        array = np.zeros((1, 3), np.float32)
        made.append(weakref.ref(array))
        return InferResponse(model="m", version="1", outputs={"Y": array})

    model = remote(FakeTransport({"infer": answer}))
    run(model.infer({}, {}, "id"))
    assert [array() for array in made] == [None]


def test_all_outputs_without_metadata() -> None:
    """The first response has any outputs; if a later one has others, the metadata decide."""
    metadata = {"inputs": [], "outputs": [{"name": name, "datatype": "FP32", "shape": [-1]} for name in "YZ"]}

    def answer(*names: str) -> InferResponse:
        return InferResponse(model="m", version="1", outputs={name: np.zeros(1, np.float32) for name in names})

    both, one = answer("Y", "Z"), answer("Y")
    transport = FakeTransport({"model_metadata": [metadata] * 2, "infer": [both, both, one, one, both, both, one]})
    model = remote(transport)
    run(model.infer({}, {}, "first"))
    run(model.infer({}, {}, "same"))
    run(model.infer({}, dict.fromkeys(["Y"], PLAIN), "a subset that was requested"))
    assert transport.sent("model_metadata") == [], "nothing is asked as long as responses agree"
    with pytest.raises(ProtocolError, match="it has the outputs Y, expected Y, Z"):
        run(model.infer({}, {}, "wrong"))
    run(model.infer({}, {}, "right again"))
    assert len(transport.sent("model_metadata")) == 1
    model.forget()
    run(model.infer({}, {}, "without metadata again"))
    with pytest.raises(ProtocolError, match="it has the outputs Y, expected Y, Z"):
        run(model.infer({}, {}, "wrong again"))


def test_a_first_response_with_other_outputs_is_not_the_measure() -> None:
    metadata = {"inputs": [], "outputs": [{"name": name, "datatype": "FP32", "shape": [-1]} for name in "YZ"]}
    answers = [
        InferResponse(model="m", version="1", outputs={name: np.zeros(1, np.float32) for name in names})
        for names in ("Y", "YZ")
    ]
    model = remote(FakeTransport({"model_metadata": [metadata], "infer": answers}))
    run(model.infer({}, {}, "nothing is known"))
    assert len(run(model.infer({}, {}, "right")).outputs) == 2
