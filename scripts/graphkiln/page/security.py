"""Protect the page against requests from other web pages, and limit the size of requests.

Other web pages can send requests to a server on this machine, and can resolve their own name to it (DNS rebinding).
Therefore the `Host` header must be an IP address or a known name, and the origin, if the browser sends one, must be the
page itself.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import MIB, format_size

BODY_LIMIT = 64 * MIB  # an image, or tensors as JSON; also the client's limit of JSON responses
# No external resources, no inline scripts, no markup from text. Source: W3C, CSP Level 3 and Trusted Types.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_FROM_PAGE = "only requests from the page itself are accepted"
_BY_NAME = "open it by its IP address or as localhost, or allow the name with serve --page-name NAME"
# `Sec-Fetch-Site` of requests from the page, and of a typed URL. Source: W3C, Fetch Metadata.
_OWN = {"same-origin", "none"}


class Guard:
    """ASGI middleware that rejects foreign requests and adds security headers to responses.

    Args:
        app: The application.
        names: Accepted host names in addition to `localhost`.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = ()) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().removesuffix(".") for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. Source: ASGI specification 3.0."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app = _refusal(Headers(scope=scope), scope["scheme"], self._names) or self._app
        await app(scope, receive, _with_headers(send))


def _refusal(headers: Headers, scheme: str, names: Collection[str]) -> JSONResponse | None:
    """Return the response to a rejected request, or None to accept it."""
    hosts, origin = headers.getlist("host"), headers.get("origin")
    if len(hosts) != 1 or not _is_ours(hosts[0], names):
        return _refuse(421, f"the page is not served as '{', '.join(hosts)[:80]}'", _BY_NAME)
    if origin is not None and origin.lower() != f"{scheme}://{hosts[0]}".lower():
        return _refuse(403, f"the request comes from '{origin[:80]}'", _FROM_PAGE)
    if headers.get("sec-fetch-site", "none") not in _OWN and headers.get("sec-fetch-dest") != "document":
        return _refuse(403, "the request comes from another page", _FROM_PAGE)
    if _length(headers) > BODY_LIMIT:
        return _refuse(413, f"the request is larger than {format_size(BODY_LIMIT)}", "send a smaller image")
    return None


def _refuse(status: int, message: str, hint: str) -> JSONResponse:
    return JSONResponse({"error": {"kind": "Refused", "message": message, "hint": hint}}, status)


async def read_body(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        InvalidInput: The body is larger than `BODY_LIMIT`.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_LIMIT:
            raise InvalidInput(f"the request is larger than {format_size(BODY_LIMIT)}", hint="send a smaller image")
    return bytes(body)


def _is_ours(host: str, names: Collection[str]) -> bool:
    """Check that a `Host` header is an IP address or a known name, which foreign name servers do not control."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018 - raises ValueError if invalid
        name = (parts.hostname or "").removesuffix(".")  # a fully qualified name
        return parts.netloc == host and "@" not in host and (name in names or bool(ip_address(name)))
    except ValueError:
        return False


def _length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isdecimal() and len(text) < 19 else BODY_LIMIT + 1


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
        await send(message)

    return send_with_headers
