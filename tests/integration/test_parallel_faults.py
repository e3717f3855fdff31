"""A stage or shard of the real server that fails, hangs or kills its process: no wrong output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import split_graphs
import zoo
from graphs import compute, draw
from running import Server, Serving

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.speed import CPU_CORE
from graphkiln_backend.lowering.parallel.stages import find_stages
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

# Rows of the table of a stage; the largest batch.
ROWS, BATCH = 8, 4
# Rounds of the loop in a stage; they take hours.
ENDLESS = np.array([[10_000_000]], np.int64)
COMPUTE_LIMIT_S = 20


def config(numbers: str, batch: int) -> str:
    return (
        f'backend: "graphkiln" max_batch_size: {batch} {zoo.DELAY.replace("8", str(batch)) if batch > 1 else ""}\n'
        f'parameters {{ key: "parallel" value {{ string_value: "{numbers}" }} }}'
    )


@pytest.fixture(scope="module")
def store(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stages and shards that fail for a missing row of a table, a stage that loops, and a model beside them."""
    folder = tmp_path_factory.mktemp("faults store")
    for name, numbers in (("stages", f"pipeline=2, micro_batches={BATCH}"), ("shards", "tensor=2")):
        split_graphs.save(split_graphs.looking_up(ROWS), folder / name / "1")
        (folder / name / "config.pbtxt").write_text(config(numbers, BATCH))
    zoo.add(folder, "slow", zoo.slow(), config("pipeline=2, micro_batches=1", 1))
    shutil.copytree(digits, folder / "beside")
    text = (digits / "config.pbtxt").read_text()
    (folder / "beside" / "config.pbtxt").write_text(text.replace('name: "digits"', 'name: "beside"'))
    return folder


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limit = f"--compute-limit={COMPUTE_LIMIT_S}"
    with Serving(tmp_path_factory.mktemp("faults"), "--model-store", store, limit) as running:
        running.wait_ready()
        running.wait_until(lambda: "serving HTTP" in running.log)
        yield running


def test_lookup_is_behind_the_first_stage(store: Path) -> None:
    """The faults below need other micro-batches in the stage before it."""
    costs = count_costs(store / "stages" / "1" / "model.onnx", 1)
    _, second = find_stages(costs, 2, CPU_CORE, rows=1)
    lookup = next(number for number, node in enumerate(costs.nodes) if node.op_type == "Gather")
    assert second.begin <= lookup < second.end


def requests(rows: list[int]) -> list[dict[str, AnyArray]]:
    return [{"x": draw(1, split_graphs.WIDE, seed=seed), "row": np.array([[row]])} for seed, row in enumerate(rows)]


def ask_together(server: Server, name: str, rows: list[int]) -> list[AnyArray | ClientError]:
    """Send all requests at once; the queue delay makes one batch of them."""
    with Client(server.url, timeout_s=60, max_retries=0) as client, ThreadPoolExecutor(len(rows)) as pool:
        model = client.model(name)
        futures = [pool.submit(model.infer, feeds) for feeds in requests(rows)]
        return [future.exception() or future.result()["y"] for future in futures]  # type: ignore[misc]


def expected(rows: list[int]) -> list[AnyArray]:
    graph: onnx_ir.Model = split_graphs.looking_up(ROWS)
    return [compute(graph, **feeds)["y"] for feeds in requests(rows)]


@pytest.mark.parametrize("name", ["stages", "shards"])
def test_request_that_fails_in_a_stage_fails_alone(server: Server, name: str) -> None:
    """The engine raises in the middle of a batch, while other parts of it are computed."""
    starts = server.log.count("serving HTTP")
    for number in range(3):
        rows = [1, 2, 3, 4]
        rows[number] = ROWS + 91
        for answer, right, row in zip(ask_together(server, name, rows), expected([1, 2, 3, 4]), rows, strict=True):
            if row > ROWS:
                assert isinstance(answer, ClientError)
                assert str(row) in str(answer)
            else:
                assert not isinstance(answer, ClientError), answer
                np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-4)
    assert server.log.count("serving HTTP") == starts
    failures = "graphkiln_self_test_failures_total{"
    assert {value for key, value in server.metrics().items() if key.startswith(failures)} == {0.0}


def instance_of(server: Server, model: str) -> int:
    """Process of a model's only instance, from its status file."""
    statuses = [json.loads(path.read_text()) for path in server.temporary.glob("graphkiln-*/instances/*.json")]
    (pid,) = {int(status["pid"]) for status in statuses if status.get("model") == model}
    return pid


def rounds(server: Server, count: AnyArray) -> AnyArray:
    with Client(server.url, timeout_s=60, max_retries=0) as client:
        found: AnyArray = client.model("slow").infer({"ROUNDS": count})["SUM"]
        return found


def beside(server: Server) -> AnyArray:
    with Client(server.url, timeout_s=60) as client:
        found: AnyArray = client.model("beside").infer({"INPUT_0": draw(1, 1, 32, 32)})["OUTPUT_0"]
        return found


@pytest.fixture
def computing(server: Server) -> Iterator[list[ClientError]]:
    """Wait until a stage is in an endless loop; return what its client gets in the end."""
    errors: list[ClientError] = []

    def call() -> None:
        try:
            rounds(server, ENDLESS)
        except ClientError as error:
            errors.append(error)

    before_s = server.computed_s()
    caller = threading.Thread(target=call)
    caller.start()
    server.wait_computing(before_s)
    yield errors
    caller.join(120)
    assert not caller.is_alive(), "it hangs"


def crash(server: Server) -> None:
    os.kill(instance_of(server, "slow"), signal.SIGSEGV)


def wait_for_the_limit(server: Server) -> None:
    words = f"has computed one batch for {COMPUTE_LIMIT_S} s (--compute-limit): restarting the server"
    server.wait_until(lambda: words in server.log)


@pytest.mark.parametrize("fault", [crash, wait_for_the_limit])
def test_stage_that_crashes_or_hangs_is_an_error_and_the_service_recovers(
    server: Server, computing: list[ClientError], fault: Callable[[Server], None]
) -> None:
    one, others = np.array([[1]], np.int64), beside(server)
    starts = server.log.count("serving HTTP")
    fault(server)
    server.wait_until(lambda: server.log.count("serving HTTP") > starts)
    server.wait_ready()
    deadline = time.monotonic() + 60
    while not computing and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(computing) == 1, "its client was told"
    np.testing.assert_array_equal(rounds(server, one), [[256]])
    np.testing.assert_array_equal(beside(server), others)
    for answer, right in zip(ask_together(server, "stages", [1, 2]), expected([1, 2]), strict=True):
        assert not isinstance(answer, ClientError), answer
        np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-4)


def test_server_with_hanging_stage_stops(tmp_path: Path) -> None:
    """Threads of stages do not keep the process alive."""
    zoo.add(tmp_path / "store", "slow", zoo.slow(), config("pipeline=2, micro_batches=1", 1))
    with Serving(tmp_path, "--model-store", tmp_path / "store", "--drain=1") as own:
        own.wait_ready()
        before_s = own.computed_s()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(rounds, own, ENDLESS)
            own.wait_computing(before_s)
            code, _ = own.stop()
            assert isinstance(asked.exception(), ClientError)
        assert code == 0
