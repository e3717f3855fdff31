"""What clients read from the outputs of a task, row by row, of a batch that was computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, ProtocolError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.answers import Sample
from graphkiln_backend.images.frame import Frame, frame_of
from graphkiln_backend.scoring.encoders.base import Size

_T = TypeVar("_T")


def read_rows(read: Callable[[Sample], _T], outputs: Mapping[str, AnyArray]) -> Iterator[_T]:
    """Reads each row when it is asked for: the class map of a large image takes as much memory as its pixels.

    Args:
        read: The answer that the outputs of one row hold.
        outputs: By name, each with a row of the batch in its first dimension.

    Raises:
        ExecutionError: An output is not what the task says.
    """
    rows = len(next(iter(outputs.values())))
    try:
        yield from (read({name: values[row] for name, values in outputs.items()}) for row in range(rows))
    except ProtocolError as error:
        raise ExecutionError(str(error)) from error


def read_images(
    read: Callable[[Sample, Frame], _T],
    outputs: Mapping[str, AnyArray],
    preprocess: Preprocess,
    sizes: Sequence[Size],
) -> Iterator[_T]:
    """The same where the answer is about places in an image.

    Args:
        read: The answer that the outputs of one row hold, in pixels of its image.
        outputs: As above.
        preprocess: How the images became samples.
        sizes: Of the images.

    Raises:
        ExecutionError: An output is not what the task says.
    """
    frames = (frame_of(preprocess, size) for size in sizes)
    return read_rows(lambda sample: read(sample, next(frames)), outputs)


def columns_of(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> list[pa.Array]:
    """Plain data as columns; each row becomes Arrow's before the next is asked for, which takes a tenth of the memory.

    Args:
        rows: At least one, with a value for each field.
        schema: The fields.
    """
    kind = pa.struct(list(schema))
    columns: list[pa.Array] = pa.concat_arrays([pa.array([row], kind) for row in rows]).flatten()
    return columns
