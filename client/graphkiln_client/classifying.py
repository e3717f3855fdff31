"""What classifying many images needs beside the model: batches, shares of an answer, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, ProtocolError
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client.results import Classification, Result, classifications
from graphkiln_client.topk import softmax as softmax_of
from graphkiln_client.topk import top_k as top_k_of
from graphkiln_client.transports.base import InferResponse

OnError = Literal["raise", "return"]
Progress = Callable[[int], None]


class Progressing:
    """Passes answers on to a caller of `classify_many`, in the manner that it asked for."""

    def __init__(self, on_error: OnError, progress: Progress | None) -> None:
        self._on_error = on_error
        self._progress = progress
        self._done = 0

    def passed(self, answer: Result | ClientError) -> Result | ClientError:
        """The answer.

        Raises:
            ClientError: It is one, and errors shall be raised.
        """
        if isinstance(answer, ClientError) and self._on_error == "raise":
            raise answer
        self._done += 1
        if self._progress:
            self._progress(self._done)
        return answer


def cut(images: Iterable[ImageLike], size: int) -> Iterable[list[ImageLike]]:
    """The images in lists of at most `size`, read lazily."""
    batch: list[ImageLike] = []
    for image in images:
        batch.append(image)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def rows(response: InferResponse, output: str, count: int, *, batched: bool) -> Sequence[AnyArray]:
    """An output's share of every sample.

    Args:
        response: An answer.
        output: Name of the output.
        count: How many samples were sent.
        batched: Whether tensors have a batch dimension.

    Raises:
        ProtocolError: The output is not there, or not for so many samples.
    """
    if output not in response.outputs:
        raise ProtocolError(f"the answer lacks output '{output}'")
    array = response.outputs[output]
    if not batched:
        return [array]
    if array.ndim < 1 or len(array) != count:
        raise ProtocolError(f"output '{output}' has the shape {list(array.shape)} for {count} images")
    return list(array)


def ranked(scores: AnyArray, k: int, labels: Sequence[str], *, softmax: bool) -> tuple[Classification, ...]:
    """The best classes of one sample's scores, `[classes]` or `[*positions, classes]`."""
    indices, best = top_k_of(np.atleast_1d(scores), k)
    if softmax:
        best = np.take_along_axis(softmax_of(np.atleast_1d(scores)), indices, axis=-1)
    return classifications(indices, best, labels)


def ranked_there(scores: AnyArray, indices: AnyArray, k: int, labels: Sequence[str]) -> tuple[Classification, ...]:
    """The best classes of one sample as its graph ranked them, `[*positions, k]` each; no more than `k` of them.

    Raises:
        ProtocolError: The indices are none.
    """
    fits = indices.shape == scores.shape and indices.dtype.kind in "iu" and indices.ndim
    if not fits or (indices.size and indices.min() < 0):
        raise ProtocolError(f"{indices.dtype}{list(indices.shape)} are no class indices of {list(scores.shape)} scores")
    return classifications(indices[..., :k].astype(np.int64), scores[..., :k], labels)
