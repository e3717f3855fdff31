"""What a server knows about a model: requested once, and kept."""

from __future__ import annotations

from typing import Any

import pytest
from fake_transport import FakeTransport

from graphkiln_backend.graph.errors import ConnectionFailed, ProtocolError
from graphkiln_client.connection import Connection
from graphkiln_client.metadata import ModelInfo
from graphkiln_client.runner import run

METADATA = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1]}], "outputs": []}


def info(transport: FakeTransport, version: str = "") -> ModelInfo:
    return ModelInfo(Connection(transport, 10.0, 0), "m", version)


def test_the_metadata_of_the_version_are_requested_once() -> None:
    transport = FakeTransport({"model_metadata": METADATA})
    model = info(transport, "3")
    assert run(model.metadata()) is run(model.metadata())
    (request,) = transport.sent("model_metadata")
    assert request.arguments == ("m", "3")


def test_a_failure_is_not_kept() -> None:
    transport = FakeTransport({"model_metadata": [ConnectionFailed("gone"), METADATA]})
    model = info(transport)
    with pytest.raises(ConnectionFailed):
        run(model.metadata())
    assert run(model.metadata())["inputs"][0]["name"] == "X"


def test_malformed_metadata_are_not_kept() -> None:
    transport = FakeTransport({"model_metadata": [{"inputs": [{}]}, METADATA]})
    model = info(transport)
    with pytest.raises(ProtocolError):
        run(model.metadata())
    assert run(model.metadata())["inputs"][0]["name"] == "X"


def test_the_configuration_is_requested_once() -> None:
    transport = FakeTransport({"model_config": {"max_batch_size": 8}})
    model = info(transport)
    assert run(model.config()) == {"max_batch_size": 8}
    assert run(model.config()) == {"max_batch_size": 8}
    assert len(transport.sent("model_config")) == 1


def test_a_server_without_the_extension_is_not_asked_for_one() -> None:
    transport = FakeTransport({"server_metadata": {"extensions": ["binary_tensor_data"]}})
    assert run(info(transport).config()) == {}
    assert transport.sent("model_config") == []


def test_a_malformed_configuration() -> None:
    with pytest.raises(ProtocolError, match="configuration"):
        run(info(FakeTransport({"model_config": {"parameters": 1}})).config())


class TestStatistics:
    def test_of_several_versions_the_last_one(self) -> None:
        transport = FakeTransport({"model_statistics": {"model_stats": [{"version": "1"}, {"version": "2"}]}})
        assert run(info(transport).statistics()) == {"version": "2"}

    def test_they_are_requested_each_time(self) -> None:
        rows = [{"model_stats": [{"inference_count": count}]} for count in (1, 2)]
        model = info(FakeTransport({"model_statistics": rows}))
        assert [run(model.statistics())["inference_count"] for _ in range(2)] == [1, 2]

    @pytest.mark.parametrize("document", [{}, {"model_stats": []}, {"model_stats": None}, {"model_stats": ["x"]}])
    def test_there_are_none(self, document: dict[str, Any]) -> None:
        with pytest.raises(ProtocolError, match="statistics"):
            run(info(FakeTransport({"model_statistics": document})).statistics())
