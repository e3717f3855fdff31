"""Outputs as JSON lines: of this process, of its children, of what nobody formats; and given back at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    said = {record["message"][:20]: record for record in records}
    assert set(said) == {
        "all went wrong",
        "said",
        "printed",
        "standard output",
        "child",
        "\\xff",
        "x" * 20,
        "no end",
    } | {text for text in said if set(text) == {"x"}}
    assert said["all went wrong"]["level"] == "error"
    assert said["printed"]["source"] == "other"
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
