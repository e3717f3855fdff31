"""The client against a real server."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
import zoo
from onnx import TensorProto, helper
from running import Server, Serving, StartServer, settled

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ClientError, DeadlineExceeded, InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.system.admin_key import HTTP_HEADER, find_key
from graphkiln_client import AsyncClient, Client, Result

pytestmark = pytest.mark.server

PIXELS = Preprocess(dtype=DType.UINT8, layout="HWC", resize=(4, 4))
SHARED = Path("/dev/shm")


def heads(dtype: int = TensorProto.FLOAT) -> Any:
    """Outputs `scores` [n, 3] and `map` [n, 2, 3] with the first numbers of an image [n, 4, 4, 3]."""
    nodes = [
        helper.make_node("Cast", ["pixels"], ["numbers"], to=dtype),
        helper.make_node("Reshape", ["numbers", "flat"], ["row"]),
        helper.make_node("Gather", ["row", "three"], ["scores"], axis=1),
        helper.make_node("Gather", ["row", "six"], ["both"], axis=1),
        helper.make_node("Reshape", ["both", "grid"], ["map"]),
    ]
    constants = {
        "flat": np.array([-1, 48]),
        "three": np.arange(3),
        "six": np.arange(6),
        "grid": np.array([-1, 2, 3]),
    }
    outputs = [zoo.value("scores", ("n", 3), dtype), zoo.value("map", ("n", 2, 3), dtype)]
    return zoo.model(nodes, [zoo.value("pixels", ("n", 4, 4, 3), TensorProto.UINT8)], outputs, constants)


RANKING = Ranking(scores="best", indices="classes", labels=("ant", "bee", "cat"))
RANKED = f"""
    backend: "graphkiln" max_batch_size: 8
    parameters {{ key: "preprocess" value {{ string_value: '{PIXELS.to_json()}' }} }}
    parameters {{ key: "ranking" value {{ string_value: '{RANKING.to_json()}' }} }}
"""


def ranked() -> Any:
    """The scores of `heads`, ranked by an embedded top-2."""
    nodes = [
        helper.make_node("Cast", ["pixels"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["numbers", "flat"], ["row"]),
        helper.make_node("Slice", ["row", "begin", "end", "axis"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["best", "classes"], axis=-1),
    ]
    inputs = [zoo.value("pixels", ("n", 4, 4, 3), TensorProto.UINT8)]
    outputs = [zoo.value("best", ("n", 2)), zoo.value("classes", ("n", 2), TensorProto.INT64)]
    numbers = {"flat": [0, -1], "begin": [0], "end": [3], "axis": [1], "k": [2]}
    return zoo.model(nodes, inputs, outputs, {name: np.array(value) for name, value in numbers.items()})


def config(dtype: str, labels: str) -> str:
    return f"""
        backend: "graphkiln"
        max_batch_size: 8
        input {{ name: "pixels" data_type: TYPE_UINT8 dims: [4, 4, 3] }}
        output {{ name: "scores" data_type: {dtype} dims: [3] {labels} }}
        output {{ name: "map" data_type: {dtype} dims: [2, 3] {labels} }}
        parameters {{ key: "preprocess" value {{ string_value: '{PIXELS.to_json()}' }} }}
    """


# Types that Triton does not write as JSON.
HALVES = ("FP16", "BF16")
TYPES = tuple(name for name in zoo.DTYPES if name not in HALVES)


def types_config(names: tuple[str, ...]) -> str:
    kinds = {name: f"data_type: {DType(name).config_name} dims: [-1]" for name in names}
    tensors = (
        f'input {{ name: "{name}_in" {kind} }} output {{ name: "{name}" {kind} }}' for name, kind in kinds.items()
    )
    return f'backend: "graphkiln" max_batch_size: 8 {" ".join(tensors)}'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("client store")
    zoo.add(store, "halves", zoo.identities(HALVES), types_config(HALVES))
    zoo.add(store, "types", zoo.identities(TYPES), types_config(TYPES))
    zoo.add(store, "fp32", zoo.identity(("n", "m"), TensorProto.FLOAT), 'backend: "graphkiln" max_batch_size: 8')
    nodes = [helper.make_node("Identity", ["x"], ["all"]), helper.make_node("ReduceSum", ["x", "axis"], ["sum"])]
    outputs = [zoo.value("all", ("n", "m")), zoo.value("sum", ("n", 1))]
    mixed = zoo.model(nodes, [zoo.value("x", ("n", "m"))], outputs, {"axis": np.array([1])})
    zoo.add(store, "mixed", mixed)
    zoo.add(store, "slow", zoo.slow(), 'backend: "graphkiln" max_batch_size: 1')
    for name, number, dtype in (
        ("heads", TensorProto.FLOAT, "TYPE_FP32"),
        ("heads16", TensorProto.FLOAT16, "TYPE_FP16"),
    ):
        folder = zoo.add(store, name, heads(number), config(dtype, 'label_filename: "labels.txt"'))
        (folder.parent / "labels.txt").write_text("ant\nbee\ncat\n")
    zoo.add(store, "ranked", ranked(), RANKED)
    with Serving(tmp_path_factory.mktemp("client"), "--model-store", store) as server:
        server.wait_ready()
        yield server


@pytest.fixture(params=["http", "grpc"])
def url(running: Server, request: pytest.FixtureRequest) -> str:
    return running.url if request.param == "http" else running.grpc_url


def values(name: str) -> AnyArray:
    dtype = DType(name)
    if dtype is DType.BYTES:
        return np.array([[b"a", b"", "\u00e4\u20ac".encode()], [b"x" * 1000, b"\x00", b"z"]], np.object_)
    return np.array([[0, 1, 100], [2, 0, 3]]).astype(dtype.numpy)


def infer_async(url: str, model: str, inputs: dict[str, AnyArray]) -> dict[str, AnyArray]:
    async def ask() -> dict[str, AnyArray]:
        async with AsyncClient(url) as client:
            return await client.model(model).infer(inputs)

    return asyncio.run(ask())


def infer_async_shared(url: str, model: str, inputs: dict[str, AnyArray]) -> dict[str, AnyArray]:
    async def ask() -> dict[str, AnyArray]:
        async with AsyncClient(url) as client, client.shared_memory() as shared:
            return await shared.model(model).infer(inputs)

    return asyncio.run(ask())


def infer_shared(url: str, model: str, inputs: dict[str, AnyArray]) -> dict[str, AnyArray]:
    with Client(url) as client, client.shared_memory() as shared:
        return shared.model(model).infer(inputs)


def infer_packed(url: str, model: str, inputs: dict[str, AnyArray]) -> dict[str, AnyArray]:
    with Client(url, compression="gzip") as client:
        return client.model(model).infer(inputs)


def infer_plain(url: str, model: str, inputs: dict[str, AnyArray]) -> dict[str, AnyArray]:
    with Client(url) as client:
        return client.model(model).infer(inputs)


def as_theirs(library: Any, name: str, array: AnyArray) -> Any:
    """Make an input of tritonclient."""
    tensor = library.InferInput(name, array.shape, name.removesuffix("_in"))
    tensor.set_data_from_numpy(array)
    return tensor


WAYS = [infer_plain, infer_async, infer_shared, infer_async_shared, infer_packed]


class TestTypes:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(("model", "names"), [("types", TYPES), ("halves", HALVES)])
    def test_all_types_equal_tritonclient(self, url: str, model: str, names: tuple[str, ...], way: Any) -> None:
        sent = {f"{name}_in": values(name) for name in names}
        received = way(url, model, sent)
        library: Any = tritonclient.http if url.startswith("http") else tritonclient.grpc
        with library.InferenceServerClient(url.partition("://")[2]) as plain:
            theirs = plain.infer(model, [as_theirs(library, name, array) for name, array in sent.items()])
        assert list(received) == list(names)
        for name, array in received.items():
            expected = theirs.as_numpy(name)
            assert array.dtype == expected.dtype, name
            np.testing.assert_array_equal(array, expected, name)
            np.testing.assert_array_equal(array, sent[f"{name}_in"], name)

    def test_json_tensors(self, running: Server) -> None:
        sent = {f"{name}_in": values(name) for name in TYPES}
        sent["BYTES_in"] = np.array([["a", "\u00e4", "z"]] * 2, np.object_)
        with Client(running.url) as client:
            client._client._connection._extensions = frozenset({"model_configuration"})  # as a server without binary
            received = client.model("types").infer(sent)
        assert received.pop("BYTES").tolist() == [[b"a", "\u00e4".encode(), b"z"]] * 2
        assert list(received) == [name for name in TYPES if name != "BYTES"]
        for name, array in received.items():
            np.testing.assert_array_equal(array, sent[f"{name}_in"], name)


class TestSharedMemory:
    def regions(self, server: Server) -> set[str]:
        with tritonclient.http.InferenceServerClient(server.url.rpartition("/")[2]) as plain:
            key = find_key("127.0.0.1", server.http_port)
            return {region["name"] for region in plain.get_system_shared_memory_status(headers={HTTP_HEADER: key})}

    def files(self) -> list[Path]:
        """Files of this process; other processes may be creating some."""
        return list(SHARED.glob(f"graphkiln-client-{os.getpid()}-*"))

    def test_regions_exist_only_inside_context(self, running: Server, url: str) -> None:
        with Client(url) as client, client.shared_memory() as shared:
            shared.model("fp32").infer({"x": np.ones((1, 3), np.float32)})
            assert len(self.regions(running)) == 1
            assert not self.files(), "a client that is killed would leave it"
        assert not self.regions(running)

    def test_nothing_is_left_after_an_error(self, running: Server, url: str) -> None:
        with pytest.raises(InvalidInput), Client(url) as client, client.shared_memory() as shared:
            shared.model("fp32").infer({"x": np.ones((1, 3), np.float64)})
        assert not self.regions(running)
        assert not self.files()

    def test_outputs_of_unknown_size_come_beside_those_of_known_size(self, url: str) -> None:
        sent = np.array([[1, 2, 3]], np.float32)
        answers = infer_shared(url, "mixed", {"x": sent})
        assert {name: array.tolist() for name, array in answers.items()} == {"all": [[1, 2, 3]], "sum": [[6]]}

    def test_regions_grow(self, url: str) -> None:
        with Client(url) as client, client.shared_memory() as shared:
            for size in (10, 3_000_000, 7):
                sent = np.random.default_rng(0).normal(size=(1, size)).astype(np.float32)
                np.testing.assert_array_equal(shared.model("fp32").infer({"x": sent})["y"], sent)

    def test_threads_use_separate_regions(self, url: str) -> None:
        wrong: list[int] = []
        with Client(url) as client, client.shared_memory() as shared:
            model = shared.model("heads")

            def work(value: int) -> None:
                for _ in range(20):
                    answer = model.infer({"pixels": np.full((1, 4, 4, 3), value, np.uint8)})["scores"]
                    if (answer != value).any():
                        wrong.append(value)

            threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong

    def test_regions_are_registered_again_after_restart(self, start_server: StartServer, digits: Path) -> None:
        server = start_server("--model-store", digits.parent)
        server.wait_ready()
        feeds = {"INPUT_0": np.ones((1, 1, 32, 32), np.float32)}
        with ExitStack() as stack:
            models = []
            for address in (server.url, server.grpc_url):
                client = stack.enter_context(Client(address))
                models.append(stack.enter_context(client.shared_memory()).model("digits"))
            before = models[0].infer(feeds)["OUTPUT_0"]
            np.testing.assert_array_equal(models[1].infer(feeds)["OUTPUT_0"], before)
            _kill_a_stub(server)
            server.wait_until(lambda: server.status("/v2/health/ready") != 200)
            server.wait_ready()
            for model in models:
                np.testing.assert_allclose(model.infer(feeds)["OUTPUT_0"], before, rtol=1e-6)


def _kill_a_stub(server: Server) -> None:
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if any("triton_python_backend_stub" in word for word in child.cmdline()):
            child.kill()
            return


class TestDeadlines:
    def test_slow_model(self, url: str) -> None:
        with Client(url, timeout_s=0.1) as client, pytest.raises(DeadlineExceeded, match=r"within 0\.1 s"):
            client.model("slow").infer({"ROUNDS": np.array([[5000]])})

    def test_slow_model_in_an_event_loop(self, url: str) -> None:
        async def ask() -> None:
            async with AsyncClient(url, timeout_s=0.1) as client:
                await client.model("slow").infer({"ROUNDS": np.array([[5000]])})

        with pytest.raises(DeadlineExceeded):
            asyncio.run(ask())


def image(*values: int) -> AnyArray:
    """Make pixels that begin with the values."""
    flat = np.zeros(48, np.uint8)
    flat[: len(values)] = values
    return flat.reshape(4, 4, 3)


class TestClassify:
    def test_several_outputs_and_positions(self, url: str) -> None:
        with Client(url) as client:
            result = client.model("heads").classify(image(3, 9, 9, 1, 0, 2), top_k=2)
        assert [(a.label, a.score) for a in result.outputs["scores"]] == [("bee", 9), ("cat", 9)]
        assert result.top.label == "bee"
        placed = [(a.position, a.label, a.score) for a in result.outputs["map"]]
        assert placed == [((0,), "bee", 9), ((0,), "cat", 9), ((1,), "cat", 2), ((1,), "ant", 1)]
        document = result.to_dict()
        assert document["classifications"][0] == {"output": "scores", "index": 1, "label": "bee", "score": 9}
        assert document["classifications"][2]["position"] == [0]

    def test_classification_equals_triton(self, running: Server) -> None:
        pixels = image(7, 200, 30)
        with Client(running.url) as client:
            ours = client.model("heads").classify(pixels, top_k=3, outputs=["scores"]).classifications
        with tritonclient.http.InferenceServerClient(running.url.rpartition("/")[2]) as plain:
            tensor = tritonclient.http.InferInput("pixels", [1, 4, 4, 3], "UINT8")
            tensor.set_data_from_numpy(pixels[np.newaxis])
            wanted = [tritonclient.http.InferRequestedOutput("scores", class_count=3)]
            theirs = plain.infer("heads", [tensor], outputs=wanted).as_numpy("scores").ravel()
        assert [f"{a.score:.6f}:{a.index}:{a.label}".encode() for a in ours] == theirs.tolist()

    def test_sixteen_bit_scores_and_label_override(self, url: str) -> None:
        with Client(url) as client:
            unnamed = client.model("heads16").classify(image(1, 2, 3))
            named = client.model("heads16", labels=("x", "y", "z")).classify(image(1, 2, 3))
        assert [(a.index, a.label) for a in unnamed.classifications] == [(2, ""), (1, ""), (0, "")]
        assert named.top.label == "z"

    def test_embedded_ranking_has_labels(self, url: str) -> None:
        with Client(url) as client:
            model = client.model("ranked")
            several = list(model.classify_many([image(3, 9, 5), image(7, 1, 2)], batch_size=2))
            assert [[(a.label, a.index, a.score) for a in result.classifications] for result in several] == [
                [("bee", 1, 9), ("cat", 2, 5)],
                [("ant", 0, 7), ("cat", 2, 2)],
            ]
            assert list(several[0].outputs) == ["best"]
            assert len(model.classify(image(1, 2, 3), top_k=1).classifications) == 1
            assert client.model("ranked", labels=("x", "y", "z")).classify(image(9)).top.label == "x"
            with pytest.raises(InvalidInput, match="softmax needs all scores"):
                model.classify(image(1), softmax=True)
            assert model.infer({"pixels": image(1, 2, 3)[np.newaxis]})["classes"].tolist() == [[2, 1]]

    def test_preprocess_override(self, url: str) -> None:
        mine = Preprocess(dtype=DType.UINT8, layout="HWC", resize=(4, 4), color="BGR")
        with Client(url) as client:
            answer = client.model("heads", preprocess=mine).classify(image(1, 0, 5), top_k=1)
        assert answer.top.label == "ant"


class TestManyImages:
    def test_batches_are_sent_as_one_request(self, url: str) -> None:
        with Client(url) as client:
            model = client.model("heads")
            model.classify(image(1))  # labels are asked for once
            before = settled(model)
            images = [image(index) for index in range(20)]
            answers = list(model.classify_many(images, batch_size=16, concurrency=2, outputs=["scores"]))
            after = settled(model)
        scores = [max(a.score for a in r.classifications) for r in answers if isinstance(r, Result)]
        assert scores == list(range(20))
        assert after["inference_count"] - before["inference_count"] == 20
        requests = after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"]
        assert requests == 3, "8 at most, by the model's max_batch_size"

    def test_errors_stay_in_place_in_a_batch(self, url: str) -> None:
        mixed: list[Any] = [image(1), b"no image", image(2), np.zeros((0, 3), np.uint8), image(3)]
        done: list[int] = []
        with Client(url) as client:
            answers = list(
                client.model("heads").classify_many(mixed, batch_size=4, on_error="return", progress=done.append)
            )
        assert [isinstance(answer, ClientError) for answer in answers] == [False, True, False, True, False]
        assert done == [1, 2, 3, 4, 5]

    def test_in_an_event_loop(self, url: str) -> None:
        async def ask() -> list[Any]:
            mixed: list[Any] = [*(image(index) for index in range(30)), b"no image"]
            done: list[int] = []
            async with AsyncClient(url) as client:
                many = client.model("heads").classify_many(
                    mixed, batch_size=4, concurrency=3, on_error="return", progress=done.append, outputs=["scores"]
                )
                answers = [answer async for answer in many]
            assert done == list(range(1, 32))
            return answers

        *good, bad = asyncio.run(ask())
        assert [result.top.score for result in good] == list(range(30))
        assert isinstance(bad, InvalidInput)


def test_both_clients_have_the_same_methods() -> None:
    from graphkiln_client import AsyncModel, Model

    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    of_many = {"answer", "batches"}
    assert public(Model) | of_many == public(AsyncModel)


def test_client_is_shared_by_threads(url: str) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(Client(url))
        wrong: list[Any] = []

        def work(value: int) -> None:
            for _ in range(20):
                answer = client.model("heads").classify(image(value, value + 1), outputs=["scores"])
                if answer.top.score != value + 1 or answer.top.label != "bee":
                    wrong.append(answer)

        threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
