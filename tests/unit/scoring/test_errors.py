"""What can go wrong with a whole data set."""

from __future__ import annotations

import pickle
import signal

from graphkiln_backend.scoring.errors import RunInterrupted, StoreError


def test_a_run_that_is_ended_exits_as_a_shell_tells_it() -> None:
    found = [(RunInterrupted(number).exit_code, str(RunInterrupted(number))) for number in (signal.SIGINT, 15)]
    assert [status for status, _ in found] == [130, 143]
    assert found[1][1].startswith("ended by SIGTERM (what was committed stays; run the same command")


def test_an_error_of_a_worker_keeps_what_it_says_on_its_way() -> None:
    error = pickle.loads(pickle.dumps(StoreError("the disk is full", hint="free some", passing=True)))  # noqa: S301
    assert (str(error), error.passing) == ("the disk is full (free some)", True)
