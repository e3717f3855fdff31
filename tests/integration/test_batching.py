"""Batches on the real server: order, and one bad request among good ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zoo
from running import Server, Serving, settled

from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_client import Client

pytestmark = pytest.mark.server


def add_mixing(store: Path) -> None:
    """Add `mixing`, whose rows vary and which sums them all."""
    nodes = [zoo.helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=1)]
    ports = ([zoo.value("x", ("batch", 2))], [zoo.value("y", ("sums", 2))])
    proto = zoo.model(nodes, *ports, {"axes": np.array([0], np.int64)})
    zoo.add(store, "mixing", proto, f"max_batch_size: 8 {zoo.DELAY}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("batching store")
    zoo.add_lookup(store)
    add_mixing(store)
    with Serving(tmp_path_factory.mktemp("batching"), "--model-store", store) as server:
        server.wait_ready()
        yield server


def ask_together(url: str, requests: list[list[list[int]]]) -> list[np.ndarray | ClientError]:
    """Send all requests at once; the queue delay makes one batch of them."""
    with Client(url) as client, ThreadPoolExecutor(len(requests)) as pool:
        model = client.model("lookup")
        futures = [pool.submit(model.infer, {"INDEX": np.array(rows, np.int64)}) for rows in requests]
        return [error if (error := future.exception()) else future.result()["VALUE"] for future in futures]  # type: ignore[misc]


def executions(server: Server) -> int:
    """Number of batches that the model has run, by Triton's statistics."""
    with Client(server.url) as client:
        return int(settled(client.model("lookup"))["execution_count"])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_batched_requests_are_answered_in_order(running: Server, protocol: str) -> None:
    url = running.url if protocol == "http" else running.grpc_url
    requests = [[[i, i + 1]] for i in range(8)]
    before = executions(running)
    answers = ask_together(url, requests)
    assert executions(running) - before < len(requests), "nothing was batched"
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer, np.array(request, np.float32) * 10)


def test_requests_of_several_rows(running: Server) -> None:
    requests = [[[1], [2], [3]], [[4]], [[5], [6]]]
    for request, answer in zip(requests, ask_together(running.url, requests), strict=True):
        np.testing.assert_array_equal(answer, np.array(request, np.float32) * 10)


def test_requests_of_different_shapes(running: Server) -> None:
    requests = [[[1, 2, 3]], [[4]], [[5, 6, 7]], [[8]]]
    for request, answer in zip(requests, ask_together(running.url, requests), strict=True):
        np.testing.assert_array_equal(answer, np.array(request, np.float32) * 10)


def test_bad_request_fails_alone(running: Server) -> None:
    requests = [[[1]], [[10]], [[3]]]  # the table has ten entries
    first, bad, last = ask_together(running.url, requests)
    assert isinstance(bad, InvalidInput), bad
    assert "10" in str(bad)
    np.testing.assert_array_equal(first, [[10.0]])
    np.testing.assert_array_equal(last, [[30.0]])


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({"INDEX": np.zeros((1, 2, 3), np.int64)}, "shape"),
        ({"INDEX": np.zeros((1, 2), np.float32)}, "data-type"),
        ({"INDEKS": np.zeros((1, 2), np.int64)}, "INDEKS"),
        ({"INDEX": np.zeros((9, 2), np.int64)}, "batch-size"),
    ],
)
def test_wrong_tensor_is_refused_with_a_reason(running: Server, feeds: dict[str, np.ndarray], words: str) -> None:
    with Client(running.url) as client:
        with pytest.raises(InvalidInput, match=words):
            client.model("lookup").infer(feeds)
        np.testing.assert_array_equal(client.model("lookup").infer({"INDEX": np.array([[7]])})["VALUE"], [[70.0]])


def test_graph_that_mixes_rows_is_not_batched(running: Server) -> None:
    """Its outputs cannot be divided among the requests of a batch."""
    with Client(running.url) as client, ThreadPoolExecutor(4) as pool:
        model = client.model("mixing")
        sent = [np.full((1, 2), value, np.float32) for value in (1, 10, 100, 1000)]
        answers = list(pool.map(lambda x: model.infer({"x": x})["y"], sent))
    for x, answer in zip(sent, answers, strict=True):
        np.testing.assert_array_equal(answer, x)
