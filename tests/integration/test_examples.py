"""Triton's example repositories, unchanged, with the requests of its example clients; see `docs/examples.md`."""

from __future__ import annotations

import queue
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import examples
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from running import Server, Serving

pytestmark = [pytest.mark.server, pytest.mark.slow]

VALUES = (11, 7, 5, 3, 2, 0, 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return examples.build(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Serving(tmp_path_factory.mktemp("log"), "--model-store", store) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def grpc(server: Server) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[triton_http.InferenceServerClient]:
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture(scope="module", params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Client and the module of its tensors."""
    return request.getfixturevalue(request.param), triton_grpc if request.param == "grpc" else triton_http


def tensor(module: Any, name: str, array: np.ndarray, dtype: str) -> Any:
    made = module.InferInput(name, array.shape, dtype)
    made.set_data_from_numpy(array)
    return made


def test_table_of_the_documentation_is_complete(store: Path, repository: Path) -> None:
    table = (repository / "docs" / "examples.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in store.iterdir())


class TestAddAndSubtract:
    """`simple_{grpc,http}_infer_client` and its relatives for strings and health."""

    @pytest.mark.parametrize(
        ("model", "dtype"),
        [("simple", "INT32"), ("simple_int8", "INT8"), ("bls_sync", "INT32"), ("ensemble_simple", "INT32")],
    )
    def test_numbers(self, protocol: tuple[Any, Any], model: str, dtype: str) -> None:
        client, module = protocol
        kind = {"INT32": np.int32, "INT8": np.int8}[dtype]
        first, second = np.arange(16, dtype=kind), np.ones(16, kind)
        sent = [first, second] if model == "bls_sync" else [first[None], second[None]]
        result = client.infer(
            model,
            [tensor(module, f"INPUT{i}", array, dtype) for i, array in enumerate(sent)],
            outputs=[module.InferRequestedOutput(f"OUTPUT{i}") for i in range(2)],
        )
        found = [result.as_numpy(f"OUTPUT{i}").reshape(-1) for i in range(2)]
        expected = [first + second, first - second]
        if model == "ensemble_simple":  # the model twice, one behind the other
            expected = [expected[0] + expected[1], expected[0] - expected[1]]
        np.testing.assert_array_equal(found, expected)

    def test_texts(self, protocol: tuple[Any, Any]) -> None:
        client, module = protocol
        texts = [np.array([[str(i) for i in numbers]], np.object_) for numbers in (range(16), [1] * 16)]
        result = client.infer(
            "simple_string", [tensor(module, f"INPUT{i}", array, "BYTES") for i, array in enumerate(texts)]
        )
        assert [int(text) for text in result.as_numpy("OUTPUT0")[0]] == list(range(1, 17))
        assert [int(text) for text in result.as_numpy("OUTPUT1")[0]] == list(range(-1, 15))

    def test_non_numeric_texts_fail_alone(self, grpc: Any) -> None:
        bad = np.array([["x"] * 16], np.object_)
        with pytest.raises(triton_grpc.InferenceServerException):
            grpc.infer("simple_string", [tensor(triton_grpc, f"INPUT{i}", bad, "BYTES") for i in range(2)])
        self.test_texts((grpc, triton_grpc))

    def test_identity(self, protocol: tuple[Any, Any]) -> None:
        client, module = protocol
        sent = np.array([[b"a", b"\xff\x00", "ä".encode()]], np.object_)
        found = client.infer("simple_identity", [tensor(module, "INPUT0", sent, "BYTES")]).as_numpy("OUTPUT0")
        np.testing.assert_array_equal(found, sent)

    def test_health_and_metadata(self, grpc: Any) -> None:
        assert grpc.is_server_ready()
        assert grpc.is_model_ready("simple")
        metadata = grpc.get_model_metadata("simple")
        assert [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs] == [
            ("INPUT0", "INT32", [-1, 16]), ("INPUT1", "INT32", [-1, 16]),
        ]  # fmt: skip

    def test_asynchronous_requests(self, grpc: Any) -> None:
        """`simple_grpc_async_infer_client`."""
        done: queue.Queue[Any] = queue.Queue()
        for number in range(20):
            array = np.full((1, 16), number, np.int32)
            inputs = [tensor(triton_grpc, f"INPUT{i}", array, "INT32") for i in range(2)]
            grpc.async_infer("simple", inputs, lambda result, error: done.put((result, error)), request_id=str(number))
        for _ in range(20):
            result, error = done.get(timeout=30)
            assert error is None
            assert result.as_numpy("OUTPUT0")[0, 0] == 2 * int(result.get_response().id)


class TestClassifiers:
    """`image_client` with its `class_count`."""

    @pytest.mark.parametrize(
        ("model", "image", "shape", "scores"),
        [
            ("densenet_onnx", "data_0", (3, 224, 224), "fc6_1"),
            ("inception_onnx", "input:0", (299, 299, 3), "InceptionV3/Predictions/Softmax:0"),
        ],
    )
    def test_best_classes(
        self, protocol: tuple[Any, Any], model: str, image: str, shape: tuple[int, ...], scores: str
    ) -> None:
        client, module = protocol
        label = "class" if model == "densenet_onnx" else "label"
        sent = [tensor(module, image, np.ones(shape, np.float32), "FP32")]
        plain = client.infer(model, sent).as_numpy(scores)
        best = client.infer(model, sent, outputs=[module.InferRequestedOutput(scores, class_count=3)])
        found = [text.decode().split(":") for text in best.as_numpy(scores)]
        order = np.argsort(-plain)[:3]
        assert plain.shape == ((1000,) if model == "densenet_onnx" else (1001,))
        assert [(int(index), name) for _, index, name in found] == [(index, f"{label} {index}") for index in order]


class TestSequences:
    """`simple_grpc_sequence_stream_infer_client` and its relatives, also with `--dyna`.

    Two sequences of numbers, and one whose id is a text.
    """

    def expected(self, first: int, values: tuple[int, ...], identity: int) -> list[int]:
        """Expected outputs; `identity` is 0 if the model does not add it to the last value."""
        return [first + 1, *values[:-1], values[-1] + identity]

    @pytest.mark.parametrize("dyna", [False, True])
    def test_one_by_one(self, protocol: tuple[Any, Any], dyna: bool) -> None:
        client, module = protocol
        negative = tuple(-value for value in VALUES)
        text = "1002" if dyna else str(uuid.uuid4())
        names = ("simple_dyna_sequence", "simple_string_dyna_sequence") if dyna else ("simple_sequence",) * 2
        cases = [(names[0], 1000, 0, VALUES), (names[0], 1001, 100, negative), (names[1], text, 20, negative)]
        for model, identity, first, values in cases:
            found = []
            for step, value in enumerate((first, *values)):
                result = client.infer(
                    model, [tensor(module, "INPUT", np.full((1, 1), value, np.int32), "INT32")],
                    sequence_id=identity, sequence_start=step == 0, sequence_end=step == len(values),
                )  # fmt: skip
                found.append(int(result.as_numpy("OUTPUT").item()))
            assert found == self.expected(first, values, int(identity) if dyna else 0)

    @pytest.mark.parametrize(("model", "dyna"), [("simple_sequence", False), ("simple_dyna_sequence", True)])
    def test_over_one_stream(self, grpc: Any, model: str, dyna: bool) -> None:
        done: queue.Queue[Any] = queue.Queue()
        grpc.start_stream(lambda result, error: done.put((result, error)))
        cases = {2000: (0, VALUES), 2001: (100, tuple(-value for value in VALUES))}
        for identity, (first, values) in cases.items():
            for step, value in enumerate((first, *values)):
                grpc.async_stream_infer(
                    model, [tensor(triton_grpc, "INPUT", np.full((1, 1), value, np.int32), "INT32")],
                    request_id=f"{identity}_{step}", sequence_id=identity, sequence_start=step == 0,
                    sequence_end=step == len(values),
                )  # fmt: skip
        found: dict[int, list[int]] = {identity: [] for identity in cases}
        for _ in range(2 * (len(VALUES) + 1)):
            result, error = done.get(timeout=30)
            assert error is None
            identity, step = map(int, result.get_response().id.split("_"))
            assert step == len(found[identity])  # of each sequence in order
            found[identity].append(int(result.as_numpy("OUTPUT").item()))
        grpc.stop_stream()
        for identity, (first, values) in cases.items():
            assert found[identity] == self.expected(first, values, identity if dyna else 0)


def test_a_decoupled_model_of_the_python_backend_serves_beside_ours(grpc: Any) -> None:
    """`simple_grpc_custom_repeat`: one request, as many responses as it holds values."""
    done: queue.Queue[Any] = queue.Queue()
    grpc.start_stream(lambda result, error: done.put((result, error)))
    grpc.async_stream_infer("repeat_int32", [tensor(triton_grpc, "IN", np.array([4, 2, 0, 1], np.int32), "INT32")])
    found = []
    for _ in range(4):
        result, error = done.get(timeout=30)
        assert error is None
        found.append((int(result.as_numpy("IDX").item()), int(result.as_numpy("OUT").item())))
    grpc.stop_stream()
    assert found == [(0, 4), (1, 2), (2, 0), (3, 1)]
