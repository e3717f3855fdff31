"""Downloads an image: over HTTPS only, of bounded size, and only for clients that opted in."""

from __future__ import annotations

import http.client
from typing import Any
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

from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, InvalidInput
from graphkiln_client.deadline import Deadline

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
