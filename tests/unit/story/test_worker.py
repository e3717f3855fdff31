"""The process of a variant, and its faults."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from stories import JPEGS

from graphkiln.story.worker import Worker
from graphkiln.story.workloads.session import SessionWorkload
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.repository.version import read_version


def test_a_process_that_is_killed_is_told_by_its_step(digits: Path) -> None:
    spec = read_version(digits / "1").manifest
    assert spec is not None
    assert spec.preprocess is not None
    workload = SessionWorkload(graph=digits / "1" / "model.onnx", preprocess=spec.preprocess, device=CPU)
    with Worker(workload, "2: reduced") as worker:
        psutil.Process(worker.pid).kill()
        with pytest.raises(MeasurementError, match=r"process of '2: reduced' ended with code -9 .*--resume"):
            worker.predict(JPEGS)
