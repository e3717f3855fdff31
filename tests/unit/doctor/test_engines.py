"""Checks of available, missing and broken engines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphkiln.doctor import engines as module
from graphkiln.doctor.engines import check_engines, find_engine, read_probe, start_probe
from graphkiln.doctor.examination import Level, Request


def run(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


NO_RUNTIME = "engine 'openvino' is known but its runtime is not installed (pip install 'graphkiln[openvino]')"


@pytest.mark.parametrize(
    ("name", "devices", "reason", "level", "words"),
    [
        ("openvino", {"cpu": "", "gpu:0": "no"}, "", Level.OK, "2026.4 on cpu"),
        ("openvino", {}, NO_RUNTIME, Level.OK, "graphkiln[openvino]"),
        ("openvino", {}, "crashes its process (SIGILL)", Level.WARNING, "SIGILL"),
        ("onnxruntime", {}, "its runtime is not installed", Level.ERROR, "graphkiln[serve]"),
        ("tensorrt", {"cpu": "tensorrt serves gpu:N, not cpu"}, "", Level.OK, "gpu:N"),
        ("tensorrt", {}, "", Level.OK, "no supported device"),
    ],
)
def test_findings(name: str, devices: dict[str, str], *, reason: str, level: Level, words: str) -> None:
    found = find_engine(name, "2026.4", devices, reason)
    assert found.level is level
    assert words in f"{found.message} {found.hint}"


def test_all_engines_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {each.subject: each for each in check_engines(Request())}
    assert set(found) == {"onnxruntime", "openvino", "tensorrt"}
    assert found["onnxruntime"].facts["devices"] == ["cpu"]
    monkeypatch.setattr(module, "_GROUP", "graphkiln.none")
    (none,) = check_engines(Request())
    assert none.level is Level.ERROR


def test_probes_of_this_machine() -> None:
    known, unknown = start_probe("onnxruntime"), start_probe("onnxruntim")
    devices, reason = read_probe(known)
    assert (devices["cpu"], reason) == ("", "")
    devices, reason = read_probe(unknown)
    assert devices == {}
    assert "unknown engine" in reason


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 4)", "crashes its process when loaded (SIGILL)"),
        ("import os; os.kill(os.getpid(), 40)", "crashes its process when loaded (signal 40)"),
        ("raise OSError('libfoo.so: undefined symbol')", "OSError: libfoo.so: undefined symbol"),
        ("", "no output"),
        ("print('[]')", "no output"),
    ],
)
def test_broken_runtimes(code: str, words: str) -> None:
    devices, reason = read_probe(run(code))
    assert devices == {}
    assert words in reason


def test_hanging_runtime_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)
    process = run("import time; time.sleep(60)")
    assert read_probe(process) == ({}, "hangs when loaded (0.2 s)")
    assert process.returncode == -9
