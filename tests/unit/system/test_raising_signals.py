"""Signals as errors: once, and not where `nohup` asked for peace."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from graphkiln_backend.system.signals import raising_once

SIGNALS = [signal.SIGUSR1, signal.SIGHUP]
pytestmark = pytest.mark.usefixtures("hangup_ends")


class Asked(Exception):
    """A signal came."""


@pytest.fixture
def hangup_ignored(hangup_ends: None) -> Iterator[None]:  # noqa: ARG001 - after it
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def be_asked(number: signal.Signals) -> None:
    """A signal comes, and others while what is open is given back."""
    try:
        os.kill(os.getpid(), number)
    finally:
        for each in SIGNALS:
            os.kill(os.getpid(), each)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_once_and_handlers_are_given_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(Asked) as caught, raising_once(SIGNALS, Asked):
        be_asked(number)
    assert caught.value.args == (number,)
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.usefixtures("hangup_ignored")
def test_an_ignored_hangup_stays_ignored() -> None:
    with raising_once(SIGNALS, Asked):
        os.kill(os.getpid(), signal.SIGHUP)


def test_another_thread_handles_none() -> None:
    found: list[object] = []

    def work() -> None:
        with raising_once(SIGNALS, Asked):
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


@pytest.mark.parametrize("number", SIGNALS)
def test_of_blocks_within_each_other_one_raises_once(number: signal.Signals) -> None:
    """Whoever presses Ctrl-C twice does not disturb what the outer block gives back."""
    before = [signal.getsignal(each) for each in SIGNALS]
    cleaned: list[bool] = []

    def work() -> None:
        with raising_once(SIGNALS, Asked):
            try:
                interrupted(number)
            finally:
                for each in SIGNALS:
                    os.kill(os.getpid(), each)
                cleaned.append(True)

    with pytest.raises(Asked) as caught:
        work()
    assert (caught.value.args, cleaned) == ((number,), [True])
    assert [signal.getsignal(each) for each in SIGNALS] == before


def interrupted(number: signal.Signals) -> None:
    """A block within another, in which a library puts in a handler of its own."""
    with raising_once(SIGNALS, Asked):
        signal.signal(SIGNALS[0], signal.default_int_handler)
        with raising_once(SIGNALS, Asked):
            be_asked(number)


def test_a_block_in_which_nothing_came_leaves_the_outer_one_ready() -> None:
    def work() -> None:
        with raising_once(SIGNALS, Asked):
            with raising_once(SIGNALS, Asked):
                pass
            os.kill(os.getpid(), SIGNALS[0])

    with pytest.raises(Asked):
        work()
