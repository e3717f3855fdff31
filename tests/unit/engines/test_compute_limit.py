"""The limit on one computation of a command."""

from __future__ import annotations

import _thread
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
import zoo

from graphkiln_backend.engines.compute_limit import ComputeLimit, ComputeLimitExceeded, current_limit, limit_computing
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_converters.sources.onnx_file import ReferenceSession

FEEDS = {"x": np.zeros((2, 3), np.float32)}


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A graph with a loop that never ends."""
    onnx.save(zoo.endless(), tmp_path / "endless.onnx")
    return tmp_path / "endless.onnx"


def test_endless_loop_in_onnx_runtime(endless: Path) -> None:
    with OnnxRuntimeEngine().build_reference(endless) as unlimited:
        assert unlimited.signature.inputs[0].name == "x"
    attempts: list[float] = []

    def run() -> None:
        with limit_computing(0.3), OnnxRuntimeEngine().build_reference(endless) as session:
            for _ in range(2):
                with suppress(ComputeLimitExceeded):
                    session.run(FEEDS)
                attempts.append(time.monotonic())
            session.run(FEEDS)

    with pytest.raises(ExecutionError, match=r"not computed within 0.3 s \(--compute-limit\)"):
        run()
    assert attempts[1] - attempts[0] < 0.2
    assert current_limit() is None


@pytest.mark.alone
def test_endless_loop_in_the_reference_implementation(endless: Path) -> None:
    with pytest.raises(ExecutionError, match="--compute-limit"), limit_computing(0.3):
        ReferenceSession.open(endless).run(FEEDS)


def test_uninterruptible_runtime_ends_the_process() -> None:
    messages: list[str] = []
    ended = threading.Event()

    def give_up(message: str) -> None:
        messages.append(message)
        ended.set()

    limit = ComputeLimit(0.1, give_up, grace_s=0.1)

    def compute() -> None:
        with limit.computation(lambda: None):
            ended.wait(30)
            raise ValueError

    limit.begin()
    with pytest.raises(ComputeLimitExceeded):
        compute()
    limit.end()
    assert messages[0].startswith("one batch was not computed within 0.1 s")
    assert messages[0].endswith("the runtime cannot be interrupted")


@pytest.mark.alone
def test_interrupted_main_thread_is_not_ctrl_c() -> None:
    def compute() -> None:
        with limit_computing(0.1):
            limit = current_limit()
            assert limit
            with limit.computation(_thread.interrupt_main):
                while True:
                    time.sleep(0.01)

    with pytest.raises(ExecutionError, match="--compute-limit"):
        compute()
