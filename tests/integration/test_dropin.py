"""Repositories written for Triton's C++ onnxruntime backend, unmodified, on the real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import zoo
from running import Server, Serving, StartServer, run_command

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.wide]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.build(tmp_path_factory.mktemp("zoo store"))


@pytest.fixture(scope="module")
def zoo_server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Serving(tmp_path_factory.mktemp("zoo"), "--model-store", store) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def client(zoo_server: Server) -> Iterator[Client]:
    with Client(zoo_server.url) as client:
        yield client


def ask(client: Client, model: str, version: str = "", **inputs: Any) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(array, getattr(array, "dtype", np.float32)) for name, array in inputs.items()}
    return client.model(model, version).infer(arrays)


def config(server: Server, model: str) -> dict[str, Any]:
    with urlopen(f"{server.url}/v2/models/{model}/config") as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def numbers(dtype: DType) -> np.ndarray:
    """Random values of a type; some texts are long or have multi-byte characters."""
    if dtype is DType.BYTES:
        return np.array([[b"a", b"", "\u00e4\u20ac".encode()], [b"x" * 1000, b"y", b"z"]], np.object_)
    return np.array([[0, 1, 100], [2, 0, 3]]).astype(dtype.numpy)


class TestData:
    def test_every_dtype_passes_through(self, client: Client) -> None:
        sent = {name: numbers(DType(name)) for name in zoo.DTYPES}
        received = ask(client, "types", **{f"{name}_in": array for name, array in sent.items()})
        assert list(received) == list(zoo.DTYPES)
        for name, array in received.items():
            assert array.dtype == DType(name).numpy, name
            np.testing.assert_array_equal(array, sent[name], name)

    def test_bf16_in_openvino(self, client: Client) -> None:
        sent = np.array([[0, 1.5, -100]]).astype(DType.BF16.numpy)
        np.testing.assert_array_equal(ask(client, "openvino_bf16", x=sent)["y"], sent)

    @pytest.mark.parametrize("name", ["identity_bf16", "identity_bytes"])
    def test_zero_sized_tensors_of_extension_types(self, client: Client, name: str) -> None:
        dtype = DType.BF16 if name.endswith("bf16") else DType.BYTES
        assert ask(client, name, x=np.zeros((2, 0), dtype.numpy))["y"].shape == (2, 0)

    @pytest.mark.parametrize("protocol", ["http", "grpc"])
    def test_text_round_trip(self, zoo_server: Server, protocol: str) -> None:
        feeds = {"x": np.arange(len(zoo.WORDS))[:, None], "text": np.array(zoo.WORDS, np.object_)[:, None]}
        with Client(zoo_server.url if protocol == "http" else zoo_server.grpc_url) as client:
            answer = client.model("words").infer(feeds)
        for name in ("word", "same"):
            assert [word.decode() for word in answer[name].ravel()] == list(zoo.WORDS)

    def test_probabilities_of_a_map_are_served(self, client: Client) -> None:
        answer = ask(client, "zipped", X=[[9.0, 0.0], [0.0, 9.0]])
        assert [label.decode() for label in answer["label"].ravel()] == ["no", "né"]
        assert answer["probability"].argmax(axis=1).tolist() == [0, 1]
        np.testing.assert_allclose(answer["probability"].sum(axis=1), 1, rtol=1e-6)

    def test_sequence_input_is_refused(self, client: Client) -> None:
        assert [tensor["name"] for tensor in client.model("parts").metadata["outputs"]] == ["y"]
        np.testing.assert_array_equal(ask(client, "parts", x=[[1, 2, 3]])["y"], [[2, 4, 6]])

    def test_text_that_is_not_utf8_is_refused(self, client: Client) -> None:
        with pytest.raises(InvalidInput, match="expected UTF-8"):
            ask(client, "identity_bytes", x=np.array([[b"\xff\xfe"]], np.object_))

    def test_zero_sized_tensors(self, client: Client) -> None:
        assert ask(client, "identity_fp32", x=np.zeros((2, 0), np.float32))["y"].shape == (2, 0)

    def test_nan_and_infinity_pass_through(self, client: Client) -> None:
        sent = np.array([[np.nan, np.inf, -np.inf]], np.float32)
        np.testing.assert_array_equal(ask(client, "identity_fp32", x=sent)["y"], sent)

    def test_scalars(self, client: Client) -> None:
        np.testing.assert_array_equal(ask(client, "scalar", x=[21.0])["y"], [42.0])
        np.testing.assert_array_equal(ask(client, "openvino_scalar", x=[21.0])["y"], [42.0])
        np.testing.assert_array_equal(ask(client, "batch_of_scalars", x=[[1.0], [2.0]])["y"], [[2.0], [4.0]])

    def test_dynamic_batch_and_duplicate_outputs(self, client: Client) -> None:
        assert [tensor["shape"] for tensor in client.model("listed_twice").metadata["outputs"]] == [[-1, 3]]
        np.testing.assert_array_equal(
            ask(client, "listed_twice", x=[[1, 2, 3], [4, 5, 6]])["y"], [[2, 4, 6], [8, 10, 12]]
        )

    def test_unnamed_dimensions_are_independent(self, client: Client) -> None:
        answer = ask(client, "unnamed", x=np.ones(2, np.float32), z=np.zeros(3, np.float32))["y"]
        np.testing.assert_array_equal(answer, [1, 1, 0, 0, 0])

    def test_eight_dimensions(self, client: Client) -> None:
        sent = np.random.default_rng(0).normal(size=(3, 1, 2, 1, 2, 1, 2, 1)).astype(np.float32)
        np.testing.assert_array_equal(ask(client, "eight", x=sent)["y"], sent)

    def test_several_inputs_and_outputs_in_signature_order(self, client: Client) -> None:
        metadata = client.model("pair").metadata
        assert [tensor["name"] for tensor in metadata["inputs"]] == ["b", "a"]
        assert [tensor["name"] for tensor in metadata["outputs"]] == ["sum", "difference"]

    def test_unrequested_outputs_are_not_sent(self, client: Client) -> None:
        feeds = {"a": np.array([[1, 2]], np.float32), "b": np.array([[5, 7]], np.float32)}
        model = client.model("pair")
        answer = model.infer(feeds, ["difference"])
        assert set(answer) == {"difference"}
        np.testing.assert_array_equal(answer["difference"], [[4, 5]])
        assert list(model.infer(feeds)) == ["sum", "difference"]

    def test_unrequested_outputs_are_not_computed(self, client: Client) -> None:
        feeds = {"x": np.array([[7, 8]], np.int64)}  # the other output's table has three rows
        model = client.model("fragile")
        deadline = time.monotonic() + 60
        while True:  # the whole graph answers until the graph of that part is there, once in each of two instances
            try:
                answers = [model.infer(feeds, ["good"])["good"].tolist() for _ in range(20)]
                break
            except InvalidInput:
                assert time.monotonic() < deadline
        assert answers == [[[8, 9]]] * 20
        with pytest.raises(InvalidInput, match="out of data bounds"):
            model.infer(feeds)

    def test_optional_inputs(self, client: Client) -> None:
        np.testing.assert_array_equal(ask(client, "optional", x=[1, 2, 3])["y"], [101, 102, 103])
        np.testing.assert_array_equal(ask(client, "optional", x=[1, 2, 3], bias=[5])["y"], [6, 7, 8])

    def test_fixed_shape_without_configuration(self, client: Client) -> None:
        sent = np.ones((2, 3), np.float32)
        np.testing.assert_array_equal(ask(client, "whole", x=sent)["y"], sent * 2)
        with pytest.raises(InvalidInput):
            ask(client, "whole", x=np.ones((1, 3), np.float32))

    @pytest.mark.parametrize("model", ["external", "folder"])
    def test_external_data(self, client: Client, model: str) -> None:
        np.testing.assert_array_equal(ask(client, model, x=np.zeros((1, 4), np.float32))["y"], [[0, 1, 2, 3]])

    def test_versions(self, client: Client) -> None:
        for version, factor in (("1", 10), ("2", 20), ("", 20)):
            np.testing.assert_array_equal(ask(client, "versions", version, x=[[1, 1, 1]])["y"], [[factor] * 3])

    def test_labels_are_found(self, zoo_server: Server) -> None:
        assert config(zoo_server, "labeled")["output"][0]["label_filename"] == "labels.txt"

    @pytest.mark.parametrize("model", ["openvino", "xrt"])
    def test_configuration_chooses_the_engine(self, client: Client, zoo_server: Server, model: str) -> None:
        np.testing.assert_array_equal(ask(client, model, x=[[1, 2, 3]])["y"], [[2, 4, 6]])
        row = next(line for line in zoo_server.log.splitlines() if line.startswith(f"│ {model} "))
        assert "openvino on cpu" in row


class TestSeat:
    @pytest.mark.parametrize("model", ["bare", "platform", "backend"])
    def test_other_backend_name(self, client: Client, zoo_server: Server, model: str) -> None:
        np.testing.assert_array_equal(ask(client, model, x=[[1, 2, 3]])["y"], [[2, 4, 6]])
        assert config(zoo_server, model)["backend"] == "onnxruntime"

    def test_user_files_are_kept(self, zoo_server: Server) -> None:
        found = config(zoo_server, "backend")
        assert found["max_batch_size"] == 16
        assert found["instance_group"][0]["count"] == 1

    def test_user_store_is_not_written(self, zoo_server: Server, store: Path) -> None:
        assert zoo_server.status("/v2/health/ready") == 200
        assert not (store / "bare" / "config.pbtxt").exists()
        assert sorted(path.name for path in (store / "bare").iterdir()) == ["1"]

    @pytest.mark.slow
    def test_triton_completion_is_equal(self, zoo_server: Server, start_server: StartServer, store: Path) -> None:
        polling = start_server("--model-store", store, "--model-control-mode=poll")
        polling.wait_ready()
        for model in sorted(path.name for path in store.iterdir()):
            ours, theirs = config(zoo_server, model), config(polling, model)
            for found in (ours, theirs):
                found.pop("instance_group")  # names of instances
            assert ours == theirs, model


BROKEN = {
    "sequence": (zoo.with_sequence_output(), "", "is a sequence of tensors, and Triton", "join its tensors"),
    "opset": (zoo.scale(("batch", 3), opset=99), "", "opset", "99"),
    "typo": (zoo.scale(("batch", 3)), 'parameters { key: "intra_op_threads" value { string_value: "1" } }',
             "unknown key 'intra_op_threads'", "did you mean 'intra_op_thread_count'?"),
    "dims": (zoo.scale(("batch", 3)), 'input { name: "x" dims: [4] }', "dims", "expected [3], got [4]"),
    "dtype": (zoo.scale(("batch", 3)), 'input { name: "x" data_type: TYPE_INT64 dims: [3] }',
              "expected TYPE_FP32, got TYPE_INT64", "leave the input out"),
    "name": (zoo.scale(("batch", 3)), 'input { name: "z" dims: [3] }', "input 'z' is not in the graph", "x FP32"),
    "unbatchable": (zoo.scale(()), "max_batch_size: 4", "has no batch dimension", "max_batch_size: 0"),
    "batch_input": (zoo.scale(("batch", 3)), 'batch_input { target_name: "n" data_type: TYPE_FP32 source_input: "x" }',
                    "source_input 'x' is not among the inputs", "name it in `input`"),
    "accelerator": (zoo.scale(("batch", 3)),
                    'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }',
                    "the instance runs on the CPU", "GPU"),
}  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Server with broken models and a good one, and its log."""
    store = tmp_path_factory.mktemp("broken")
    for name, (proto, text, *_) in BROKEN.items():
        zoo.add(store, name, proto, text)
    zoo.add(store, "good", zoo.scale(("batch", 3)))
    truncated = zoo.add(store, "truncated", zoo.scale(("batch", 3))) / "model.onnx"
    truncated.write_bytes(truncated.read_bytes()[:60])
    (zoo.add_external(store, "lost") / "weights.bin").unlink()
    zoo.add_external(store, "escape", "../../secret.bin")
    newer = zoo.scale(("batch", 3))
    newer.ir_version = 99
    zoo.add(store, "newer", newer)
    with Serving(tmp_path_factory.mktemp("log"), "--model-store", store, "--exit-on-error=false") as server:
        server.wait_until(lambda: "serving HTTP" in server.log)
        assert server.status("/v2/models/good/ready") == 200
        assert server.status("/v2/health/ready") != 200
        with Client(server.url) as client:
            np.testing.assert_array_equal(ask(client, "good", x=[[1, 2, 3]])["y"], [[2, 4, 6]])
            for name in BROKEN:
                with pytest.raises(ClientError):
                    ask(client, name, x=[[1, 2, 3]])
        yield server.log


class TestRefusals:
    @pytest.mark.parametrize("name", BROKEN)
    def test_error_with_hint(self, log: str, name: str) -> None:
        marks = (f"'{name}'", f"/{name}/", f"{name} version 1 is not served")
        lines = [line for line in log.splitlines() if any(mark in line for mark in marks)]
        for words in BROKEN[name][2:]:
            assert any(words in line for line in lines), "\n".join(lines) or log

    @pytest.mark.parametrize(
        ("name", "words"),
        [("truncated", "cut short"), ("lost", "weights.bin"), ("escape", "out of the version folder"), ("newer", "99")],
    )
    def test_damaged_files(self, log: str, name: str, words: str) -> None:
        lines = [line for line in log.splitlines() if f"/{name}/" in line]
        assert any(words in line for line in lines), "\n".join(lines) or log


class TestEnableFlags:
    def test_unknown_model(self, store: Path) -> None:
        finished = run_command("serve", "--model-store", store, "--enable-openvino", "bar")
        assert finished.returncode == 2
        assert "there is no such model" in finished.stderr
        assert "did you mean 'bare'?" in finished.stderr

    def test_two_engines_for_one_model(self, store: Path) -> None:
        finished = run_command("serve", "--model-store", store, "--enable-openvino=bare", "--enable-tensorrt=bare")
        assert finished.returncode == 2
        assert "both --enable-openvino and --enable-tensorrt" in finished.stderr

    def test_openvino_serves_models_that_have_a_configuration(
        self, start_server: StartServer, digits: Path, repository: Path
    ) -> None:
        server = start_server("--model-store", digits.parent, "--enable-openvino", "digits")
        server.wait_until(lambda: "serving HTTP" in server.log)
        row = next(line for line in server.log.splitlines() if "│ digits" in line and "fp32" in line)
        assert "openvino on cpu" in row
        with Client(server.url) as client:
            assert client.model("digits").classify(repository / "docs" / "digits" / "seven.png").top.label == "seven"

    def test_missing_engine_is_load_error(self, start_server: StartServer, digits: Path) -> None:
        """An engine that cannot run is a load error, never a silent fallback."""
        server = start_server("--model-store", digits.parent, "--enable-tensorrt", "digits")
        server.wait_until(lambda: "serving HTTP" in server.log)
        assert server.status("/v2/health/ready") == 400
        assert "tensorrt serves gpu:N, not cpu" in server.log
