"""Triton's own features with graphkiln's models: scheduling, caching, limits, warm-up, versions, malformed bodies."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import zoo
from running import Server, Serving

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.wide]

ONE_INSTANCE = "instance_group { count: 1 kind: KIND_CPU }"
QUEUE = """
    max_batch_size: 1
    dynamic_batching {
      default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 300000 max_queue_size: 3 }
    }
"""
FLAT = """
    input { name: "x" dims: [-1] allow_ragged_batch: true }
    batch_input {
      kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends_in" data_type: TYPE_INT32 source_input: "x"
    }
    output [{ name: "y" dims: [-1] }, { name: "ends" dims: [1] }, { name: "total" dims: [1] }]
    batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
    dynamic_batching { max_queue_delay_microseconds: 500000 }
"""
OTHER_BACKEND = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        outputs = [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(each, "x").as_numpy()) for each in requests]
        return [pb_utils.InferenceResponse([each]) for each in outputs]
"""
RANKED = "max_batch_size: 1 dynamic_batching { priority_levels: 2 default_priority_level: 2 }"


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("features")
    limiter = 'instance_group { count: 2 kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } } }'
    data = 'key: "x" value { data_type: TYPE_FP32 dims: [3] random_data: true }'
    warm = f'model_warmup {{ name: "w" batch_size: 2 inputs {{ {data} }} }}'
    plain = zoo.scale(("batch", 3))
    zoo.add(store, "limited", plain, limiter)
    zoo.add(store, "warmed", plain, f"max_batch_size: 4 {warm} {ONE_INSTANCE}")
    zoo.add(
        store, "old", zoo.scale(("batch", 3), 1), f"version_policy {{ specific {{ versions: [1] }} }} {ONE_INSTANCE}"
    )
    zoo.add(store, "old", zoo.scale(("batch", 3), 2), None, version=2)
    zoo.add(store, "queued", zoo.slow(), QUEUE + ONE_INSTANCE)
    zoo.add(store, "ranked", zoo.slow(), RANKED + ONE_INSTANCE)
    zoo.add(store, "patient", zoo.slow(), f"max_batch_size: 1 {ONE_INSTANCE}")
    zoo.add(store, "plain", plain, f"max_batch_size: 4 {ONE_INSTANCE}")
    zoo.add(store, "numbers", zoo.identity(("batch", "n"), zoo.DTYPES["FP32"]), ONE_INSTANCE)
    ragged = 'input { name: "x" dims: [-1] allow_ragged_batch: true }'
    ragged += " dynamic_batching { max_queue_delay_microseconds: 500000 }"
    zoo.add(store, "ragged", zoo.identity(("batch", "n")), f"max_batch_size: 4 {ragged} {ONE_INSTANCE}")
    zoo.add(store, "flat", zoo.flat(), f"max_batch_size: 4 {FLAT} {ONE_INSTANCE}")
    with Serving(tmp_path_factory.mktemp("log"), "--model-store", store, "--rate-limit=execution_count") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def client(features: Server) -> Iterator[Client]:
    with Client(features.url) as client:
        yield client


def statistics(server: Server, model: str) -> dict[str, Any]:
    with urlopen(f"{server.url}/v2/models/{model}/stats") as answer:
        return json.load(answer)["model_stats"][0]  # type: ignore[no-any-return]


def runs(server: Server, model: str) -> float:
    """Number of runs of the model's session for requests. Triton also counts dropped requests."""
    seen = -1.0
    while seen != (now := _published_runs(server, model)):
        seen = now
        time.sleep(1.5)  # published once a second
    return seen


def _published_runs(server: Server, model: str) -> float:
    found = server.metrics()
    return sum(n for key, n in found.items() if "graphkiln_batch_size_count" in key and f'"{model}"' in key)


def failures(server: Server, model: str) -> dict[str, float]:
    """Failed requests by Triton's reason."""
    reasons = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
    return {each: triton_metric(server, "nv_inference_request_failure", model, f'reason="{each}"') for each in reasons}


def triton_metric(server: Server, name: str, model: str, label: str = "") -> float:
    """One of Triton's metrics for a model with one version."""
    with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (found,) = (each for each in lines if each.startswith(f'{name}{{model="{model}",') and label in each)
    return float(found.rpartition(" ")[2])


def ones(rows: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, 3), np.float32)}


@pytest.mark.parametrize("flags", [(), ("--disable-auto-complete-config",)])
def test_response_cache_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Also of a load request with another configuration; models of other backends may have one."""
    store, answering = tmp_path / "store", 'backend: "python" response_cache { enable: true } max_batch_size: 0'
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 }'
    for name, more in (("plain", ""), ("cached", "response_cache { enable: true }")):
        zoo.add(store, name, zoo.scale(("batch", 3)), f"max_batch_size: 4 {tensors} {more} {ONE_INSTANCE}")
    zoo.add(store, "other", zoo.scale(("batch", 3)), f"{answering} {tensors} {ONE_INSTANCE}")
    (store / "other" / "1" / "model.py").write_text(OTHER_BACKEND)
    explicit = ("--model-control-mode=explicit", "--cache-config=local,size=1048576", *flags)
    with Serving(tmp_path, "--model-store", store, *explicit) as server, Client(server.url) as client:
        server.wait_until(lambda: "serving HTTP" in server.log)
        with pytest.raises(InvalidInput, match="requests response_cache"):
            client.load("cached")
        client.load("plain")
        config = {**client.model("plain").config, "response_cache": {"enable": True}}
        with pytest.raises(InvalidInput, match="requests response_cache"):
            client.load("plain", config)
        client.load("other")
        for _ in range(2):
            assert client.model("other").infer({"x": np.ones(3, np.float32)})["y"].tolist() == [1, 1, 1]


def test_rate_limiter_runs_one_instance_at_a_time(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.model("limited").infer(ones())["y"][0, 0], range(40)))
    assert answers == [2.0] * 40


def test_ragged_requests_share_a_batch(client: Client, features: Server) -> None:
    sent = [np.arange(length, dtype=np.float32)[np.newaxis] for length in (3, 5, 3, 1)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda x: client.model("ragged").infer({"x": x})["y"], sent))
    for x, y in zip(sent, answers, strict=True):
        np.testing.assert_array_equal(x, y)
    features.wait_until(lambda: statistics(features, "ragged")["execution_count"] == 1)


def test_ragged_requests_are_one_row_each(client: Client, features: Server) -> None:
    """As in Triton's C++ backend: `total` is of the batch, `ends` the end of each request, `y` its own elements."""
    lengths = (3, 5, 1)
    sent = [np.arange(length, dtype=np.float32)[np.newaxis] for length in lengths]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda x: client.model("flat").infer({"x": x}), sent))
    for x, answer in zip(sent, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], x * 2)
    if statistics(features, "flat")["execution_count"] == 1:  # a busy machine may have made two batches
        assert {answer["total"].item() for answer in answers} == {3 + 10}
        ends = sorted(answer["ends"].item() for answer in answers)
        assert ends[-1] == sum(lengths)
        assert sorted(np.diff([0, *ends])) == sorted(lengths)


def test_users_warm_up_is_run(client: Client, features: Server) -> None:
    before = statistics(features, "warmed")["execution_count"]
    client.model("warmed").infer(ones())
    # Triton counts after it has answered.
    features.wait_until(lambda: statistics(features, "warmed")["execution_count"] == before + 1)
    assert "failed to run warmup" not in features.log


def test_version_policy(client: Client, features: Server) -> None:
    np.testing.assert_array_equal(client.model("old").infer(ones())["y"], [[1, 1, 1]])
    assert features.status("/v2/models/old/versions/2/ready") != 200


class TestQueue:
    """The model takes 0.3 s a request or more; its queue holds 3 requests, for at most 0.3 s."""

    def outcomes(
        self, server: Server, model: str, priorities: list[int], *, rounds: int, head_start_s: float = 0.03
    ) -> list[tuple[float, str]]:
        """Send all in order, the first with a head start; return when and how each ended."""
        url = server.grpc_url.removeprefix("grpc://")
        with triton_grpc.InferenceServerClient(url) as client:

            def ask(priority: int) -> tuple[float, str]:
                tensor = triton_grpc.InferInput("ROUNDS", [1, 1], "INT64")
                tensor.set_data_from_numpy(np.array([[rounds]]))
                try:
                    client.infer(model, [tensor], priority=priority)
                except triton_grpc.InferenceServerException as error:
                    return time.monotonic(), f"{error.status()} {error.message()}"
                return time.monotonic(), "answered"

            with ThreadPoolExecutor(len(priorities)) as pool:
                futures = []
                for priority in priorities:
                    futures.append(pool.submit(ask, priority))
                    time.sleep(head_start_s if len(futures) == 1 else 0.03)
                return [future.result() for future in futures]

    def rounds(self, server: Server) -> int:
        if not hasattr(TestQueue, "_rounds"):
            with Client(server.url) as client:
                model = client.model("patient")  # the same graph, without a time limit
                seconds = []
                for _ in range(4):  # the fastest counts: other tests take time from this one
                    begun = time.perf_counter()
                    model.infer({"ROUNDS": np.array([[1000]])})
                    seconds.append(time.perf_counter() - begun)
                TestQueue._rounds = int(1000 * 0.4 / min(seconds))  # type: ignore[attr-defined]
        return TestQueue._rounds  # type: ignore[attr-defined,no-any-return]

    def test_full_queue_and_timeout(self, features: Server) -> None:
        before = failures(features, "queued")
        outcomes = self.outcomes(features, "queued", [0] * 8, rounds=self.rounds(features))
        ends = [how for _, how in outcomes]
        assert ends[0] == "answered"
        assert sum("Exceeds maximum queue size" in how for how in ends) >= 2, ends
        too_old = sum("timeout" in how.lower() for how in ends)
        assert too_old >= 1, ends
        counted = {**before, "REJECTED": before["REJECTED"] + too_old}
        features.wait_until(lambda: failures(features, "queued") == counted)  # a full queue refuses without counting

    def test_higher_priority_goes_first(self, features: Server) -> None:
        rounds = 4 * self.rounds(features)
        first, low, high = self.outcomes(features, "ranked", [2, 2, 1], rounds=rounds, head_start_s=0.4)
        assert {how for _, how in (first, low, high)} == {"answered"}
        assert high[0] < low[0]


def post(server: Server, model: str, body: bytes, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", f"/v2/models/{model}/infer", body, names)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def binary(size: int, claimed: int) -> tuple[bytes, str]:
    """Make a body of `size` bytes of tensor whose header claims `claimed`."""
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": claimed}}
    header = json.dumps({"inputs": [tensor]}).encode()
    return header + b"\0" * size, str(len(header))


class TestBadBodies:
    """Each gets an error with a reason, and the next good request a response.

    The bodies are read by Triton's own front end, which (24.10) says 500 for JSON that it cannot use.
    """

    @pytest.fixture(autouse=True)
    def goes_on_serving(self, client: Client) -> Iterator[None]:
        yield
        np.testing.assert_array_equal(client.model("plain").infer(ones())["y"], [[2, 2, 2]])

    @pytest.mark.parametrize(("size", "claimed"), [(8, 12), (16, 12), (8, 8), (0, 12), (16, 16)])
    def test_truncated_and_oversized_binary_tensors(self, features: Server, size: int, claimed: int) -> None:
        body, header_length = binary(size, claimed)
        status, text = post(features, "plain", body, Inference_Header_Content_Length=header_length)
        assert status == 400
        assert any(word in text for word in ("byte", "size", "unexpected additional input data")), text

    @pytest.mark.parametrize("data", [[1, 2], [1, 2, 3, 4], ["a", "b", "c"], None])
    def test_json_with_the_wrong_elements(self, features: Server, data: Any) -> None:
        tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": data}
        status, text = post(features, "plain", json.dumps({"inputs": [tensor]}).encode())
        assert status in (400, 500)
        assert len(json.loads(text)["error"]) > 20

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"inputs": 3}', b"\xff\xfe"])
    def test_bodies_without_a_request(self, features: Server, body: bytes) -> None:
        status, text = post(features, "plain", body)
        assert status in (400, 500)
        assert json.loads(text)["error"]

    def test_missing_input(self, features: Server) -> None:
        status, text = post(features, "plain", b'{"inputs": []}')
        assert status == 400
        assert "expected 1 inputs but got 0" in text.replace("  ", " "), text

    def test_nan_in_binary_is_allowed(self, client: Client) -> None:
        sent = np.full((1, 2), np.nan, np.float32)
        np.testing.assert_array_equal(client.model("numbers").infer({"x": sent})["y"], sent)


def test_cancelled_request_is_not_computed(features: Server) -> None:
    """It waits behind a long one, and the client hangs up before its turn."""
    url = features.grpc_url.removeprefix("grpc://")
    rounds = 10 * TestQueue().rounds(features)
    before, failed = runs(features, "patient"), failures(features, "patient")
    errors: dict[str, Any] = {}
    with triton_grpc.InferenceServerClient(url) as client:

        def ask(name: str) -> Any:
            def finished(result: Any, error: Any) -> None:  # noqa: ARG001 - tritonclient passes both by name
                errors[name] = error

            tensor = triton_grpc.InferInput("ROUNDS", [1, 1], "INT64")
            tensor.set_data_from_numpy(np.array([[rounds]]))
            return client.async_infer("patient", [tensor], finished)

        computed = features.computed_s()
        ask("long")
        features.wait_computing(computed)
        second = ask("cancelled")
        features.wait_until(lambda: triton_metric(features, "nv_inference_pending_request_count", "patient") == 1)
        second.cancel()
        deadline = time.monotonic() + 60
        while len(errors) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert errors["long"] is None
    assert errors["cancelled"] is not None
    assert runs(features, "patient") == before + 1
    (counted,) = (
        name
        for name in features.metrics()
        if name.startswith("graphkiln_failed_requests_total") and "patient" in name and "CANCELLED" in name
    )
    features.wait_until(lambda: features.metrics()[counted] == 1)
    # To Triton that is a success, which is why deploy/prometheus/rules.yml asks the instances.
    assert failures(features, "patient") == failed
