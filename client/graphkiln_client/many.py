"""Many images at once: in batches, several requests at a time, with the answers in the order of the images."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar, get_args

import numpy as np

from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.images.decoding import ImageLike

T = TypeVar("T")
R = TypeVar("R")
OnError = Literal["raise", "return"]
Progress = Callable[[int], None]


class ManyOptions(TypedDict, total=False):
    """Keyword arguments of `detect_many` and its like, as for `classify_many`."""

    batch_size: int
    concurrency: int
    on_error: OnError
    progress: Progress | None


@dataclass(kw_only=True)
class Many:
    """Options of a call with many images, and the count of its answers.

    Attributes:
        batch_size: Most images in one request.
        concurrency: Most requests in flight.
        on_error: Raise the error of an image, or return it in its place.
        progress: Called with the number of answers so far.

    Raises:
        InvalidInput: A number is less than 1, or `on_error` is neither.
    """

    batch_size: int = 16
    concurrency: int = 8
    on_error: OnError = "raise"
    progress: Progress | None = None
    _done: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.concurrency < 1:
            sizes = f"{self.batch_size} and {self.concurrency}"
            raise InvalidInput(f"batch_size and concurrency must be at least 1, got {sizes}")
        if self.on_error not in get_args(OnError):
            raise InvalidInput(f"on_error must be 'raise' or 'return', got {self.on_error!r}")

    def split(self, images: Iterable[ImageLike], most: int) -> Iterable[list[ImageLike]]:
        """The images in lists of at most `batch_size` and at most `most`, read lazily.

        Raises:
            InvalidInput: It is one image: the letters of its path, or the rows of its pixels, would be several.
        """
        if _is_one(images):
            raise InvalidInput(
                f"expected several images, got one {type(images).__name__}", hint="give a list: [image], or ask for one"
            )
        return _batches(images, min(self.batch_size, most))

    def report(self, answer: T | ClientError) -> T | ClientError:
        """Count an answer and return it.

        Raises:
            ClientError: The answer is one, and errors are to be raised.
        """
        if isinstance(answer, ClientError) and self.on_error == "raise":
            raise answer
        self._done += 1
        if self.progress:
            self.progress(self._done)
        return answer


def _is_one(images: object) -> bool:
    """True for a single image; of pixels, `[images, height, width]` and `[..., channels]` are several."""
    if isinstance(images, np.ndarray):
        return images.ndim < 3 or (images.ndim == 3 and images.shape[2] in (3, 4))
    return isinstance(images, str | bytes) or not isinstance(images, Iterable)


def _batches(images: Iterable[ImageLike], size: int) -> Iterable[list[ImageLike]]:
    batch: list[ImageLike] = []
    for image in images:
        batch.append(image)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def map_in_threads(work: Callable[[T], R], items: Iterable[T], concurrency: int) -> Generator[R]:
    """Map in as many threads. Items are read lazily, in the caller's thread; an error ends the map."""
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="graphkiln-client") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) >= 2 * concurrency:  # the next item is ready when a thread is
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


async def map_in_tasks(
    work: Callable[[T], Coroutine[Any, Any, R]], items: Iterable[T], concurrency: int
) -> AsyncGenerator[R]:
    """Map in as many tasks of the running event loop. Items are read lazily; an error ends the map."""
    pending: deque[asyncio.Task[R]] = deque()
    try:
        for item in items:
            pending.append(asyncio.create_task(work(item)))
            if len(pending) >= concurrency:
                yield await pending.popleft()
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
