"""Decode the images of several requests in threads: samples or an error for each request.

Pillow and numpy release Python's lock, so that threads use several cores. Decoding is that of `images.decoding`, like
in the client: the same bytes give the same sample.

The calling thread decodes, too, and a single image alone: if sessions keep all cores busy, handing over to another
thread would wait for a core twice.

The pixels in memory are limited to about a gigabyte: large images wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.system.closing import Closeable

_MOST_NAMED = 3  # faults in one message
_MOST_TIMES = 1 << 16  # maximum number of unread decoding times
# 5 photographs of 24 megapixels. An image takes 4 to 8 bytes per pixel; the largest, of 178 megapixels, 1.4 GB, and its
# file may be half a megabyte: one per thread could exceed the machine's memory.
_PIXELS_AT_ONCE = 1 << 27

# Samples `[images, ...]` of a request, or its error.
Samples: TypeAlias = "AnyArray | InvalidInput"

_Decoded: TypeAlias = "AnyArray | Exception"


class PixelBudget:
    """Limit the pixels in memory. Thread-safe.

    An image above the limit waits until it is the only one.
    """

    def __init__(self, pixels: int) -> None:
        self._pixels = self._free = pixels
        self._changed = threading.Condition()

    @contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Wait until the budget allows an image, and hold it."""
        taken = min(pixels, self._pixels)
        with self._changed:
            self._changed.wait_for(lambda: taken <= self._free)
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


class Decoder(Closeable):
    """Decode images by one spec. Thread-safe.

    Args:
        spec: Preprocessing.
        threads: Number of images decoded in parallel, including the calling thread.

    Attributes:
        seconds: Processor time of each image, including damaged ones, latest last; removed by readers.
    """

    def __init__(self, spec: Preprocess, *, threads: int) -> None:
        self.seconds: deque[float] = deque(maxlen=_MOST_TIMES)
        self._spec = spec
        self._budget = PixelBudget(_PIXELS_AT_ONCE)
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="graphkiln-decode")

    def decode(self, requests: Sequence[Sequence[bytes]]) -> list[Samples]:
        """Decode the images of requests.

        Args:
            requests: Encoded images of each request.

        Returns:
            Result of each request, in order: an image that cannot be decoded fails only its own request.

        Raises:
            Exception: An error that is not caused by an image.
        """
        decoded = iter(self._decode_all([image for images in requests for image in images]))
        return [_gather([next(decoded) for _ in images]) for images in requests]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _decode_all(self, images: Sequence[bytes]) -> list[_Decoded]:
        """Decode images; return samples or errors, in order."""
        decoded: dict[int, _Decoded] = {}
        left = enumerate(images)  # shared by all threads: each takes the next image

        def work() -> None:
            for index, image in left:
                decoded[index] = self._load(image)

        helpers = [self._pool.submit(work) for _ in range(min(self._helpers, len(images) - 1))]
        work()
        for helper in helpers:
            if not helper.cancel():  # already started
                helper.result()
        return [decoded[index] for index in range(len(images))]

    def _load(self, image: bytes) -> _Decoded:
        begun = time.thread_time()
        try:
            return load_sample(image, self._spec, budget=self._budget.take)
        except Exception as error:  # noqa: BLE001 - reported with its request
            return error
        finally:
            self.seconds.append(time.thread_time() - begun)


def _gather(decoded: Sequence[_Decoded]) -> Samples:
    """Stack the samples of a request, or describe its undecodable images.

    Raises:
        Exception: An error that is not caused by an image.
    """
    faults = []
    for index, error in enumerate(decoded):
        if isinstance(error, MemoryError):
            faults.append(f"image {index}: there is not enough memory to decode it")
        elif isinstance(error, InvalidInput):
            faults.append(f"image {index}: {error}")
        elif isinstance(error, Exception):
            raise error
    if faults:
        more = f"; and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        return InvalidInput("; ".join(faults[:_MOST_NAMED]) + more)
    samples = [sample for sample in decoded if not isinstance(sample, Exception)]
    if not samples:
        return InvalidInput("there is no image in the request")
    for index, sample in enumerate(samples):
        if sample.shape != samples[0].shape:
            return InvalidInput(
                f"image {index} becomes {list(sample.shape)}, image 0 {list(samples[0].shape)}",
                hint="send images of different sizes in requests of their own",
            )
    return samples[0][np.newaxis] if len(samples) == 1 else np.stack(samples)
