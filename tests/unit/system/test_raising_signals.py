"""Signals raised as exceptions, once per stack of blocks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from graphkiln_backend.system.signals import raising_once

SIGNALS = [signal.SIGUSR1, signal.SIGHUP]
pytestmark = pytest.mark.usefixtures("hangup_ends")


class Signalled(Exception):
    """A signal arrived."""


@pytest.fixture
def hangup_ignored(hangup_ends: None) -> Iterator[None]:  # noqa: ARG001 - after it
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def send_signals(number: signal.Signals) -> None:
    """Send a signal, and more during the cleanup."""
    try:
        os.kill(os.getpid(), number)
    finally:
        for each in SIGNALS:
            os.kill(os.getpid(), each)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_raises_once_and_handlers_are_restored(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(Signalled) as caught, raising_once(SIGNALS, Signalled):
        send_signals(number)
    assert caught.value.args == (number,)
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.usefixtures("hangup_ignored")
def test_ignored_hangup_stays_ignored() -> None:
    with raising_once(SIGNALS, Signalled):
        os.kill(os.getpid(), signal.SIGHUP)


def test_other_threads_install_no_handlers() -> None:
    found: list[object] = []

    def work() -> None:
        with raising_once(SIGNALS, Signalled):
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


@pytest.mark.parametrize("number", SIGNALS)
def test_nested_blocks_raise_once(number: signal.Signals) -> None:
    """A second Ctrl-C does not disturb the cleanup of the outer block."""
    before = [signal.getsignal(each) for each in SIGNALS]
    cleaned: list[bool] = []

    def work() -> None:
        with raising_once(SIGNALS, Signalled):
            try:
                interrupted(number)
            finally:
                for each in SIGNALS:
                    os.kill(os.getpid(), each)
                cleaned.append(True)

    with pytest.raises(Signalled) as caught:
        work()
    assert (caught.value.args, cleaned) == ((number,), [True])
    assert [signal.getsignal(each) for each in SIGNALS] == before


def interrupted(number: signal.Signals) -> None:
    """A nested block in which a library replaces a handler."""
    with raising_once(SIGNALS, Signalled):
        signal.signal(SIGNALS[0], signal.default_int_handler)
        with raising_once(SIGNALS, Signalled):
            send_signals(number)


def test_inner_block_without_signal_keeps_the_outer_one() -> None:
    def work() -> None:
        with raising_once(SIGNALS, Signalled):
            with raising_once(SIGNALS, Signalled):
                pass
            os.kill(os.getpid(), SIGNALS[0])

    with pytest.raises(Signalled):
        work()
