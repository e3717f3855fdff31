"""How far a worker has come, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from graphkiln_backend.scoring.outcomes import Progress

PROGRAM = """
import os, signal, sys
from graphkiln_backend.scoring.outcomes import Progress
track = Progress(int(sys.argv[1])).track(7)
track.reach(12)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_outlives_the_process_that_wrote_it() -> None:
    progress = Progress.create()
    before = progress.counter
    command = [sys.executable, "-c", PROGRAM, str(progress.descriptor)]
    assert subprocess.run(command, pass_fds=[progress.descriptor], check=False).returncode == -signal.SIGKILL
    assert (progress.reached, progress.committing) == ({7: 12}, frozenset())
    assert progress.counter != before
    progress.close()


def test_an_attempt_that_is_over_leaves_its_place_to_another() -> None:
    progress = Progress.create()
    for number in range(1, 40):
        with progress.track(number) as first, progress.track(number + 100) as second:
            first.reach(3)
            second.commit()
            assert progress.reached == {number: 3, number + 100: 0}
            assert progress.committing == {number + 100}
    assert progress.reached == {}
    del first, second
    progress.close()


def test_closing_gives_the_descriptor_back() -> None:
    progress = Progress.create()
    descriptor = progress.descriptor
    progress.close()
    try:
        os.fstat(descriptor)
    except OSError:
        return
    raise AssertionError("it is open still")
