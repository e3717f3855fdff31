"""Compare the run times of sessions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

_ROUNDS = 3
_MOST_ROUNDS = 100
_LONG_S = 1.0  # further rounds follow until this total time
_TURN_S = 0.03  # duration of a turn of short runs, so that each session has its data in the CPU caches
_WAIT_S = 5e-3
_MOST_WAITS = 40
_NOISE = 1.025  # times within this factor count as equal


def fastest_runs_s(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds of the fastest run of each session. Sessions take turns, so that other load affects all alike.

    Args:
        runs: Name -> function that runs a session once.
    """
    times = dict.fromkeys(runs, math.inf)
    begun = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= _ROUNDS and time.perf_counter() - begun > _LONG_S:
            break
        for name, run in runs.items():
            times[name] = min(times[name], _turn_s(run))
    return times


def pick_fastest(times_s: Sequence[float]) -> int:
    """Return the index of the first candidate within 2.5% of the fastest, so that noise does not decide."""
    fastest = min(times_s)
    return next(index for index, seconds in enumerate(times_s) if seconds <= fastest * _NOISE)


def _turn_s(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest run of a turn."""
    _wait_for_spinning_threads()
    fastest, now = math.inf, time.perf_counter()
    end = now + _TURN_S
    while now < end:
        begun = now
        run()
        now = time.perf_counter()
        fastest = min(fastest, now - begun)
    return fastest


def _wait_for_spinning_threads() -> None:
    """Wait until this process is idle.

    Threads of ONNX Runtime (1.32) spin for 40 ms after a run, on cores that the next session needs: MobileNetV3-small
    in bf16 then takes 7.9 ms instead of 5.2 with OpenVINO, and seems slower than fp32.
    """
    for _ in range(_MOST_WAITS):
        begun = time.process_time()
        time.sleep(_WAIT_S)
        if time.process_time() - begun < _WAIT_S / 10:
            return
