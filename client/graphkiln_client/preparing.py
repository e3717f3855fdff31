"""From an image in any usual form, or its URL, to what a request holds: an encoded image or one sample of a tensor."""

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

# How images travel: encoded where that is smaller and the server takes them, always so, or always as tensors.
Form: TypeAlias = Literal["auto", "encoded", "tensor"]

_FILE_LIMIT = 64 * MIB  # a larger file exceeds most servers' messages: it is decoded here, and fails here if it must
_DOWNLOAD_LIMIT = 64 * MIB


def prepare(
    image: ImageLike, spec: Preprocess, form: Form = "tensor", *, name: str = "", fetch_timeout_s: float | None = None
) -> bytes | Prepared:
    """Turn an image into what is sent of it. It is read, or downloaded, once.

    Args:
        image: The image, or the `https://` URL of one.
        spec: The preprocessing.
        form: How the image travels; pixels, and what cannot be read as a file, never travel encoded.
        name: Name of the image in errors, by default its path, its URL, or its kind and size.
        fetch_timeout_s: Seconds that fetching a URL may take; None where URLs are not allowed.

    Returns:
        The encoded image; or one sample (no batch dimension) of the spec's layout and dtype with the image's size.

    Raises:
        InvalidInput: The image cannot be read.
        ConnectionFailed: The URL's server cannot be reached or trusted.
        DeadlineExceeded: The URL's content does not come in time.
    """
    name = name or describe(image)
    content = image
    if isinstance(image, str) and image.startswith(("https://", "http://")):
        if fetch_timeout_s is None:
            raise InvalidInput(f"{image} is a URL", hint="to fetch images, use Client(fetch_urls=True)")
        content = download(image, fetch_timeout_s)
    elif form != "tensor" and isinstance(image, str | Path):
        with suppress(OSError):  # decoding it gives the reason
            content = read_bytes(image, _FILE_LIMIT)
    if isinstance(content, bytes) and (form == "encoded" or (form == "auto" and _is_worth_sending(content, spec))):
        return content
    return decoding.prepare(content, spec, name=name)


def to_tensor(encoded: Collection[bytes], *, batch_dimension: bool) -> AnyArray:
    """The input of encoded images: BYTES `[images, 1]`, or `[images]` for a model without batches."""
    elements = np.empty(len(encoded), dtype=object)
    elements[:] = [*encoded]
    return elements.reshape(-1, 1) if batch_dimension else elements


def _is_worth_sending(encoded: bytes, spec: Preprocess) -> bool:
    """True if an encoded image is smaller than its sample, or the size of that is not known before."""
    fixed = spec.resize if isinstance(spec.resize, tuple) else None
    size = spec.letterbox.size if spec.letterbox else spec.crop or fixed
    return size is None or len(encoded) < math.prod(size) * spec.channels * spec.dtype.bytes


class _HttpsRedirects(HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: PLR0917
        if urlsplit(newurl).scheme != "https":
            fp.close()
            raise InvalidInput(f"{req.full_url} redirects to {newurl}, which is not https://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, timeout_s: float) -> bytes:
    """Download the content of an `https://` URL; redirects are followed to such URLs only.

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
    for handler in (ProxyHandler, HTTPSHandler, _HttpsRedirects, HTTPErrorProcessor, HTTPDefaultErrorHandler):
        opener.add_handler(handler())
    try:
        with opener.open(url, timeout=timeout_s) as response:
            content = _read_body(response, url, Deadline.after(timeout_s))
            missing_bytes = response.length or 0  # of a body cut short: read(size) raises nothing
    except HTTPError as error:
        error.close()
        raise InvalidInput(f"cannot fetch {url}: the server returned {error.code}", status=error.code) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailed(f"cannot fetch {url}: {error}") from error
    if len(content) > _DOWNLOAD_LIMIT:
        raise InvalidInput(f"{url} is larger than {_DOWNLOAD_LIMIT // MIB} MiB")
    if missing_bytes:
        raise ConnectionFailed(f"cannot fetch {url}: the connection ended {missing_bytes} bytes too early")
    return content


def _read_body(response: Any, url: str, deadline: Deadline) -> bytes:
    """The body, or a byte more of it than is allowed, in the time of the deadline however slowly it comes."""
    content = bytearray()
    while len(content) <= _DOWNLOAD_LIMIT and (piece := response.read1(_DOWNLOAD_LIMIT + 1 - len(content))):
        content += piece
        if not deadline.remaining_s:
            raise DeadlineExceeded(f"{url} did not come within {deadline.timeout_s:g} s")
    return bytes(content)
