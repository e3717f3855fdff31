"""Options of the page, and its start in a separate process next to a server."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from graphkiln.page.listening_child import ListeningChild
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.modules import require_packages
from graphkiln_backend.server.flags import DEFAULT_HOST, ListenAddress, TritonFlags, free_port
from graphkiln_backend.server.tls import TlsFiles

_log = logging.getLogger("graphkiln.page")

DEFAULT_PORT = 8003  # Triton's own are 8000 to 8002
# Environment variable with the default host. Container images set it, because their 127.0.0.1 cannot be reached from
# outside.
HOST_VARIABLE = "GRAPHKILN_PAGE_HOST"
_PROTOCOL = "page"
_NAME = re.compile(r"\w(?:[\w.-]*[\w.])?", re.ASCII)
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+\])?:\d+", re.ASCII)
_QUANTILES = "summary_latencies=true"
_OPEN = (
    "the page at %s is not encrypted: everyone who can reach it sees the models with a golden sample of each, and "
    "admin keys are sent in plain text (use --tls-cert FILE --tls-key FILE, or --page-address 127.0.0.1 and a tunnel)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFacts:
    """Command-line argument of the page's process. Contains no secrets.

    Attributes:
        inner_url: URL of the server for this machine.
        url: Public URL of the server, for snippets.
        metrics_url: URL of the metrics; empty if they are disabled.
        everywhere: True if the server listens on all addresses of this machine.
        names: Accepted host names of the page.
        tls: Paths of certificate, key and client authorities (`TlsFiles.words`); empty for plain HTTP.
    """

    inner_url: str
    url: str
    metrics_url: str
    stores: Sequence[str]
    everywhere: bool = False
    names: Sequence[str] = ()
    tls: Sequence[str] = ()


def is_address(word: str) -> bool:
    """Check for `HOST:PORT`, `:PORT`, an IP address or `localhost`."""
    return bool(_ADDRESS.fullmatch(word)) or word == "localhost" or _is_ip(word)


def page_address(address: str) -> ListenAddress:
    """Parse the address of the page.

    Args:
        address: `HOST`, `HOST:PORT` or `:PORT`; the default is port 8003 of 127.0.0.1 or of the environment's host.

    Raises:
        ServerSetupError: The address is malformed.
    """
    default, given = _bracketed(os.environ.get(HOST_VARIABLE) or DEFAULT_HOST), _bracketed(address)
    text = f"{default}{given}" if given.startswith(":") else given or default
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        host, port = None, 0
    if not host or not port or parts.path or parts.username:
        raise ServerSetupError(
            f"'{text}' is not a valid page address", hint=f"--page-address {DEFAULT_HOST}:{DEFAULT_PORT}"
        )
    return ListenAddress(protocol=_PROTOCOL, host=host, port=port)


def chosen_address(option: str, words: Sequence[str], *, wanted: bool) -> ListenAddress | None:
    """Choose the address of the page; None for no page.

    Raises:
        ServerSetupError: There are several addresses, or the address is malformed.
    """
    given = [*filter(None, (option,)), *words]
    if len(given) > 1:
        raise ServerSetupError(f"expected one page address, got {', '.join(given)}", hint="choose one of them")
    return page_address("".join(given)) if given or wanted else None


def page_name(text: str) -> str:
    """Validate a host name of the page.

    Raises:
        ServerSetupError: The text is not a host name without a port.
    """
    if not _NAME.fullmatch(text):
        raise ServerSetupError(f"'{text}' is not a host name", hint="--page-name models.example.org")
    return text


def page_url(address: ListenAddress, *, secure: bool) -> str:
    """Return the URL of the page for a browser on this machine."""
    return _url(address, secure=secure)


def with_quantiles(flags: TritonFlags) -> TritonFlags:
    """Enable latency quantiles in the flags of a server with a page, unless metrics are configured."""
    if "metrics-config" in flags.values or not flags.listen_address("metrics"):
        return flags
    return replace(flags, arguments=(*flags.arguments, f"--metrics-config={_QUANTILES}"))


def open_page(
    address: ListenAddress | None,
    flags: TritonFlags,
    inner: TritonFlags,
    tls: TlsFiles | None,
    stores: Sequence[Path],
    *,
    names: Sequence[str] = (),
) -> AbstractContextManager[object]:
    """Serve the page until the end of the block.

    Args:
        address: Address of the page; None for no page.
        flags: Flags of the user, with the public address of the server.
        inner: Flags with the addresses behind the edge (see `behind_edge`).
        tls: Certificate and key of the server and the page.
        stores: Model stores of the server.
        names: Accepted host names in addition to that of `address`.

    Raises:
        EngineUnavailable: A package that the page needs is not installed.
        ServerSetupError: The address is in use, or the server has no HTTP port.
    """
    if address is None:
        return nullcontext()
    require_packages("the page", ["starlette", "uvicorn"], extra="page")
    facts = facts_of(address, flags, inner, tls, stores, names=names)
    _check_port(address, flags)
    _warn_if_open(address, tls)
    try:
        return ListeningChild("page", "graphkiln.page.app", (json.dumps(asdict(facts)),), address)
    except ServerSetupError as error:
        raise ServerSetupError(error.message, hint=_other_port(address)) from error


def facts_of(
    address: ListenAddress,
    flags: TritonFlags,
    inner: TritonFlags,
    tls: TlsFiles | None,
    stores: Sequence[Path],
    *,
    names: Sequence[str] = (),
) -> PageFacts:
    """Build the argument of the page's process.

    Raises:
        ServerSetupError: The server has no HTTP port, or a name is malformed.
    """
    public, private, metrics = (
        flags.listen_address("http"),
        inner.listen_address("http"),
        inner.listen_address("metrics"),
    )
    if public is None or private is None:
        raise ServerSetupError("the page needs the server's HTTP port, which is disabled", hint="--allow-http=true")
    return PageFacts(
        inner_url=_url(private, secure=False),
        url=_url(public, secure=bool(tls)),
        metrics_url=f"{_url(metrics, secure=False)}/metrics" if metrics else "",
        stores=[str(store.absolute()) for store in stores],
        everywhere=public.local_address[0] != public.host,
        names=[address.host, *map(page_name, names)],
        tls=tls.words() if tls else (),
    )


def _check_port(address: ListenAddress, flags: TritonFlags) -> None:
    """Reject a port of the server: tritonserver would find it in use at every start."""
    for own in flags.listen_addresses():
        if own.overlaps(address):
            raise ServerSetupError(f"port {own.port} is the server's own ({own.protocol})", hint=_other_port(address))


def _other_port(address: ListenAddress) -> str:
    return f"choose another: --page-address={_bracketed(address.host)}:{free_port()}"


def _warn_if_open(address: ListenAddress, tls: TlsFiles | None) -> None:
    """Warn about a public page without TLS, unless a container image opens it, where published ports decide."""
    if address.is_public and not tls and address.host != os.environ.get(HOST_VARIABLE):
        _log.warning(_OPEN, f"{_bracketed(address.host)}:{address.port}")


def _bracketed(host: str) -> str:
    """Add brackets to an IPv6 address."""
    return f"[{host}]" if ":" in host and _is_ip(host) else host


def _is_ip(word: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(word))
    return False


def _url(address: ListenAddress, *, secure: bool) -> str:
    host, port = address.local_address
    return f"{'https' if secure else 'http'}://{_bracketed(host)}:{port}"
