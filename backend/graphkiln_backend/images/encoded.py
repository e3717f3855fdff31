"""Decoding of encoded images of several requests in threads: for each request, its samples or an error.

Pillow decodes and resizes without Python's lock, and numpy computes without it: threads of one process use as many
cores. The rules are those of `images.decoding`, which the client uses: the same bytes give the same sample.

The calling thread decodes, too, and alone where there is one image: where sessions keep all cores busy, handing a job
to another thread would wait for a core twice.

All pixels in memory together are limited to about a gigabyte: large images wait for each other.
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
_MOST_TIMES = 1 << 16  # decoding times kept until they are read
# 5 photographs of 24 megapixels. An image takes 4 to 8 bytes a pixel; the largest, of 178 megapixels, 1.4 GB, and a
# file of half a megabyte may hold it: as many at once as there are threads would be more than a machine has.
_PIXELS_AT_ONCE = 1 << 27

# The samples `[images, ...]` of a request, or why there are none.
Samples: TypeAlias = "AnyArray | InvalidInput"

_Decoded: TypeAlias = "AnyArray | Exception"


class PixelBudget:
    """Limit the pixels that are in memory at once. Thread-safe.

    An image that has more waits until it is the only one.
    """

    def __init__(self, pixels: int) -> None:
        self._pixels = self._free = pixels
        self._changed = threading.Condition()

    @contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for an image, and hold it."""
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
        spec: How an image becomes a sample.
        threads: How many images are decoded at the same time, one of them by the calling thread.

    Attributes:
        seconds: The processor's time for each image, damaged ones too, the latest last; readers remove them.
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
            requests: The encoded images of each.

        Returns:
            One for each request, in order: an image that cannot be decoded fails its own request only.

        Raises:
            Exception: What is no fault of an image.
        """
        decoded = iter(self._decode_all([image for images in requests for image in images]))
        return [_gather([next(decoded) for _ in images]) for images in requests]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _decode_all(self, images: Sequence[bytes]) -> list[_Decoded]:
        """The samples of images, or what became of them, in order."""
        decoded: dict[int, _Decoded] = {}
        left = enumerate(images)  # of several threads that ask for the next one, each gets another

        def work() -> None:
            for index, image in left:
                decoded[index] = self._load(image)

        helpers = [self._pool.submit(work) for _ in range(min(self._helpers, len(images) - 1))]
        work()
        for helper in helpers:
            if not helper.cancel():  # it has begun
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
    """Stack the samples of a request, or describe the images of it that could not be decoded.

    Raises:
        Exception: What is no fault of an image.
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
