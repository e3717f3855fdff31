"""Images as they are: which of them go to a server without being decoded here, and as which bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client.download import download

# How images travel: as they are where that is smaller and the server takes them, always so, or as tensors.
Form: TypeAlias = Literal["auto", "encoded", "tensor"]

_FILE_LIMIT = 64 * MIB  # what is larger than most servers' messages is decoded here, and fails here if it is no image


def read_encoded(image: ImageLike, *, fetch_timeout_s: float | None) -> bytes | None:
    """The bytes of an image that is encoded; None for pixels, and for what cannot be read so: decoding says why.

    Args:
        image: The image, or the `https://` URL of one.
        fetch_timeout_s: Seconds that fetching a URL may take; None where URLs are not allowed.

    Raises:
        ClientError: The URL cannot be fetched.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str) and image.startswith(("https://", "http://")):
        return None if fetch_timeout_s is None else download(image, fetch_timeout_s)
    if not isinstance(image, str | Path):
        return None
    try:
        return read_bytes(image, _FILE_LIMIT)
    except OSError:
        return None


def choose_encoded(
    images: Sequence[ImageLike], form: Form, spec: Preprocess, *, fetch_timeout_s: float | None
) -> dict[int, bytes]:
    """The images that are sent as they are, by their place among others; what cannot be read is left to decoding.

    Args:
        images: The images.
        form: How they travel.
        spec: How an image becomes a sample.
        fetch_timeout_s: As for `read_encoded`.
    """
    chosen = {}
    for index, image in enumerate(images):
        with suppress(ClientError):
            encoded = read_encoded(image, fetch_timeout_s=fetch_timeout_s)
            if encoded is not None and (form == "encoded" or is_worth_sending(encoded, spec)):
                chosen[index] = encoded
    return chosen


def to_tensor(encoded: Collection[bytes], *, batched: bool) -> AnyArray:
    """The input of encoded images: BYTES `[images, 1]`, or `[images]` for a model without batches."""
    elements = np.empty(len(encoded), dtype=object)
    elements[:] = [*encoded]
    return elements.reshape(-1, 1) if batched else elements


def is_worth_sending(encoded: bytes, spec: Preprocess) -> bool:
    """Whether an encoded image is smaller than the sample that it becomes; so where that size is not known."""
    fixed = spec.resize if isinstance(spec.resize, tuple) else None
    size = spec.letterbox.size if spec.letterbox else spec.crop or fixed
    return size is None or len(encoded) < math.prod(size) * spec.channels * spec.dtype.bytes


def check_form(form: str) -> None:
    """Refuses what is no form.

    Raises:
        InvalidInput: It is none.
    """
    if form not in ("auto", "encoded", "tensor"):
        raise InvalidInput(f"images must be 'auto', 'encoded' or 'tensor', got '{form}'")
