"""A part of a benchmark in a process of its own: one that hangs or dies is an error with its name.

What a runtime waits for in its own code nobody can interrupt from outside but by ending the process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from measurement import listen_to_progress

from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError
from graphkiln_backend.lowering.parentage import worker

STEP_LIMIT_S = 900.0
"""Of what a part says that it does: a minute is usual on a machine that others use, too."""

_AT, _DONE, _FAILED = "at", "done", "failed"


def measure_apart(name: str, measure: Callable[[], Any], limit_s: float = STEP_LIMIT_S) -> Any:
    """Measures a part in a process of its own, and follows what it says that it does (`show_progress`).

    Args:
        name: Of the part, for errors.
        measure: What can be pickled; so can what it returns.
        limit_s: Of each step.

    Raises:
        MeasurementError: A step did not end within the limit, the process died in one, or an error was raised.
    """
    with worker(_measure, measure) as (receiver, process):
        step = "its start"
        while True:
            if not receiver.poll(limit_s):
                raise MeasurementError(f"{name}: '{step}' did not end within {limit_s:g} s, and was ended")
            try:
                kind, value = receiver.recv()
            except (EOFError, OSError) as error:
                process.join()
                raise MeasurementError(f"{name}: its process ended in '{step}', code {process.exitcode}") from error
            if kind == _FAILED:
                raise MeasurementError(f"{name}: {value}")
            if kind == _DONE:
                return value
            step = value or step


def _measure(sender: Connection, measure: Callable[[], Any]) -> None:
    """The process."""
    listen_to_progress(lambda text: sender.send((_AT, text)))
    try:
        sender.send((_DONE, measure()))
    except GraphkilnError as error:
        sender.send((_FAILED, str(error)))
    except Exception as error:  # noqa: BLE001 - the parent raises it, whatever it is
        sender.send((_FAILED, "".join(traceback.format_exception(error)).strip()))
