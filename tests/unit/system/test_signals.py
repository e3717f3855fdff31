"""Stop signals: counting, waiting and interrupting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from graphkiln_backend.system import signals as module
from graphkiln_backend.system.signals import Interrupted, Stopped, StopSignals, ending_on_signals, stopping_in_order

pytestmark = pytest.mark.alone


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    with StopSignals() as signals:
        yield signals


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def ended() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended and was not waited for."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock that returns the last value of the list."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[-1])
    return now


def test_signals_close_together_count_as_one(signals: StopSignals, clock: list[float]) -> None:
    """`timeout` signals the process and then its group."""
    send()
    clock.append(0.01)
    send()
    assert signals.count == 1
    clock.append(1.0)
    send()
    assert signals.count == 2


def test_signal_before_the_wait_ends_it_once(signals: StopSignals) -> None:
    send()
    send()
    begun = time.monotonic()
    signals.wait([], 30)
    assert time.monotonic() - begun < 15
    begun = time.monotonic()
    signals.wait([], 0.1)
    assert time.monotonic() - begun >= 0.1


def test_end_of_any_process_ends_the_wait(signals: StopSignals, ended: subprocess.Popen[bytes]) -> None:
    begun = time.monotonic()
    signals.wait([os.getpid(), ended.pid], 30)
    assert time.monotonic() - begun < 15


def test_wait_with_too_many_open_files(signals: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    begun = time.monotonic()
    signals.wait([os.getpid(), os.getpid()], 0.1)
    assert 0.1 <= time.monotonic() - begun < 15


def test_signal_interrupts_an_interrupting_block(signals: StopSignals) -> None:
    def work() -> None:
        with signals.interrupting():
            send()
            time.sleep(40)

    begun = time.monotonic()
    with pytest.raises(Interrupted):
        work()
    assert time.monotonic() - begun < 15
    assert signals.count == 1


def test_signal_before_an_interrupting_block_interrupts_it(signals: StopSignals) -> None:
    send()
    with pytest.raises(Interrupted), signals.interrupting():
        time.sleep(40)


def test_only_the_first_signal_interrupts(signals: StopSignals, clock: list[float]) -> None:
    cleaned: list[str] = []

    def work() -> None:
        with signals.interrupting():
            try:
                send()
            finally:
                clock.append(1.0)
                send()
                cleaned.append("to the end")

    with pytest.raises(Interrupted):
        work()
    assert cleaned == ["to the end"]
    assert signals.count == 2


def test_previous_handlers_are_restored() -> None:
    received: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with StopSignals() as signals:
            send()
            assert received == []
        send()
        assert signals.count == 1
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is interrupt
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, old)


@pytest.mark.parametrize(("before", "taken"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_sighup_stays_ignored_under_nohup(before: signal.Handlers, taken: bool) -> None:
    outer = signal.signal(signal.SIGHUP, before)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.count == taken
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, outer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_during_startup_exits_with_code_0(number: int) -> None:
    outer = signal.signal(number, signal.SIG_DFL)  # `nohup` has SIGHUP ignored
    try:
        with pytest.raises(SystemExit) as ended, ending_on_signals():
            signal.raise_signal(number)
        assert ended.value.code == 0
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, outer)


@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_command_is_stopped_once(number: int, code: int) -> None:
    before = signal.getsignal(number)
    given_back: list[str] = []

    def work() -> None:
        with stopping_in_order():
            try:
                send(number)
            finally:
                send(number)
                given_back.append("all")

    with pytest.raises(Stopped) as raised:
        work()
    assert isinstance(raised.value, KeyboardInterrupt)
    assert raised.value.exit_code == code
    assert given_back == ["all"]
    assert signal.getsignal(number) == before
