"""Requests of a model: what is in them, and their ids."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport, echo

from graphkiln_backend.graph.errors import InvalidInput, Overloaded
from graphkiln_client.connection import Connection
from graphkiln_client.inference import Inference, new_request_id
from graphkiln_client.metadata import ModelInfo
from graphkiln_client.runner import run
from graphkiln_client.transports.base import PLAIN


def inference(transport: FakeTransport) -> Inference:
    connection = Connection(transport, 10.0, 0)
    return Inference(connection, ModelInfo(connection, "m", "2"), None)


class TestRequestIds:
    def test_they_are_32_digits_and_begin_alike(self) -> None:
        first, second = new_request_id(), new_request_id()
        assert re.fullmatch("[0-9a-f]{32}", first)
        assert first[:16] == second[:16]
        assert int(second[16:], 16) > int(first[16:], 16)

    def test_no_two_threads_share_one(self) -> None:
        ids: list[str] = []
        threads = [threading.Thread(target=lambda: ids.extend(new_request_id() for _ in range(500))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(ids)) == 4000


def test_a_request_says_what_was_given() -> None:
    transport = FakeTransport({"infer": echo})
    x = np.arange(3)
    response = run(inference(transport).infer({"X": x}, {"Y": PLAIN}, "id"))
    (request,) = transport.inferred()
    assert (request.model, request.version, request.request_id) == ("m", "2", "id")
    assert request.outputs == {"Y": PLAIN}
    assert request.inputs["X"] is x, "not copied"
    assert response.outputs["X"].tolist() == [0, 1, 2]


def test_lists_become_arrays() -> None:
    transport = FakeTransport({"infer": echo})
    run(inference(transport).infer({"X": [[1.0, 2.0]]}, {}, "id"))  # type: ignore[dict-item]
    (request,) = transport.inferred()
    assert np.asarray(request.inputs["X"]).shape == (1, 2)


def test_a_single_number_travels_in_one_dimension() -> None:
    """Triton refuses a tensor without dimensions: the config.pbtxt of a scalar says [1]."""
    transport = FakeTransport({"infer": echo})
    run(inference(transport).infer({"X": np.asarray(21.0, np.float32)}, {}, "id"))
    (request,) = transport.inferred()
    assert np.asarray(request.inputs["X"]).shape == (1,)


def test_a_prepared_request_is_sent_without_metadata_or_retries() -> None:
    transport = FakeTransport({"infer": [echo, Overloaded("busy"), echo]})
    send = run(inference(transport).prepare({"X": np.arange(3)}))
    assert run(send()).outputs["X"].tolist() == [0, 1, 2]
    with pytest.raises(Overloaded):
        run(send())
    assert [request.name for request in transport.requests] == ["server_metadata", "infer", "infer"]


@pytest.mark.parametrize(
    "shape", [(0, 4294967297), (2**60, 0), (0, 2**31, 1), (0, 2**16, 2**16), (2**20, 2**20, 2**20, 0)]
)
def test_a_shape_that_would_end_a_server_is_not_sent(shape: tuple[int, ...]) -> None:
    transport = FakeTransport({"infer": echo})
    empty = np.zeros(shape, np.float32)
    with pytest.raises(InvalidInput, match=r"input 'X' cannot be sent: its shape is \["):
        run(inference(transport).infer({"X": empty}, {}, "id"))
    with pytest.raises(InvalidInput, match="cannot be sent"):
        run(inference(transport).prepare({"X": empty}))
    assert transport.inferred() == []


@pytest.mark.parametrize("shape", [(1,), (0,), (0, 3), (3, 0, 2**20), (2, 3)])
def test_other_shapes_are(shape: tuple[int, ...]) -> None:
    transport = FakeTransport({"infer": echo})
    assert run(inference(transport).infer({"X": np.zeros(shape)}, {}, "id")).outputs["X"].shape == shape


def test_what_numpy_makes_no_array_of() -> None:
    ragged: Any = [[1, 2], [3]]
    with pytest.raises(InvalidInput, match="input 'X' is no array"):
        run(inference(FakeTransport({"infer": echo})).infer({"X": ragged}, {}, "id"))
