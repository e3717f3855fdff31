"""One segment of measured work: requests from so many callers for so many seconds."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What was seen.

    Attributes:
        per_second: Images answered per second, between two answers: what had begun before the first one, or came
            after the time was over, does not count.
        latencies_ms: Of every image, from the JPEG to the answer.
        seconds: How long it all took, the last answers included.
        images: All that were answered.
    """

    per_second: float
    latencies_ms: tuple[float, ...]
    seconds: float
    images: int


def run_segment(ask: Callable[[bytes], object], callers: int, jpegs: Sequence[bytes], seconds: float) -> Segment:
    """Answers images again and again; each caller takes the next one when it has its answer.

    Args:
        ask: Answers one image.
        callers: How many ask at the same time.
        jpegs: The images.
        seconds: How long new ones are taken; at least one is answered by each caller.
    """
    spans: list[tuple[float, float]] = []
    failures: list[BaseException] = []
    images = itertools.cycle(jpegs)
    taking = threading.Lock()
    begun = time.perf_counter()

    def work() -> None:
        try:
            while True:
                with taking:
                    jpeg = next(images)
                start = time.perf_counter()
                ask(jpeg)
                spans.append((start, time.perf_counter()))
                if failures or time.perf_counter() - begun >= seconds:
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised below, in the thread that waits
            failures.append(error)

    if callers == 1:
        work()  # here: in threads of one's own glibc's allocator is slower, by a quarter for eager PyTorch
    else:
        _run_threads([threading.Thread(target=work) for _ in range(callers)])
    if failures:
        raise failures[0]
    done = sorted(end for _, end in spans)
    return Segment(
        per_second=_rate(begun, done, callers, begun + seconds),
        latencies_ms=tuple((end - start) * 1e3 for start, end in spans),
        seconds=done[-1] - begun,
        images=len(done),
    )


def _run_threads(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _rate(begun: float, done: Sequence[float], callers: int, deadline: float) -> float:
    """Answers per second while all callers were busy.

    One caller is busy all the time. Of several, the first answers come while the pipeline fills, the last ones while it
    runs empty: both ends are left out, and the time counts from answer to answer, so that a batch is never cut.
    """
    whole = len(done) / (done[-1] - begun)
    if callers == 1:
        return whole
    inside = [moment for moment in done[callers:] if moment <= deadline]
    first = done[callers - 1]
    return len(inside) / (inside[-1] - first) if inside and inside[-1] > first else whole
