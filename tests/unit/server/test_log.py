"""Lines of a service's log as JSON: Triton's, its instances', the supervisor's, and unformatted text."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.text import request_prefix
from graphkiln_backend.server.log import LogRecord, NoiseFilter, of_event, of_line

SHORT = "W1123 08:46:10.123456 4711 model.py:29] "
ISO = "2026-11-23T08:46:10Z E 4711 server.cc:604] "


def test_a_line_of_triton() -> None:
    assert of_line(ISO + json.dumps("no port\n\tis free")) == LogRecord(
        message="no port", details="\tis free", level="error", source="triton", location="server.cc:604"
    )


def test_the_request_that_triton_names() -> None:
    record = of_line(SHORT + json.dumps("[request id: seven] cannot be queued"))
    assert (record.request_id, record.message, record.source) == ("seven", "cannot be queued", "triton")
    assert of_line(SHORT + json.dumps("[request id: <id_unknown>] x")).request_id == ""


def test_a_line_of_an_instance_and_its_traceback() -> None:
    text = "graphkiln: digits: " + request_prefix('odd"] id') + "a request failed\nTraceback\n  File"
    assert of_line(SHORT + json.dumps(text)) == LogRecord(
        message="a request failed", details="Traceback\n  File", level="warning", model="digits", request_id='odd"] id'
    )


@given(name=st.text(min_size=1), message=st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])))
def test_any_id_comes_back_and_forges_nothing(name: str, message: str) -> None:
    read = of_line(SHORT + json.dumps(f"graphkiln: m: {request_prefix(name)}{message}"))
    assert (read.request_id, read.message, read.model) == (name, message, "m")


def test_a_message_of_an_instance_that_only_looks_like_one_about_a_request() -> None:
    record = of_line(SHORT + json.dumps('graphkiln: digits: expected [request id: "x"] nowhere'))
    assert (record.request_id, record.message) == ("", 'expected [request id: "x"] nowhere')


def test_lines_of_the_command_and_unformatted_lines() -> None:
    assert of_line("graphkiln: port 8000 is in use") == LogRecord(message="port 8000 is in use")
    assert of_line("Segmentation fault") == LogRecord(message="Segmentation fault", level="warning", source="other")
    assert of_line("X1123 08:46:10.123456 4711 a.cc:1] x").source == "other"


def test_an_event_of_a_logger() -> None:
    record = logging.LogRecord("graphkiln.server", logging.ERROR, "f", 1, "%d of\n%d", (1, 2), None)
    vars(record).update(model="m", request_id="r")
    assert of_event(record) == LogRecord(message="1 of", details="2", level="error", model="m", request_id="r")


def test_an_event_with_a_traceback() -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        record = logging.LogRecord("graphkiln", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    read = of_event(record)
    assert read.message == "failed"
    assert read.details.startswith("Traceback")
    assert read.details.endswith("ZeroDivisionError: division by zero")


def test_json_has_what_there_is_on_one_line() -> None:
    now = datetime(2026, 11, 23, 8, 46, 10, 123456, UTC)
    line = LogRecord(message="\u2028 \x1b[31m", request_id="r", details="a\nb").to_json(now)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {
        "time": "2026-11-23T08:46:10.123Z",
        "level": "info",
        "source": "graphkiln",
        "message": "\u2028 \x1b[31m",
        "request_id": "r",
        "details": "a\nb",
    }


# Outputs as JSON lines: of this process, of its children, of unformatted text; restored at the end.

PROGRAM = """if True:
    import logging, os, subprocess, sys
    from graphkiln_backend.server.log import LogPipe, LogPipeHandler
    from graphkiln_backend.server.log import LogRecord
"""


def run(body: str, stderr: Any = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return subprocess.run([sys.executable, "-c", PROGRAM + lines], stdout=subprocess.PIPE, stderr=stderr, check=False)


def test_everything_is_a_json_line_and_then_nothing_is() -> None:
    done = run(
        """with LogPipe() as pipe:
    logger = logging.getLogger("graphkiln.x")
    logger.addHandler(LogPipeHandler(pipe))
    logger.error("%s went wrong", "all")
    pipe.write(LogRecord(message="said"))
    print("printed", file=sys.stderr)
    print("standard output")
    subprocess.run(["sh", "-c", "echo child >&2"])
    os.write(2, b"\\xff\\n\\n" + b"x" * 70000 + b"\\nno end")
print("plain", file=sys.stderr)"""
    )
    assert done.stdout == b""
    *wrapped, plain = done.stderr.decode().splitlines()
    assert plain == "plain"
    records = [json.loads(line) for line in wrapped]
    found = {record["message"][:20]: record for record in records}
    assert set(found) == {
        "all went wrong",
        "said",
        "printed",
        "standard output",
        "child",
        "\\xff",
        "x" * 20,
        "no end",
    } | {text for text in found if set(text) == {"x"}}
    assert found["all went wrong"]["level"] == "error"
    assert found["printed"]["source"] == "other"
    assert sum(len(record["message"]) for record in records if record["message"].startswith("xx")) == 70000


def test_a_log_on_a_full_disk_is_no_reason_to_end() -> None:
    with Path("/dev/full").open("w") as full:
        done = run(
            """with LogPipe() as pipe:
    pipe.write(LogRecord(message="lost"))
    os.write(2, b"lost\\n" * 50000)
print("alive")""",
            stderr=full,
        )
    assert done.stdout == b"alive\n"


def test_a_child_that_outlives_it_is_not_waited_for_without_end() -> None:
    done = run(
        """import graphkiln_backend.server.log as module
module._END_S = 0.1
with LogPipe():
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
child.kill()
print("over")"""
    )
    assert done.stdout == b"over\n"


# What alarms for nothing is left out; everything else is passed on.

_PROGRAM = """
import subprocess, sys
from graphkiln_backend.server.log import NoiseFilter
noise = NoiseFilter()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stderr=noise.fileno())
noise.start()
child.wait()
import threading
[thread.join() for thread in threading.enumerate() if thread.name == "noise filter"]
"""


def filtered(program: str) -> str:
    command = [sys.executable, "-c", _PROGRAM, program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr


def test_the_two_lines_are_left_out_and_nothing_else() -> None:
    lines = (
        'E1127 1 server.cc:241] "CudaDriverHelper has not been initialized."',
        'W1127 1 pinned_memory_manager.cc:170] "failed to allocate pinned system memory: no pool"',
        "E1127 1 model.cc:1] a real error",
        "no end",
    )
    program = f"import sys; sys.stderr.write({chr(10).join(lines)!r})"
    assert filtered(program) == "E1127 1 model.cc:1] a real error\nno end"


def test_a_failed_load_is_noted_and_not_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    reason = 'Internal: TritonModelException: m: \\"x\\" is bad\\n\\nAt:\\n  model.py(7): initialize\\n'
    lines = (
        f'E1128 21:32:49.026495 1 backend_model.cc:692] "ERROR: Failed to create instance: {reason}"',
        f"E1128 21:32:49.478521 1 model_lifecycle.cc:642] \"failed to load 'm' version 12: {reason}\"",
        "2026-11-28T21:32:49Z E 1 model_lifecycle.cc:642] \"failed to load 'n' version 1: no\"",
        'E1128 21:32:59.240415 1 tritonserver.cc:2607] "Internal: failed to load all models"',
        "error: creating server: Internal - failed to load all models",
        f"E1128 21:32:59.240415 1 tritonserver.cc:2607] \"Invalid argument: load failed for model 'm': {reason};\\n\"",
        "error: creating server: Invalid argument - load failed for model 'm': bad",
        "",
        "At:",
        "  model.py(7): initialize",
        ";",
        'E1128 21:32:59.240415 1 server.cc:1] "failed to load the certificate"',
    )
    failed: list[tuple[str, int, str]] = []
    for on_failed in (lambda *found: failed.append(found), None):
        noise = NoiseFilter(on_failed=on_failed)
        os.write(noise.fileno(), "".join(f"{line}\n" for line in lines).encode())
        noise.start()
        noise.wait()
        passed = capfd.readouterr().err.splitlines()
        assert passed == ([lines[-1]] if on_failed else [*lines])
    text = 'Internal: TritonModelException: m: "x" is bad\n\nAt:\n  model.py(7): initialize\n'
    assert failed == [("m", 12, text), ("n", 1, "no")]


def test_a_stub_that_ends_as_it_should_is_no_crash() -> None:
    """Since 26.04 stubs print this after their model was finalized; a fatal error while one runs is passed on."""
    finalizing = (
        "Fatal Python error: PyThreadState_Get: no thread state\\nPython runtime state: finalizing (tstate=0x1)\\n\\n"
        "Thread 0x2 (most recent call first):\\n  <no Python frame>\\n"
    )
    running = 'Fatal Python error: Aborted\\n\\nThread 0x3 (most recent call first):\\n  File "m.py", line 1 in f\\n'
    passed = filtered(f"import sys; sys.stderr.write('before\\n{finalizing}between\\n{running}')")
    assert passed == f"before\nbetween\n{running}".replace("\\n", "\n")


def test_a_line_without_an_end_is_passed_on_in_pieces() -> None:
    assert filtered("import sys; sys.stderr.write('x' * 300_000)") == "x" * 300_000
