"""Sequences on the real server: control inputs, both strategies, implicit states, isolation."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import zoo
from onnx import ModelProto, TensorProto, helper
from psutil import Process
from running import Server, Serving

pytestmark = [pytest.mark.server, pytest.mark.slow]

ONE = "max_batch_size: 4 instance_group { count: 1 kind: KIND_CPU }"
TWO = ONE.replace("count: 1", "count: 2")
STATE = 'state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [1]'
FILE = 'initial_state { name: "i" data_type: TYPE_INT32 dims: [1] data_file: "hundred" }'
WARM = """
    model_warmup {
      name: "w" batch_size: 1 inputs { key: "INPUT" value { data_type: TYPE_INT32 dims: [1] zero_data: true } }
    }
"""
BOOLEANS = {
    "START": ("FLOAT", "fp32_false_true: [-1, 2.5]"),
    "END": ("INT32", "int32_false_true: [3, 4]"),
    "READY": ("BOOL", "bool_false_true: [false, true]"),
}
# The other two differ from the first two by their names only.
IDS = ("UINT64", "INT32", "STRING")


def sums(*, batched: bool = True) -> ModelProto:
    """Graph whose `OUTPUT` and state are the sum of all inputs; a table of 1000 rows makes some requests fail."""
    shape = ("batch", 1) if batched else (1,)
    nodes = [
        helper.make_node("Add", ["INPUT", "STATE_IN"], ["STATE_OUT"]),
        helper.make_node("Gather", ["table", "INPUT"], ["checked"]),
        helper.make_node("Add", ["STATE_OUT", "checked"], ["OUTPUT"]),
    ]
    tensors = [zoo.value(name, shape, TensorProto.INT32) for name in ("INPUT", "STATE_IN", "OUTPUT", "STATE_OUT")]
    return zoo.model(nodes, tensors[:2], tensors[2:], {"table": np.zeros(1000, np.int32)})


def echo(*controls: tuple[str, str]) -> ModelProto:
    """Graph that returns each input under its name in lower case."""
    types = {"INPUT": TensorProto.INT32, **{name: getattr(TensorProto, kind) for name, kind in controls}}
    nodes = [helper.make_node("Identity", [name], [name.lower()]) for name in types]
    inputs = [zoo.value(name, ("batch", 1), kind) for name, kind in types.items()]
    outputs = [zoo.value(name.lower(), ("batch", 1), kind) for name, kind in types.items()]
    return zoo.model(nodes, inputs, outputs)


def control(name: str, kind: str, values: str) -> str:
    return f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("sequences")
    oldest = "oldest { max_candidate_sequences: 8 max_queue_delay_microseconds: 2000 }"
    zoo.add(store, "direct", sums(), f"{ONE} {WARM} sequence_batching {{ direct {{}} {STATE} }} }}")
    zoo.add(store, "oldest", sums(), f"{TWO} sequence_batching {{ {oldest} {STATE} }} }}")
    plain = f"instance_group {{ count: 1 kind: KIND_CPU }} sequence_batching {{ {STATE} {FILE} }} }}"
    folder = zoo.add(store, "file", sums(batched=False), plain)
    (folder.parent / "initial_state").mkdir()
    (folder.parent / "initial_state" / "hundred").write_bytes(np.int32([100]).tobytes())
    booleans = " ".join(control(name, name, values) for name, (_, values) in BOOLEANS.items())
    graph = echo(*((name, kind) for name, (kind, _) in BOOLEANS.items()))
    zoo.add(store, "controls", graph, f"{ONE} sequence_batching {{ {booleans} }}")
    for kind in IDS:
        corrid = control("ID", "CORRID", f"data_type: TYPE_{kind}")
        zoo.add(store, f"id_{kind.lower()}", echo(("ID", kind)), f"{ONE} sequence_batching {{ {corrid} }}")
    with Serving(tmp_path_factory.mktemp("log"), "--model-store", store) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        yield client


def feed(value: int, *, batched: bool = True) -> list[Any]:
    array = np.array([[value]] if batched else [value], np.int32)
    tensor = triton_grpc.InferInput("INPUT", array.shape, "INT32")
    return [tensor.set_data_from_numpy(array)]


def ask(client: Any, model: str, identity: int | str, value: int, flags: str = "") -> dict[str, Any]:
    """Outputs of a request; `flags` has `S` for the first and `E` for the last request of a sequence."""
    result = client.infer(
        model, feed(value, batched=model != "file"), sequence_id=identity, sequence_start="S" in flags,
        sequence_end="E" in flags,
    )  # fmt: skip
    return {output.name: result.as_numpy(output.name).reshape(-1)[0] for output in result.get_response().outputs}


def total(client: Any, model: str, identity: int | str, value: int, flags: str = "") -> int:
    return int(ask(client, model, identity, value, flags)["OUTPUT"])


class TestStates:
    @pytest.mark.parametrize(("model", "initial"), [("direct", 0), ("oldest", 0), ("file", 100)])
    def test_sums_and_restarts(self, client: Any, model: str, initial: int) -> None:
        for identity in (7, 7, "text"):
            values = [total(client, model, identity, *step) for step in ((1, "S"), (2,), (4, "E"))]
            assert values == [initial + 1, initial + 3, initial + 7]

    def test_only_outputs_are_sent(self, client: Any) -> None:
        assert list(ask(client, "direct", 7, 1, "SE")) == ["OUTPUT"]

    def test_id_that_starts_again_without_an_end(self, client: Any) -> None:
        assert [total(client, "direct", 8, value, "S") for value in (5, 6)] == [5, 6]
        assert total(client, "direct", 8, 1, "E") == 7

    def test_empty_slots_of_the_direct_strategy(self, client: Any) -> None:
        """The direct strategy fills the slots of other sequences, which send nothing."""
        for identity in (1, 2, 3):
            assert total(client, "direct", identity, identity * 10, "S") == identity * 10
        assert [total(client, "direct", 3, 1) for _ in range(3)] == [31, 32, 33]
        assert [total(client, "direct", identity, 1, "E") for identity in (2, 1, 3)] == [21, 11, 34]

    @pytest.mark.parametrize("model", ["direct", "oldest"])
    def test_isolation_under_load(self, client: Any, model: str) -> None:
        """More sequences than slots, all at once, on all instances."""

        def run(identity: int) -> list[int]:
            flags = ["S", "", "", "", "E"]
            return [total(client, model, identity, identity + step, flags[step]) for step in range(5)]

        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(run, range(100, 136)))
        expected = [np.cumsum([identity + step for step in range(5)]).tolist() for identity in range(100, 136)]
        assert found == expected

    def test_failed_request_keeps_all_sequences(self, client: Any) -> None:
        total(client, "direct", 1, 1, "S")
        total(client, "direct", 2, 10, "S")
        with pytest.raises(triton_grpc.InferenceServerException, match="out of data bounds"):
            total(client, "direct", 1, 1000)
        assert [total(client, "direct", identity, 1, "E") for identity in (1, 2)] == [2, 11]

    def test_sequence_with_failed_start_is_not_continued(self, client: Any) -> None:
        with pytest.raises(triton_grpc.InferenceServerException, match="out of data bounds"):
            total(client, "direct", 9, 1000, "S")
        with pytest.raises(triton_grpc.InferenceServerException, match="restart the sequence"):
            total(client, "direct", 9, 1)
        assert total(client, "direct", 9, 3, "SE") == 3

    @pytest.mark.parametrize("model", ["direct", "oldest", "file"])
    def test_sequence_without_start_is_an_error(self, client: Any, model: str) -> None:
        with pytest.raises(triton_grpc.InferenceServerException, match="START flag"):
            total(client, model, 4711, 1)


class TestControls:
    def test_start_end_and_ready_controls_of_each_type(self, client: Any) -> None:
        def seen(flags: str) -> list[float]:
            outputs = ask(client, "controls", 7, 1, flags)
            return [outputs[key] for key in ("start", "end", "ready")]

        assert [seen(flags) for flags in ("S", "", "E", "SE")] == [
            [2.5, 3, True], [-1, 3, True], [-1, 4, True], [2.5, 4, True],
        ]  # fmt: skip

    @pytest.mark.parametrize("kind", IDS)
    def test_numeric_id(self, client: Any, kind: str) -> None:
        assert ask(client, f"id_{kind.lower()}", 7, 1, "SE")["id"] == (b"7" if kind == "STRING" else 7)

    def test_text_id(self, client: Any) -> None:
        assert ask(client, "id_string", "abc", 1, "SE")["id"] == b"abc"

    @pytest.mark.parametrize(("kind", "identity"), [("UINT64", "abc"), ("INT32", 1 << 33)])
    def test_id_out_of_range_is_an_error(self, client: Any, kind: str, identity: int | str) -> None:
        with pytest.raises(triton_grpc.InferenceServerException, match=f"expected {kind}"):
            ask(client, f"id_{kind.lower()}", identity, 1, "SE")


def test_streams_and_http(client: Any, server: Server) -> None:
    """As Triton's examples: two sequences over one stream, answered in the order of each."""
    done: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: done.put((result, error)))
    values = (11, 7, 5, 3, 2, 0, 1)
    expected: Mapping[str, int] = {}
    for identity in (1000, 1001):
        for step, value in enumerate(values):
            client.async_stream_infer(
                "oldest", feed(value), request_id=f"{identity}_{step}", sequence_id=identity,
                sequence_start=step == 0, sequence_end=step == len(values) - 1,
            )  # fmt: skip
        expected = {**expected, **{f"{identity}_{step}": sum(values[: step + 1]) for step in range(len(values))}}
    found = {}
    for _ in expected:
        result, error = done.get(timeout=30)
        assert error is None
        found[result.get_response().id] = int(result.as_numpy("OUTPUT").item())
    client.stop_stream()
    assert found == expected
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as http:
        sent = [triton_http.InferInput("INPUT", [1, 1], "INT32")]
        for step, value in enumerate((5, 6)):
            sent[0].set_data_from_numpy(np.array([[value]], np.int32))
            answer = http.infer("direct", sent, sequence_id=77, sequence_start=step == 0, sequence_end=step == 1)
            assert answer.as_numpy("OUTPUT").item() == (5, 11)[step]


def kill_instance(server: Server) -> None:
    """Kill the process of the only instance, as the kernel does when memory is short."""
    (stub,) = [child for child in Process(server.process.pid).children(recursive=True) if "stub" in child.name()]
    stub.kill()


def serves(client: Any) -> bool:
    """Return true if a sequence of one request is computed."""
    try:
        return total(client, "direct", 8, 3, "SE") == 3
    except triton_grpc.InferenceServerException:
        return False


def test_sequence_of_a_killed_instance_is_an_error(tmp_path: Path) -> None:
    """After a restart the state is lost: continuing from zeros would be a wrong output."""
    store = tmp_path / "store"
    zoo.add(store, "direct", sums(), f"{ONE} sequence_batching {{ direct {{}} {STATE} }} }}")
    with Serving(tmp_path, "--model-store", store) as server:
        server.wait_ready()
        with triton_grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
            assert total(client, "direct", 7, 5, "S") == 5
            kill_instance(server)
            deadline = time.monotonic() + 120
            while not (served := serves(client)) and time.monotonic() < deadline:
                time.sleep(0.5)
            assert served
            with pytest.raises(triton_grpc.InferenceServerException, match="START flag"):
                total(client, "direct", 7, 1)
