"""Parts of benchmarks that hang, die or fail in their own process: errors with a name."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest
from apart import measure_apart
from measurement import show_progress

from graphkiln_backend.graph.errors import MeasurementError

pytestmark = pytest.mark.slow  # each starts an interpreter: a second on a busy machine
LONG_S = 120.0


def behave(how: str) -> int:
    show_progress("round 1/2: a peer")
    show_progress("")
    if how == "hangs":
        threading.Event().wait(LONG_S)  # as what waits in native code, which no signal of Python's reaches
    if how == "dies":
        os._exit(7)
    if how == "fails":
        raise MeasurementError("it cannot", hint="use another")
    if how == "breaks":
        raise ZeroDivisionError("a bug")
    return 42


def test_what_it_measured_comes_back() -> None:
    assert measure_apart("resnet50", partial(behave, "works")) == 42


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", r"^resnet50: its process ended in 'round 1/2: a peer', code 7"),
        ("fails", r"^resnet50: it cannot .*use another"),
        ("breaks", r"^resnet50: Traceback[\s\S]*ZeroDivisionError: a bug"),
    ],
)
def test_what_goes_wrong_is_told_with_the_name(how: str, words: str) -> None:
    with pytest.raises(MeasurementError, match=words):
        measure_apart("resnet50", partial(behave, how))


def test_a_part_that_hangs_is_ended_and_named_by_its_step() -> None:
    """The limit holds from step to step: the process itself takes longer to start on a busy machine."""
    with pytest.raises(MeasurementError, match=r"resnet50: '(its start|round 1/2: a peer)' did not end within 8 s"):
        measure_apart("resnet50", partial(behave, "hangs"), 8.0)
