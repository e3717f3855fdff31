"""Two alarming lines of Triton's log are left out where no GPU is asked for; everything else is passed on."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_line_without_an_end_is_passed_on_in_pieces() -> None:
    assert filtered("import sys; sys.stderr.write('x' * 300_000)") == "x" * 300_000
