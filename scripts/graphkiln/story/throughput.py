"""Throughput and latencies of a function that classifies images, under a number of concurrent callers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """One measurement.

    Attributes:
        per_second: Images per second, counted from completion to completion: the images that were under way before the
            first one, or completed after the deadline, do not count.
        latencies_ms: Of every image, from the JPEG to the outputs.
        seconds: Duration of the whole measurement, the last images included.
        images: Number of all images.
    """

    per_second: float
    latencies_ms: tuple[float, ...]
    seconds: float
    images: int


def measure_throughput(
    predict: Callable[[bytes], object], callers: int, jpegs: Sequence[bytes], seconds: float
) -> Throughput:
    """Calls a function again and again; each caller takes the next image when its own is done.

    Args:
        predict: Takes one image; called from `callers` threads.
        callers: Concurrent callers.
        jpegs: The images, taken in turn.
        seconds: How long new images are taken; each caller takes at least one.

    Raises:
        BaseException: Whatever `predict` raised first; all callers stop then.
    """
    spans: list[tuple[float, float]] = []
    failures: list[BaseException] = []
    images = itertools.cycle(jpegs)
    images_lock = threading.Lock()
    begun = time.perf_counter()

    def work() -> None:
        try:
            while True:
                with images_lock:
                    jpeg = next(images)
                start = time.perf_counter()
                predict(jpeg)
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
    completions = sorted(end for _, end in spans)
    return Throughput(
        per_second=_rate(begun, completions, callers, begun + seconds),
        latencies_ms=tuple((end - start) * 1e3 for start, end in spans),
        seconds=completions[-1] - begun,
        images=len(completions),
    )


def _run_threads(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _rate(begun: float, completions: Sequence[float], callers: int, deadline: float) -> float:
    """Images per second while all callers were busy.

    One caller is busy all the time. Of several, the first images complete while the pipeline fills, the last ones while
    it runs empty: both ends are left out, and the time counts from completion to completion, so that a batch is never
    cut. Where less than a third of the measurement is left of it, all of it counts: the images of one batch complete
    together, which says nothing of a rate.
    """
    whole = len(completions) / (completions[-1] - begun)
    if callers == 1:
        return whole
    first, least = completions[callers - 1], (deadline - begun) / 3
    inside = [moment for moment in completions[callers:] if moment <= deadline]
    return len(inside) / (inside[-1] - first) if inside and inside[-1] - first >= least else whole
