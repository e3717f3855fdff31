"""When a process of a server was started is known to a hundredth of a second."""

from __future__ import annotations

import subprocess
import sys
import time

from start_speed import _begun


def test_a_process_began_after_it_was_asked_for() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            after = time.time()
            assert before - 0.05 <= _begun(process.pid) <= after + 0.05
        finally:
            process.kill()
