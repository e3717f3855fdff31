"""Engines: there, missing, broken."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphkiln.doctor import models as module
from graphkiln.doctor.finding import Level, Request
from graphkiln.doctor.models import check_engines, find_engine, read_probe, start_probe


def run(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_one_that_can_run_names_its_version_and_devices() -> None:
    found = find_engine("openvino", "2026.4", {"cpu": "", "gpu:0": "no"}, "")
    assert (found.level, found.message) == (Level.OK, "2026.4 on cpu")
    assert found.facts["reason"] == "no"


def test_one_that_is_not_installed_says_what_brings_it() -> None:
    reason = "engine 'openvino' is known but its runtime is not installed (pip install 'graphkiln[openvino]')"
    found = find_engine("openvino", "", {}, reason)
    assert found.level is Level.OK
    assert "graphkiln[openvino]" in found.message


def test_one_that_is_broken_is_a_warning_and_onnx_runtime_an_error() -> None:
    assert find_engine("openvino", "1", {}, "ends its process when it is loaded (SIGILL)").level is Level.WARNING
    found = find_engine("onnxruntime", "", {}, "its runtime is not installed")
    assert found.level is Level.ERROR
    assert "graphkiln[serve]" in found.hint


def test_one_without_a_device_here_is_no_fault() -> None:
    assert find_engine("tensorrt", "", {"cpu": "tensorrt serves gpu:N, not cpu"}, "").level is Level.OK
    assert "no device" in find_engine("tensorrt", "", {}, "").message


def test_the_engine_of_this_machine() -> None:
    devices, reason = read_probe(start_probe("onnxruntime"))
    assert (devices["cpu"], reason) == ("", "")


def test_all_engines_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {each.subject: each for each in check_engines(Request())}
    assert set(found) == {"onnxruntime", "openvino", "tensorrt"}
    assert found["onnxruntime"].facts["devices"] == ["cpu"]
    monkeypatch.setattr(module, "_GROUP", "graphkiln.none")
    (none,) = check_engines(Request())
    assert none.level is Level.ERROR


def test_one_that_nobody_knows() -> None:
    devices, reason = read_probe(start_probe("onnxruntim"))
    assert devices == {}
    assert "unknown engine" in reason


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 4)", "ends its process when it is loaded (SIGILL)"),
        ("import os; os.kill(os.getpid(), 40)", "ends its process when it is loaded (signal 40)"),
        ("raise OSError('libfoo.so: undefined symbol')", "OSError: libfoo.so: undefined symbol"),
        ("", "no output"),
        ("print('[]')", "no output"),
    ],
)
def test_a_runtime_that_takes_its_process_along_takes_no_more(code: str, words: str) -> None:
    devices, reason = read_probe(run(code))
    assert devices == {}
    assert words in reason


def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)
    process = run("import time; time.sleep(60)")
    assert read_probe(process) == ({}, "hangs when it is loaded (0.2 s)")
    assert process.returncode == -9
