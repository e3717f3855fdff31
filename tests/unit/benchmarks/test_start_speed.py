"""When a process of a server was started is known to a hundredth of a second."""

from __future__ import annotations

import subprocess
import sys
import time

from start_speed import _begun, _median_first, _Start


def test_a_process_began_after_it_was_asked_for() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            after = time.time()
            assert before - 0.05 <= _begun(process.pid) <= after + 0.05
        finally:
            process.kill()


def test_one_request_that_is_held_up_is_not_the_worst_size() -> None:
    rounds = [_Start(first={("m", 1): slow, ("m", 2): 1.4}) for slow in (30.0, 1.1, 1.0)]
    assert _median_first({"digits, warm": rounds}, "digits, warm") == 1.4
