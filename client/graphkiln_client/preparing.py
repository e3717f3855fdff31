"""Images as the content of requests: downloaded, kept encoded, or decoded to tensors."""

from __future__ import annotations

import http.client
import math
from collections.abc import Collection
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
from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images import decoding
from graphkiln_backend.images.decoding import ImageLike, Prepared, describe
from graphkiln_client.transports.base import Deadline

# Send images encoded if that is smaller and the server accepts it, always, or never.
Form: TypeAlias = Literal["auto", "encoded", "tensor"]

_FILE_LIMIT = 64 * MIB  # larger files exceed the message limit of most servers and are decoded here
_DOWNLOAD_LIMIT = 64 * MIB


def prepare(
    image: ImageLike, spec: Preprocess, form: Form = "tensor", *, name: str = "", fetch_timeout_s: float | None = None
) -> bytes | Prepared:
    """Convert an image to the content of a request.

    Args:
        image: The image, or an `https://` URL.
        spec: The preprocess spec.
        form: Encoding in the request. Pixels and unreadable files are never sent encoded.
        name: Name of the image in errors; defaults to its path, its URL, or its type and size.
        fetch_timeout_s: Timeout in seconds of a download; None if URLs are not allowed.

    Returns:
        The encoded image; or one sample without a batch dimension, in the layout and dtype of the spec.

    Raises:
        InvalidInput: The image cannot be read.
        ConnectionFailed: The download failed.
        DeadlineExceeded: The download took too long.
    """
    name = name or describe(image)
    content = image
    if isinstance(image, str) and image.startswith(("https://", "http://")):
        if fetch_timeout_s is None:
            raise InvalidInput(f"{image} is a URL", hint="to fetch images, use Client(fetch_urls=True)")
        content = download(image, fetch_timeout_s)
    elif form != "tensor" and isinstance(image, str | Path):
        with suppress(OSError):  # decoding it raises the error
            content = read_bytes(image, _FILE_LIMIT)
    if isinstance(content, bytes) and (form == "encoded" or (form == "auto" and _is_smaller_encoded(content, spec))):
        return content
    return decoding.prepare(content, spec, name=name)


def _is_smaller_encoded(encoded: bytes, spec: Preprocess) -> bool:
    """Compare an encoded image with its tensor; True if the tensor's size depends on the image."""
    return spec.size is None or len(encoded) < math.prod(spec.size) * spec.channels * spec.dtype.bytes


class _HttpsRedirects(HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: PLR0917
        if urlsplit(newurl).scheme != "https":
            fp.close()
            raise InvalidInput(f"{req.full_url} redirects to {newurl}, which is not https://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, timeout_s: float) -> bytes:
    """Download an `https://` URL. Redirects must lead to `https://` URLs, too.

    Raises:
        InvalidInput: The URL is not `https://`, the server returns an error, or the content is over 64 MiB.
        ConnectionFailed: The server cannot be reached or trusted.
        DeadlineExceeded: The download takes longer than `timeout_s`.
    """
    if urlsplit(url).scheme != "https":
        raise InvalidInput(f"{url} is not an https:// URL")
    # urllib's default opener would also follow redirects to http:// and ftp://.
    opener = OpenerDirector()
    for handler in (ProxyHandler, HTTPSHandler, _HttpsRedirects, HTTPErrorProcessor, HTTPDefaultErrorHandler):
        opener.add_handler(handler())
    try:
        with opener.open(url, timeout=timeout_s) as response:
            content = _read_body(response, url, Deadline.after(timeout_s))
            missing_bytes = response.length or 0  # read1 reports no error for an incomplete body
    except HTTPError as error:
        error.close()
        raise InvalidInput(f"cannot fetch {url}: the server returned {error.code}", status=error.code) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailed(f"cannot fetch {url}: {error}") from error
    if len(content) > _DOWNLOAD_LIMIT:
        raise InvalidInput(f"{url} is larger than {_DOWNLOAD_LIMIT // MIB} MiB")
    if missing_bytes:
        raise ConnectionFailed(f"cannot fetch {url}: the connection closed {missing_bytes} bytes before the end")
    return content


def _read_body(response: Any, url: str, deadline: Deadline) -> bytes:
    """Read a body until its end, the deadline, or one byte beyond the size limit."""
    content = bytearray()
    while len(content) <= _DOWNLOAD_LIMIT and (piece := response.read1(_DOWNLOAD_LIMIT + 1 - len(content))):
        content += piece
        if not deadline.remaining_s:
            raise DeadlineExceeded(f"{url} was not downloaded within {deadline.timeout_s:g} s")
    return bytes(content)


def to_tensor(encoded: Collection[bytes], *, batch_dimension: bool) -> AnyArray:
    """Build the input of encoded images: BYTES `[images, 1]`, or `[images]` without a batch dimension."""
    elements = np.empty(len(encoded), dtype=object)
    elements[:] = [*encoded]
    return elements.reshape(-1, 1) if batch_dimension else elements
