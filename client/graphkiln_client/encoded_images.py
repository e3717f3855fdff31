"""Images as they are: which of them go to a server without being decoded here, and as which bytes."""

from __future__ import annotations

import http.client
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
)

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, DeadlineExceeded, InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import ImageLike
from graphkiln_client.deadline import Deadline

# Downloads an image: over HTTPS only, of bounded size, and only for clients that opted in.

_MAX_BYTES = 64 << 20


class _HttpsRedirects(HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: PLR0917
        if urlsplit(newurl).scheme != "https":
            fp.close()
            raise InvalidInput(f"{req.full_url} redirects to {newurl}, which is not https://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, timeout_s: float) -> bytes:
    """Downloads the content of an `https://` URL; redirects are followed to such URLs only.

    Args:
        url: The URL.
        timeout_s: Seconds that the server may be silent, and that its answer may take.

    Raises:
        InvalidInput: The URL is not `https://`, the server returns an error, or the content is over 64 MiB.
        ConnectionFailed: The server cannot be reached or trusted.
        DeadlineExceeded: The content does not come in time.
    """
    if urlsplit(url).scheme != "https":
        raise InvalidInput(f"{url} is not an https:// URL")
    # Only these handlers: urllib's usual opener would follow a redirect to http:// or ftp://, too.
    opener = OpenerDirector()
    handlers = (ProxyHandler, HTTPSHandler, _HttpsRedirects, HTTPErrorProcessor, HTTPDefaultErrorHandler)
    for handler in handlers:
        opener.add_handler(handler())
    try:
        with opener.open(url, timeout=timeout_s) as response:
            content = _read(response, url, Deadline.after(timeout_s))
            missing_bytes = response.length or 0  # of a body cut short: read(size) raises nothing
    except HTTPError as error:
        error.close()
        raise InvalidInput(f"cannot fetch {url}: the server returned {error.code}", status=error.code) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailed(f"cannot fetch {url}: {error}") from error
    if len(content) > _MAX_BYTES:
        raise InvalidInput(f"{url} is larger than {_MAX_BYTES >> 20} MiB")
    if missing_bytes:
        raise ConnectionFailed(f"cannot fetch {url}: the connection ended {missing_bytes} bytes too early")
    return content


def _read(response: Any, url: str, deadline: Deadline) -> bytes:
    """The body, or a byte more of it than is allowed; a server that sends byte after byte is not waited for."""
    content = bytearray()
    while len(content) <= _MAX_BYTES and (piece := response.read1(_MAX_BYTES + 1 - len(content))):
        content += piece
        if not deadline.remaining_s:
            raise DeadlineExceeded(f"{url} did not come within {deadline.timeout_s:g} s")
    return bytes(content)


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
