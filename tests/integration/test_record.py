"""Recorded requests of a real server: the record, its replay, faults of its disk, killed instances."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from recorded import FAULTS, Fault, rows
from running import Server, StartServer, is_stub, run_here

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

IMAGES = Path(__file__).parents[2] / "docs" / "digits"
_CALLERS = 8


@pytest.fixture
def store(digits: Path, tmp_path: Path) -> Path:
    """The example classifier, which also accepts encoded images."""
    shutil.copytree(digits.parent, tmp_path / "store")
    with (tmp_path / "store" / "digits" / "config.pbtxt").open("a") as file:
        file.write(f"\n{ACCEPT_IMAGES_LINE}\n")
    return tmp_path / "store"


def inputs(count: int) -> Iterator[AnyArray]:
    generator = np.random.default_rng(3)
    for _ in range(count):
        yield generator.normal(0, 1, (1, 1, 32, 32)).astype(np.float32)


def replayed(record: Path, model: Path) -> tuple[int, dict[str, object]]:
    finished = run_here("replay", record, "--model", model, "--json", "--cache=off")
    assert finished.stdout, finished.stderr
    return finished.returncode, json.loads(finished.stdout)


def stub(server: Server) -> psutil.Process:
    """The instance of the tensor model."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(each for each in children if is_stub(each) and "digits_0" in each.cmdline())


def test_ten_thousand_requests_have_the_same_bits(start_server: StartServer, store: Path, tmp_path: Path) -> None:
    record = tmp_path / "récord"
    server = start_server("--model-store", store, "--record", record, "--record-share", "100%")
    server.wait_ready()
    with Client(server.grpc_url) as client:
        model = client.model("digits")
        answers = [model.infer({"INPUT_0": image}) for image in inputs(10_000)]
    assert server.stop()[0] == 0
    found = rows(record)
    assert len({row.request_id for row in found}) == len(found) == 10_000
    assert sorted(row.time_ns for row in found) == [row.time_ns for row in found]
    for row, answer in zip(found, answers, strict=True):
        np.testing.assert_array_equal(row.outputs["OUTPUT_0"], answer["OUTPUT_0"])
    code, document = replayed(record, store / "digits")
    assert (code, document["requests"], document["bit_equal"]) == (0, 10_000, 10_000)


def test_batches_and_images_are_within_the_policy(start_server: StartServer, store: Path, tmp_path: Path) -> None:
    server = start_server("--model-store", store, "--record", tmp_path / "r", "--record-share", "100%")
    server.wait_ready()
    with Client(server.url) as client, ThreadPoolExecutor(_CALLERS) as callers:
        model = client.model("digits")
        list(callers.map(lambda image: model.infer({"INPUT_0": image}), inputs(500)))
        counted = [name for name in server.metrics() if "graphkiln_record" in name]
        results = list(client.model("digits", images="encoded").classify_many(sorted(IMAGES.glob("*.png"))))
    assert len(counted) == 2
    assert server.stop()[0] == 0
    found = rows(tmp_path / "r", "digits")
    assert sum(len(row.outputs["OUTPUT_0"]) for row in found) == 500 + len(results)
    code, document = replayed(tmp_path / "r", store / "digits")
    assert (code, document["outside_policy"]) == (0, 0)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["digits"]


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_of_the_folder_costs_no_answer(kind: str, start_server: StartServer, store: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    server = start_server("--model-store", store, "--record", record, "--record-share", "100%")
    server.wait_ready()
    fault = Fault(record, "digits")
    with fault.stack:
        getattr(fault, kind)()
        with Client(server.url, max_retries=0) as client:
            model = client.model("digits")
            for image in inputs(700):  # 3 MB that do not compress
                model.infer({"INPUT_0": image})
        dropped = 'graphkiln_record_dropped_total{instance="digits_0",model="digits",version="1"}'
        server.wait_until(lambda: server.metrics().get(dropped, 0) > 300, timeout_s=60)
        assert server.stop()[0] == 0
        lines = [line for line in server.log.splitlines() if "not recorded" in line]
        assert len(lines) == 1, server.log
        assert FAULTS[kind] in lines[0]
        assert [path for path in record.rglob("*") if path.is_file()] == []


def test_killed_instances(start_server: StartServer, store: Path, tmp_path: Path) -> None:
    """A killed instance loses its unfinished file, whose remains the next one removes."""
    server = start_server("--model-store", store, "--record", tmp_path / "r", "--record-share", "100%")
    for _ in range(3):
        server.wait_ready()
        with Client(server.url, max_retries=0) as client:
            model, partial = client.model("digits"), set(unfinished(tmp_path / "r"))
            while set(unfinished(tmp_path / "r")) <= partial:  # after 1 MB
                for image in inputs(100):
                    model.infer({"INPUT_0": image})
        os.kill(stub(server).pid, signal.SIGKILL)
        server.wait_until(lambda: not _answers(server), timeout_s=60)
        assert len(unfinished(tmp_path / "r")) == 1
    server.wait_until(lambda: _answers(server))
    assert server.stop()[0] == 0
    assert unfinished(tmp_path / "r") == []
    found = rows(tmp_path / "r")
    assert found
    assert max(Counter(row.request_id for row in found).values()) == 1
    assert replayed(tmp_path / "r", store / "digits")[0] == 0


def unfinished(record: Path) -> list[str]:
    return [path.name for path in record.glob("*/.*")]


def _answers(server: Server) -> bool:
    try:
        with Client(server.url, max_retries=0) as client:
            client.model("digits").infer({"INPUT_0": next(inputs(1))})
    except ClientError:
        return False
    return True
