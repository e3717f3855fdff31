"""Classification beside the model: batches of images, rankings of their outputs, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypedDict, TypeVar, get_args

import numpy as np

from graphkiln_backend.graph import task as topk
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ProtocolError
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client.results import Classification, classifications
from graphkiln_client.transports.base import InferResponse

T = TypeVar("T")
OnError = Literal["raise", "return"]
Progress = Callable[[int], None]


class ManyOptions(TypedDict, total=False):
    """How many images are asked about at once, as for `classify_many`."""

    batch_size: int
    concurrency: int
    on_error: OnError
    progress: Progress | None


def check_options(options: ManyOptions) -> None:
    """Refuses an option that does not exist, as any call does: with `threshold=0.9` as much was found as without it.

    Raises:
        TypeError: There is one.
    """
    known = ManyOptions.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(f"unexpected keyword argument '{unknown[0]}': there are {', '.join(known)}")


class ResultReporter:
    """Hands results to the caller of `classify_many` and its like: errors raised or returned, progress reported.

    Args:
        on_error: Whether an error is raised or returned.
        progress: Called with the number of results so far.

    Raises:
        InvalidInput: `on_error` is neither.
    """

    def __init__(self, on_error: OnError, progress: Progress | None) -> None:
        if on_error not in get_args(OnError):
            raise InvalidInput(f"on_error must be 'raise' or 'return', got {on_error!r}")
        self._on_error = on_error
        self._progress = progress
        self._done = 0

    def report(self, result: T | ClientError) -> T | ClientError:
        """Counts a result and returns it.

        Raises:
            ClientError: The result is one, and errors are to be raised.
        """
        if isinstance(result, ClientError) and self._on_error == "raise":
            raise result
        self._done += 1
        if self._progress:
            self._progress(self._done)
        return result


def split_batches(images: Iterable[ImageLike], size: int) -> Iterable[list[ImageLike]]:
    """The images in lists of at most `size`, read lazily.

    Raises:
        InvalidInput: It is one image: the letters of its path, or the rows of its pixels, would be taken for several.
    """
    if _is_one(images):
        raise InvalidInput(
            f"expected several images, got one {type(images).__name__}", hint="give a list: [image], or ask for one"
        )
    return _batches(images, size)


def _is_one(images: object) -> bool:
    """Whether something is a single image; of pixels, `[images, height, width]` and `[..., channels]` are several."""
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


def only(results: Sequence[T | ClientError]) -> T:
    """The result of a single image.

    Raises:
        ClientError: It is one.
    """
    (result,) = results
    if isinstance(result, ClientError):
        raise result
    return result


def check_sizes(batch_size: int, concurrency: int) -> None:
    """Refuses what is no number of images or requests.

    Raises:
        InvalidInput: One is less than 1.
    """
    if batch_size < 1 or concurrency < 1:
        raise InvalidInput(f"batch_size and concurrency must be at least 1, got {batch_size} and {concurrency}")


def split_samples(response: InferResponse, output: str, count: int, *, batched: bool) -> Sequence[AnyArray]:
    """An output, sample by sample.

    Args:
        response: The response.
        output: Name of the output.
        count: How many samples were sent.
        batched: Whether tensors have a batch dimension.

    Raises:
        ProtocolError: The output is missing, or has another number of samples.
    """
    if output not in response.outputs:
        raise ProtocolError(f"the response lacks output '{output}'")
    array = response.outputs[output]
    if not batched:
        return [array]
    if array.ndim < 1 or len(array) != count:
        raise ProtocolError(f"output '{output}' has the shape {list(array.shape)} for {count} images")
    return list(array)


def rank_scores(scores: AnyArray, k: int, labels: Sequence[str], *, softmax: bool) -> tuple[Classification, ...]:
    """Ranks the scores of one sample, `[classes]` or `[*positions, classes]`.

    Raises:
        InvalidInput: The output cannot be ranked.
    """
    indices, best = topk.top_k(np.atleast_1d(scores), k)
    if softmax:
        best = np.take_along_axis(topk.softmax(np.atleast_1d(scores)), indices, axis=-1)
    return classifications(indices, best, labels)


def read_ranking(scores: AnyArray, indices: AnyArray, k: int, labels: Sequence[str]) -> tuple[Classification, ...]:
    """Reads one sample's classes as its graph ranked them, no more than `k` of them.

    Args:
        scores: `[*positions, classes]`, best first.
        indices: Class indices of the same shape.
        k: How many classes.
        labels: By class index.

    Raises:
        ProtocolError: The indices are no class indices of these scores.
    """
    fits = indices.shape == scores.shape and indices.dtype.kind in "iu" and indices.ndim
    if not fits or (indices.size and indices.min() < 0):
        raise ProtocolError(f"{indices.dtype}{list(indices.shape)} are no class indices of {list(scores.shape)} scores")
    return classifications(indices[..., :k].astype(np.int64), scores[..., :k], labels)
