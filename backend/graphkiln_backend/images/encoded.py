"""Encoded images of several requests, decoded at once in threads: pixels, or why there are none, for each request.

Pillow decodes and resizes without Python's lock, and numpy computes without it: threads of one process use as many
cores. The rules are those of `images.decoding`, which the client uses: the same bytes give the same sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np

from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample

_MOST_NAMED = 3
"""Faults that one message tells."""

Samples: TypeAlias = "AnyArray | InvalidInput"
"""The samples `[images, ...]` of a request, or why there are none."""


class Decoder(Closeable):
    """Decodes images by one spec. Thread-safe.

    Args:
        spec: How an image becomes a sample.
        threads: How many images are decoded at the same time.
    """

    def __init__(self, spec: Preprocess, *, threads: int) -> None:
        self._spec = spec
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="graphkiln-decode")

    def decode(self, requests: Sequence[Sequence[bytes]]) -> list[Samples]:
        """Decodes the images of requests.

        Args:
            requests: The encoded images of each.

        Returns:
            One for each request, in order: an image that cannot be decoded is the fault of its own request only.
        """
        pending = [[self._pool.submit(load_sample, image, self._spec) for image in images] for images in requests]
        return [_gather(samples) for samples in pending]

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def _gather(pending: Sequence[Future[AnyArray]]) -> Samples:
    faults = list(_faults(pending))
    if faults:
        more = f"; and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        return InvalidInput("; ".join(faults[:_MOST_NAMED]) + more)
    samples = [sample.result() for sample in pending]
    if not samples:
        return InvalidInput("there is no image in the request")
    for index, sample in enumerate(samples):
        if sample.shape != samples[0].shape:
            return InvalidInput(
                f"image {index} becomes {list(sample.shape)}, image 0 {list(samples[0].shape)}",
                hint="send images of different sizes in requests of their own",
            )
    return samples[0][np.newaxis] if len(samples) == 1 else np.stack(samples)


def _faults(pending: Sequence[Future[AnyArray]]) -> Iterator[str]:
    """Which images could not be decoded, and why.

    Raises:
        Exception: What is no fault of an image.
    """
    for index, sample in enumerate(pending):
        error = sample.exception()
        if isinstance(error, MemoryError):
            yield f"image {index}: there is not enough memory to decode it"
        elif isinstance(error, InvalidInput):
            yield f"image {index}: {error}"
        elif error is not None:
            raise error
