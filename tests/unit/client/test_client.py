"""Both clients with a fake transport."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport, echo

import graphkiln_client
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import (
    ClientError,
    InvalidInput,
    ModelNotReady,
    Unauthorized,
)
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_client import (
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    AsyncClient,
    AsyncModel,
    Client,
    Health,
    Model,
    Result,
    ServedModel,
)
from graphkiln_client.client import run
from graphkiln_client.transports.base import InferRequest, InferResponse

PIXELS = Preprocess(dtype=DType.UINT8, layout="HWC")
INDEX = [
    {"name": "b", "version": "2", "state": "READY"},
    {"name": "b", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
    {"name": "a", "version": "1", "state": "LOADING"},
]


def brightness(request: InferRequest, timeout_s: float) -> InferResponse:
    """Scores of two classes: dark and bright."""
    del timeout_s
    mean = np.asarray(request.inputs["X"]).mean(axis=(1, 2, 3))
    scores = np.stack([255 - mean, mean], axis=1).astype(np.float32)
    return InferResponse(model="m", version="1", outputs={"Y": scores})


def responses() -> dict[str, Any]:
    row = {"name": "X", "datatype": "UINT8", "shape": [-1, 1, 1, 3]}
    return {
        "ready": True,
        "live": True,
        "server_metadata": {"name": "triton", "version": "2.51", "extensions": ["model_configuration"]},
        "repository_index": INDEX,
        "load": None,
        "unload": None,
        "model_metadata": {"inputs": [row], "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 2]}]},
        "model_config": {"max_batch_size": 4, "parameters": {"preprocess": {"string_value": PIXELS.to_json()}}},
        "model_statistics": {"model_stats": [{"inference_count": 3}]},
        "infer": brightness,
    }


Use = Callable[[Any, Any], Any]


class Blocking:
    """Runs a scenario with the synchronous client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, transport: FakeTransport, use: Use, **options: Any) -> Any:
        self._monkeypatch.setattr("graphkiln_client.client.open_blocking", lambda *_: transport)

        def value(result: Any) -> Any:
            return list(result) if inspect.isgenerator(result) else result

        with Client("http://x", **options) as client:
            return use(client, value)


class Async:
    """Runs a scenario with the asynchronous client."""

    def __call__(self, transport: FakeTransport, use: Use, **options: Any) -> Any:
        async def value(result: Any) -> Any:
            if inspect.isasyncgen(result):
                return [item async for item in result]
            return await result

        async def main() -> Any:
            async with AsyncClient("http://x", transport_for=lambda *_: transport, **options) as client:
                result = use(client, value)
                return await result if inspect.isawaitable(result) else result

        return asyncio.run(main())


@pytest.fixture(params=["blocking", "async"])
def drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `use(client, value)`, where `value(call)` is the result of a call."""
    return Blocking(monkeypatch) if request.param == "blocking" else Async()


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport(responses())


class TestServer:
    def test_ready(self, drive: Any, transport: FakeTransport) -> None:
        assert drive(transport, lambda client, value: value(client.ready())) is True
        transport.responses["ready"] = False
        assert drive(transport, lambda client, value: value(client.ready())) is False

    def test_healthy_server(self, drive: Any, transport: FakeTransport) -> None:
        health = drive(transport, lambda client, value: value(client.health()))
        assert health == Health(live=True, ready=True, server="triton 2.51")
        assert transport.sent("repository_index") == []

    def test_health_lists_models_that_are_not_ready(self, drive: Any, transport: FakeTransport) -> None:
        transport.responses["ready"] = False
        health = drive(transport, lambda client, value: value(client.health()))
        assert (health.live, health.ready) == (True, False)
        assert [(model.name, model.version, model.state) for model in health.not_ready] == [("a", "1", "LOADING")]

    def test_health_without_admin_key(self, drive: Any, transport: FakeTransport) -> None:
        transport.responses |= {"ready": False, "repository_index": Unauthorized("no key")}
        health = drive(transport, lambda client, value: value(client.health()))
        assert (health.live, health.ready, health.not_ready) == (True, False, ())

    def test_server_that_is_not_live(self, drive: Any, transport: FakeTransport) -> None:
        transport.responses["live"] = False
        assert drive(transport, lambda client, value: value(client.health())) == Health(live=False, ready=False)
        assert [request.name for request in transport.requests] == ["live"]

    def test_models_are_sorted(self, drive: Any, transport: FakeTransport) -> None:
        models = drive(transport, lambda client, value: value(client.models()))
        assert [(model.name, model.version) for model in models] == [("a", "1"), ("b", "1"), ("b", "2")]
        assert all(isinstance(model, ServedModel) for model in models)

    @pytest.mark.parametrize("name", ["load", "unload"])
    def test_models_are_loaded_and_unloaded(self, drive: Any, transport: FakeTransport, name: str) -> None:
        assert drive(transport, lambda client, value: value(getattr(client, name)("m"))) is None
        assert transport.sent(name)[0].arguments[0] == "m"
        transport.responses[name] = ModelNotReady("no explicit control")
        with pytest.raises(ModelNotReady, match="explicit"):
            drive(transport, lambda client, value: value(getattr(client, name)("m")), max_retries=0)

    def test_load_with_configuration(self, drive: Any, transport: FakeTransport) -> None:
        drive(transport, lambda client, value: value(client.load("m", {"max_batch_size": 4})))
        assert transport.sent("load")[0].arguments == ("m", '{"max_batch_size": 4}')

    def test_instance_died_while_loading(self, drive: Any, transport: FakeTransport) -> None:
        transport.responses["load"] = InvalidInput("version 1: Internal: Stub process 'm_0_0' is not healthy.")
        with pytest.raises(InvalidInput, match=r"killed while loading"):
            drive(transport, lambda client, value: value(client.load("m")))


class TestModel:
    def test_infer(self, drive: Any, transport: FakeTransport) -> None:
        transport.responses["infer"] = echo
        x = np.arange(3, dtype=np.float32)
        outputs = drive(transport, lambda client, value: value(client.model("m").infer({"X": x}, outputs=["X"])))
        assert type(outputs) is dict
        assert outputs["X"] is x
        (request,) = transport.inferred()
        assert list(request.outputs) == ["X"]
        assert len(request.request_id) == 32

    def test_repeatable_request(self, drive: Any, transport: FakeTransport) -> None:
        def use(client: Any, _: Any) -> Any:
            if isinstance(client, Client):
                send = client.model("m").repeatable({"X": np.zeros((1, 1, 1, 3), np.uint8)})
                return [send(), send()]
            return use_async(client)

        async def use_async(client: AsyncClient) -> Any:
            send = await client.model("m").repeatable({"X": np.zeros((1, 1, 1, 3), np.uint8)})
            return [await send(), await send()]

        first, second = drive(transport, use)
        assert first.outputs["Y"].tolist() == second.outputs["Y"].tolist() == [[255, 0]]

    def test_statistics(self, drive: Any, transport: FakeTransport) -> None:
        assert drive(transport, lambda client, value: value(client.model("m").statistics())) == {"inference_count": 3}

    def test_metadata_configuration_and_preprocessing(self, drive: Any, transport: FakeTransport) -> None:
        def use(client: Any, _: Any) -> Any:
            model = client.model("m")
            if isinstance(client, Client):
                return model.metadata, model.config, model.preprocess
            return gather(model.metadata(), model.config(), model.preprocess())

        async def gather(*calls: Coroutine[Any, Any, Any]) -> Any:
            return [await call for call in calls]

        metadata, config, preprocess = drive(transport, use)
        assert metadata["inputs"][0]["name"] == "X"
        assert config["max_batch_size"] == 4
        assert preprocess == PIXELS

    def test_classify(self, drive: Any, transport: FakeTransport) -> None:
        image = np.full((1, 1, 3), 200, np.uint8)
        result = drive(
            transport,
            lambda client, value: value(client.model("m", labels=["dark", "bright"]).classify(image, top_k=1)),
        )
        assert isinstance(result, Result)
        assert [(c.label, c.score) for c in result.classifications] == [("bright", 200)]


def gray(value: int) -> Any:
    return np.full((1, 1, 3), value, np.uint8)


def many(images: list[Any], **options: Any) -> Use:
    def use(client: Any, value: Any) -> Any:
        return value(client.model("m", labels=["dark", "bright"]).classify_many(images, top_k=2, **options))

    return use


class TestClassifyMany:
    def test_results_keep_the_order_of_the_images(self, drive: Any, transport: FakeTransport) -> None:
        results = drive(transport, many([gray(value) for value in range(30)], batch_size=3, concurrency=4))
        assert [{c.label: c.score for c in result.classifications}["bright"] for result in results] == list(range(30))
        assert len(transport.sent("infer")) == 10

    def test_errors_are_returned_in_place(self, drive: Any, transport: FakeTransport) -> None:
        counts: list[int] = []
        images = [gray(1), b"nothing", gray(2)]
        results = drive(transport, many(images, on_error="return", progress=counts.append))
        assert [isinstance(result, ClientError) for result in results] == [False, True, False]
        assert counts == [1, 2, 3]


class TestOptions:
    @pytest.mark.parametrize(
        "options", [{"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": float("nan")}, {"max_retries": -1}]
    )
    @pytest.mark.parametrize("kind", [Client, AsyncClient])
    def test_invalid_timeout_and_retries(self, kind: Any, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match="timeout_s must be above 0"):
            kind("http://x", **options)

    def test_both_clients_have_the_same_parameters_and_defaults(self) -> None:
        ours = inspect.signature(Client).parameters
        theirs = dict(inspect.signature(AsyncClient).parameters)
        theirs.pop("transport_for")
        assert {name: p.default for name, p in ours.items()} == {name: p.default for name, p in theirs.items()}
        defaults = [ours[name].default for name in ("url", "timeout_s", "max_retries")]
        assert defaults == [DEFAULT_URL, DEFAULT_TIMEOUT_S, DEFAULT_MAX_RETRIES]

    def test_both_models_have_the_same_methods_and_parameters(self) -> None:
        for name in ("infer", "repeatable", "classify", "classify_many", "statistics"):
            ours, theirs = inspect.signature(getattr(Model, name)), inspect.signature(getattr(AsyncModel, name))
            assert ours.parameters == theirs.parameters, name

    def test_repr_shows_no_secret(self) -> None:
        with Client("http://me:s3cret@host:8000/path", headers={"X-Key": "s3cret"}) as client:
            assert repr(client) == "Client('http://host:8000/path')"

    def test_public_names(self) -> None:
        assert dir(graphkiln_client) == graphkiln_client.__all__
        assert {name for name in graphkiln_client.__all__ if not hasattr(graphkiln_client, name)} == set()
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            graphkiln_client.nothing  # noqa: B018


def test_unsupported_url_scheme() -> None:
    with pytest.raises(InvalidInput, match="use http://HOST:PORT, https://HOST:PORT"):
        Client("ftp://somewhere")


def test_http_does_not_import_grpc() -> None:
    program = """
import sys
from graphkiln_client import Client
with Client("http://127.0.0.1:9"):
    print(*sorted({"grpc", "google.protobuf", "aiohttp", "PIL"} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"grpc", "aiohttp"} & set(shown.stdout.split())


def test_suspended_coroutine_is_refused() -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError, match="was suspended"):
        run(wait())
    assert ended == [True]


def test_run_inside_event_loop() -> None:
    """As in a notebook."""

    async def cell() -> int:
        async def three() -> int:
            return 3

        return run(three())

    assert asyncio.run(cell()) == 3
