"""The soak and the fuzzer for some seconds: every answer right, nothing lost, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from soaking.fuzz import fuzz, fuzz_failures, fuzz_to_text
from soaking.report import failures, to_text, total
from soaking.service import MARKER
from soaking.soak import soak

pytestmark = [pytest.mark.server, pytest.mark.slow]


def processes_of_soaks() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if MARKER in process.environ():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_soak_without_the_heavy_faults() -> None:
    results = soak(0.6, 7, heavy=False)
    assert failures(results) == [], to_text(results)
    for result in results:
        assert result.injections
        assert total(result.counts.values())["right"] > 100
        assert len(result.counts) >= 14, "some kind of client has not sent"


def test_fuzzer() -> None:
    result = fuzz(300, 7)
    assert fuzz_failures(result) == [], fuzz_to_text(result)
    assert result.sent.total() >= 200
    assert len(result.sent) == 6, "some strategy was not used"


def test_a_killed_soak_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    soaking = subprocess.Popen(
        [sys.executable, "-m", "soaking", "--minutes", "5"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    own = str(tmp_path)
    try:
        while not any("tritonserver" in process.name() for process in _of(own)):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        os.killpg(soaking.pid, signal.SIGKILL)
        soaking.wait()
    while _of(own) or list(tmp_path.glob("soak-*")):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _of(folder: str) -> list[psutil.Process]:
    """Find the processes of the soaks in a folder."""
    found = []
    for process in processes_of_soaks():
        try:
            if process.environ()[MARKER].startswith(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found
