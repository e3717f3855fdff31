"""A model asked over HTTP: deadlines, closing, errors, shapes; `test_golden_requests` has every data type."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fake_kserve import Arrays, FakeKserve
from waiting import wait_until

from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.triton import served_model as module
from graphkiln_backend.triton.served_model import BusyError, Reshapes, ServedModel

X = np.ones((1, 3), np.float32)


class Served:
    """A model that doubles, once it may answer."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.server = FakeKserve(self._compute)
        self.model = ServedModel(self.server.address.local_address, {"key": "secret"}, "m")

    def _compute(self, inputs: Arrays) -> Arrays:
        self.may_answer.wait(20)
        return {"y": inputs["x"] * 2}

    def ask(self, x: Any = X, timeout_s: float = 20.0) -> Any:
        return self.model.infer({"x": x}, ["y"], request_id="7", timeout_s=timeout_s)["y"]


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    with made.server, made.model:
        yield made
        made.may_answer.set()


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_shapes(served: Served, shape: tuple[int, ...], dtype: Any) -> None:
    assert served.ask(np.ones(shape, dtype)).shape == shape
    assert served.ask(np.ones(shape[::-1], dtype).T).shape == shape  # not contiguous


def test_a_connection_is_kept(served: Served) -> None:
    for _ in range(5):
        served.ask()
    assert (served.server.connections, served.server.headers["key"]) == (1, "secret")


def test_an_answer_that_is_late_closes_the_connection(served: Served) -> None:
    served.ask()
    served.may_answer.clear()
    with pytest.raises(TimeoutError):
        served.ask(timeout_s=0.05)
    served.may_answer.set()
    assert served.ask()[0, 0] == 2  # not the answer before
    assert served.server.connections == 2
    with pytest.raises(TimeoutError):
        served.ask(timeout_s=-1.0)


def test_closing_ends_requests_under_way(served: Served) -> None:
    served.may_answer.clear()
    with ThreadPoolExecutor(1) as users:
        answer = users.submit(served.ask)
        wait_until(lambda: served.server.asked != [])
        served.model.close()
        assert isinstance(answer.exception(10), OSError | module.client.HTTPException)
    with pytest.raises(ConnectionAbortedError):
        served.ask()


@pytest.mark.parametrize(("status", "kind"), [(400, ExecutionError), (500, ExecutionError), (503, BusyError)])
def test_errors_of_the_server(served: Served, status: int, kind: Callable[..., Exception]) -> None:
    served.server.errors = [(status, "[request id: 7] no memory")]
    with pytest.raises(ExecutionError, match=r"^no memory$") as raised:
        served.ask()
    assert type(raised.value) is kind
    assert served.ask()[0, 0] == 2


@pytest.mark.parametrize(("body", "words"), [(b"<html>", "<html>"), (b'{"error": {}}', "{}"), (b"[]", "[]")])
def test_an_error_that_is_not_of_the_protocol(body: bytes, words: str) -> None:
    assert words in module._error_in(body, "7")


@pytest.mark.parametrize(
    ("batch", "dims", "reshape", "outside", "inside"),
    [
        (8, [6], [2, 3], (4, 6), (4, 2, 3)),
        (0, [6], [2, 3], (6,), (2, 3)),
        (8, [-1, -1], [1, -1, -1], (4, 2, 5), (4, 1, 2, 5)),
        (8, [-1], [1, -1], (2, 0), (2, 1, 0)),
        (0, [1], [], (1,), ()),
    ],
)
def test_reshapes(batch: int, dims: Any, reshape: Any, outside: Any, inside: Any) -> None:
    config = ModelConfigProto(name="m", max_batch_size=batch)
    config.input.add(name="x", dims=dims).reshape.shape.extend(reshape)
    reshapes = Reshapes(config)
    assert reshapes.outside("x", np.zeros(inside)).shape == outside
    assert reshapes.inside("x", np.zeros(outside)).shape == inside
    assert reshapes.outside("other", np.zeros(())).shape == (1,)


def test_size_in_a_request() -> None:
    assert module.size_in_request(np.zeros((2, 3), np.float16)) == 12
    assert module.size_in_request(np.array([[b"ab", b""]], object)) == 10
