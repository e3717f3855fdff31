"""Starts the page beside a server, in a process of its own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from graphkiln_backend.graph.errors import EngineUnavailable, ServerSetupError
from graphkiln_backend.server.flags import DEFAULT_HOST, ListenAddress, TritonFlags
from graphkiln_backend.server.listening_child import ListeningChild
from graphkiln_backend.server.tls import TlsFiles

DEFAULT_PORT = 8003
"""Triton's own are 8000 to 8002."""
HOST_VARIABLE = "GRAPHKILN_PAGE_HOST"
"""Environment variable: where the page listens when its address names no host. Images set it: in a container, 127.0.0.1
is reached by nobody."""
_PROTOCOL = "page"
_NEEDED = ("starlette", "uvicorn")
_NAME = re.compile(r"\w(?:[\w.-]*[\w.])?", re.ASCII)
_QUANTILES = "summary_latencies=true"


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFacts:
    """What the process of the page is told. Nothing of it is secret.

    Attributes:
        inner_url: Of the server, as this machine reaches it.
        url: As people reach it; snippets name it.
        metrics_url: Of its metrics; empty where they are off.
        stores: Folders of models.
        everywhere: Whether the server listens at every address of this machine.
        names: Host names by which the page may be called.
        tls: Certificate, key and client authorities, as `TlsFiles.words` names them; empty for plain HTTP.
    """

    inner_url: str
    url: str
    metrics_url: str
    stores: Sequence[str]
    everywhere: bool = False
    names: Sequence[str] = ()
    tls: Sequence[str] = ()


def page_address(address: str) -> ListenAddress:
    """Where the page listens.

    Args:
        address: `HOST`, `HOST:PORT` or `:PORT`; empty for 127.0.0.1:8003, or for the host of the environment.

    Raises:
        ServerSetupError: It is something else.
    """
    default = os.environ.get(HOST_VARIABLE) or DEFAULT_HOST
    text = f"{default}{address}" if address.startswith(":") else address or default
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.path or parts.username:
        raise ServerSetupError(
            f"'{text}' is no address for the page", hint=f"--page-address {DEFAULT_HOST}:{DEFAULT_PORT}"
        )
    return ListenAddress(protocol=_PROTOCOL, host=host, port=port or DEFAULT_PORT)


def page_name(text: str) -> str:
    """A host name by which the page may be called.

    Raises:
        ServerSetupError: It is something else, such as an address with a port.
    """
    if not _NAME.fullmatch(text):
        raise ServerSetupError(f"'{text}' is no host name for the page", hint="--page-name models.example.org")
    return text


def page_url(address: ListenAddress, *, secure: bool) -> str:
    """What a person on this machine opens."""
    return _url(address, secure=secure)


def with_quantiles(flags: TritonFlags) -> TritonFlags:
    """The flags of a server with a page: it measures the quantiles of latencies, unless it was told how to."""
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
    """Serves the page until the end of the block.

    Args:
        address: Where; None for no page.
        flags: The user's, which say where people reach the server.
        inner: tritonserver's own (see `behind_tls`).
        tls: Certificate and key, which the page uses, too.
        stores: Folders of models that are served.
        names: Host names by which the page may be called, beside the one of its address.

    Raises:
        EngineUnavailable: What the page needs is not installed.
        ServerSetupError: The address is in use, or the server has no HTTP.
    """
    if address is None:
        return nullcontext()
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise EngineUnavailable(f"the page needs {' and '.join(missing)}", extra="page")
    facts = facts_of(address, flags, inner, tls, stores, names=names)
    return ListeningChild("page", "graphkiln.page.process", (json.dumps(asdict(facts)),), address)


def facts_of(
    address: ListenAddress,
    flags: TritonFlags,
    inner: TritonFlags,
    tls: TlsFiles | None,
    stores: Sequence[Path],
    *,
    names: Sequence[str] = (),
) -> PageFacts:
    """What the page is told of a server.

    Raises:
        ServerSetupError: The server has no HTTP, or a name is none.
    """
    public, private, metrics = (
        flags.listen_address("http"),
        inner.listen_address("http"),
        inner.listen_address("metrics"),
    )
    if public is None or private is None:
        raise ServerSetupError("the page asks the server over HTTP, which is off", hint="--allow-http=true")
    return PageFacts(
        inner_url=_url(private, secure=False),
        url=_url(public, secure=bool(tls)),
        metrics_url=f"{_url(metrics, secure=False)}/metrics" if metrics else "",
        stores=[str(store.absolute()) for store in stores],
        everywhere=public.local_address[0] != public.host,
        names=[address.host, *map(page_name, names)],
        tls=tls.words() if tls else (),
    )


def _url(address: ListenAddress, *, secure: bool) -> str:
    host, port = address.local_address
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if secure else 'http'}://{shown}:{port}"
