"""Signals end a run in order."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading

import pytest

from graphkiln_backend.scoring.driver import interruptible
from graphkiln_backend.scoring.errors import RunInterrupted, StoreError

PROGRAM = """
import signal, sys
from graphkiln_backend.scoring.errors import RunInterrupted
from graphkiln_backend.scoring.driver import interruptible
number = signal.Signals(int(sys.argv[1]))
before = signal.getsignal(number)
try:
    with interruptible():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            print("cleaned up")
except RunInterrupted as error:
    print(error, error.exit_code, signal.getsignal(number) == before)
"""


@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_block_once_and_says_how_to_go_on(number: signal.Signals, status: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(int(number))]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    message = f"ended by {number.name} (what was committed stays; run the same command to go on) {status} True"
    assert told.splitlines() == ["cleaned up", message]


def test_nohup_is_heeded() -> None:
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROGRAM
    command = [sys.executable, "-c", program, str(int(signal.SIGHUP))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "cleaned up\n"


def test_another_thread_than_the_main_one_is_left_alone() -> None:
    entered = threading.Event()

    def block() -> None:
        with interruptible():
            entered.set()

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert entered.is_set()
    assert RunInterrupted(signal.SIGTERM).exit_code == 143


def test_a_signal_within_compiled_code_is_told_as_one() -> None:
    """Ray's `wait` returns although the handler raised; the interpreter then raises this."""
    with pytest.raises(RunInterrupted), interruptible():
        raise SystemError("returned a result with an exception set") from RunInterrupted(signal.SIGTERM)
    with pytest.raises(SystemError, match="another"), interruptible():
        raise SystemError("another")


# What can go wrong with a whole data set.


def test_a_run_that_is_ended_exits_as_a_shell_tells_it() -> None:
    found = [(RunInterrupted(number).exit_code, str(RunInterrupted(number))) for number in (signal.SIGINT, 15)]
    assert [status for status, _ in found] == [130, 143]
    assert found[1][1].startswith("ended by SIGTERM (what was committed stays; run the same command")


def test_an_error_of_a_worker_keeps_what_it_says_on_its_way() -> None:
    error = pickle.loads(pickle.dumps(StoreError("the disk is full", hint="free some", passing=True)))  # noqa: S301
    assert (str(error), error.passing) == ("the disk is full (free some)", True)
