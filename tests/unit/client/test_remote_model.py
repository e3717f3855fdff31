"""One model at a server: what is published about it, and its inferences."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport, echo

from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_client.client import run
from graphkiln_client.connection import Connection
from graphkiln_client.remote_model import RemoteModel, new_request_id
from graphkiln_client.transports.base import PLAIN

METADATA = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1]}], "outputs": []}


def remote(transport: FakeTransport, version: str = "") -> RemoteModel:
    return RemoteModel(Connection(transport, 10.0, 0), "m", version)


def test_what_is_published_is_requested_once() -> None:
    transport = FakeTransport({"model_metadata": METADATA, "model_config": {"max_batch_size": 8}})
    model = remote(transport, "3")
    assert run(model.metadata()) is run(model.metadata())
    assert run(model.config()) is run(model.config())
    assert [request.arguments for request in transport.sent("model_metadata")] == [("m", "3")]
    assert len(transport.sent("model_config")) == 1


def test_a_server_without_the_extension_is_not_asked_for_a_configuration() -> None:
    transport = FakeTransport({"server_metadata": {"extensions": ["binary_tensor_data"]}})
    assert run(remote(transport).config()) == {}
    assert transport.sent("model_config") == []


def test_statistics_are_those_of_the_last_version_at_each_request() -> None:
    rows = [{"model_stats": [{"version": "1"}, {"version": "2", "inference_count": count}]} for count in (1, 2)]
    model = remote(FakeTransport({"model_statistics": rows}))
    assert [run(model.statistics())["inference_count"] for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("document", [{}, {"model_stats": []}, {"model_stats": None}, {"model_stats": ["x"]}])
def test_statistics_that_hold_no_version(document: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="statistics"):
        run(remote(FakeTransport({"model_statistics": document})).statistics())


def test_no_two_requests_share_an_id() -> None:
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.extend(new_request_id() for _ in range(500))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 4000
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_a_request_holds_what_was_given() -> None:
    transport = FakeTransport({"infer": echo})
    x = np.arange(3)
    run(remote(transport, "2").infer({"X": x, "list": [[1.0, 2.0]]}, {"Y": PLAIN}, "id"))  # type: ignore[dict-item]
    (request,) = transport.inferred()
    assert (request.model, request.version, request.request_id) == ("m", "2", "id")
    assert request.outputs == {"Y": PLAIN}
    assert request.inputs["X"] is x, "not copied"
    assert np.asarray(request.inputs["list"]).shape == (1, 2)


def test_a_single_number_travels_in_one_dimension() -> None:
    """Triton refuses a tensor without dimensions: the config.pbtxt of a scalar says [1]."""
    transport = FakeTransport({"infer": echo})
    run(remote(transport).infer({"X": np.asarray(21.0, np.float32)}, {}, "id"))
    assert np.asarray(transport.inferred()[0].inputs["X"]).shape == (1,)


@pytest.mark.parametrize("shape", [(0, 1 << 31), (1 << 20, 0, 1 << 12)])
def test_dimensions_that_no_server_could_hold_are_not_sent(shape: tuple[int, ...]) -> None:
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
