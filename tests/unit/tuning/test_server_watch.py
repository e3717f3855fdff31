"""What a server's processes do to the machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln.tuning.measure import CpuTime, Placed, ServerWatch, parse_placement, read_placement
from graphkiln_backend.graph.errors import MeasurementError

METRICS = """# HELP graphkiln_instance_info What the instance serves with
graphkiln_instance_info{device="cpu",engine="openvino",instance="m_0_0",model="m",precision="bf16",version="1"} 1.000000
graphkiln_instance_info{device="cpu",engine="openvino",instance="m_0_1",model="m",precision="fp32",version="1"} 1
graphkiln_instance_info{device="cpu",engine="onnxruntime",instance="n",model="n",precision="fp32",version="1"} 1
nv_inference_count{model="m",version="1"} 7
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["bash", "-c", "exec -a tritonserver sleep 60"])
time.sleep(0.2); print(child.pid, flush=True)
try: time.sleep(60)
finally: child.kill()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()
        if process.stdout:
            process.stdout.close()


def test_each_instance_says_what_it_serves_with() -> None:
    assert parse_placement(METRICS, "m") == (
        Placed(engine="openvino", precision="bf16", device="cpu"),
        Placed(engine="openvino", precision="fp32", device="cpu"),
    )
    assert parse_placement(METRICS, "other") == ()
    assert str(parse_placement(METRICS, "n")[0]) == "onnxruntime on cpu in fp32"


def test_a_server_that_does_not_tell_is_an_error() -> None:
    with pytest.raises(MeasurementError, match="metrics cannot be read"):
        read_placement("http://127.0.0.1:9/metrics", "m")


def test_memory_and_cpu_time_are_those_of_the_whole_family(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout
    child = int(parent.stdout.readline())
    watch = ServerWatch(parent.pid)
    memory = watch.memory_bytes()
    pss = sum(_pss(pid) for pid in (parent.pid, child))
    assert memory == pytest.approx(pss, rel=0.3)
    assert watch.cpu_s() > 0
    assert watch.death() == ""


def test_a_process_that_dies_is_named(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout
    child = int(parent.stdout.readline())
    watch = ServerWatch(parent.pid)
    subprocess.run(["kill", "-9", str(child)], check=True)
    end = time.monotonic() + 10
    while not watch.death() and time.monotonic() < end:
        time.sleep(0.01)
    assert watch.death() == "tritonserver was killed or crashed"
    parent.kill()
    parent.wait()
    assert watch.death() == "the server ended"


def test_cores_are_seconds_by_seconds() -> None:
    begin, end = CpuTime(moment_s=10, cpu_s=5), CpuTime(moment_s=14, cpu_s=11)
    assert begin.cores_until(end) == 1.5
    assert end.cores_until(begin) == 0


def _pss(pid: int) -> int:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) << 10
