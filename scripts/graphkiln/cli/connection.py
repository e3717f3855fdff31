"""Connection options of verbs that use a server."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.text import redact
from graphkiln_backend.system.admin_key import KEY_FILE_VARIABLE, read_key
from graphkiln_client import DEFAULT_TIMEOUT_S, DEFAULT_URL

if TYPE_CHECKING:
    from graphkiln_client import Client

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionOptions:
    """Address and security of a connection; each field is a command-line option."""

    url: Annotated[
        str,
        typer.Option(help="http://HOST:PORT or grpc://HOST:PORT; https and grpcs with TLS.", envvar="GRAPHKILN_URL"),
    ] = DEFAULT_URL
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header", help="Header for every request, such as a token; may be repeated.", metavar="NAME:TEXT"
        ),
    ] = None
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificate authorities to trust.", show_default="the system's", metavar="FILE")
    ] = None
    client_cert: Annotated[Path | None, typer.Option(help="Client certificate for mutual TLS.", metavar="FILE")] = None
    client_key: Annotated[
        Path | None,
        typer.Option(help="Private key of the certificate.", show_default="in the certificate's file", metavar="FILE"),
    ] = None
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the server's admin key.",
            envvar=KEY_FILE_VARIABLE,
            show_default="the key of your server on this machine",
            metavar="FILE",
        ),
    ] = None
    timeout: Annotated[float, typer.Option(help="Timeout of a request.", min=0.001, metavar="SECONDS")] = (
        DEFAULT_TIMEOUT_S
    )

    def connect(self) -> Client:
        """Create the client.

        Raises:
            InvalidInput: The URL, a header or a file is invalid.
        """
        from graphkiln_client import Client

        return Client(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the client.

        Raises:
            InvalidInput: A header or a file is invalid.
        """
        _check_tls(self)
        return {
            "url": self.url,
            "timeout_s": self.timeout,
            "headers": _parse_headers(self.header or []),
            "ca_file": self.ca_file,
            "client_cert": self.client_cert,
            "client_key": self.client_key,
            "admin_key": read_key(self.admin_key_file) if self.admin_key_file else "",
        }


DEFAULT_CONNECTION = ConnectionOptions()
_HINTS = get_type_hints(ConnectionOptions, include_extras=True)


def with_connection(
    *, timeout_s: float | None = DEFAULT_TIMEOUT_S, admin: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a verb: replace its parameter `connection` by the connection options.

    `--url` takes the place of the parameter; the others follow the verb's options.

    Args:
        timeout_s: Default of `--timeout`; None for a verb without this option.
        admin: Add `--admin-key-file`.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        left_out = {*(() if admin else ("admin_key_file",)), *(("timeout",) if timeout_s is None else ())}
        default = replace(DEFAULT_CONNECTION, timeout=timeout_s or DEFAULT_TIMEOUT_S)
        options = [
            inspect.Parameter(name, _KEYWORD, default=getattr(default, name), annotation=_HINTS[name])
            for name in _HINTS
            if name not in left_out
        ]

        @functools.wraps(verb)
        def wrapper(**given: Any) -> None:
            chosen = {option.name: given.pop(option.name) for option in options}
            verb(**given, connection=replace(default, **chosen))

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(verb, eval_str=True).parameters.values():
            parameters.append(options[0] if parameter.name == "connection" else parameter.replace(kind=_KEYWORD))
        vars(wrapper)["__signature__"] = inspect.Signature([*parameters, *options[1:]])  # read by typer
        return wrapper

    return decorate


def _check_tls(options: ConnectionOptions) -> None:
    """Refuse TLS options for a URL without TLS."""
    given = {"--ca-file": options.ca_file, "--client-cert": options.client_cert, "--client-key": options.client_key}
    named = [name for name, value in given.items() if value is not None]
    if named and not options.url.lower().startswith(("https://", "grpcs://")):
        raise InvalidInput(
            f"{', '.join(named)}: the connection to {redact(options.url)} does not use TLS",
            hint="--url https://HOST:PORT or grpcs://HOST:PORT",
        )


def _parse_headers(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition(":") for text in texts]
    if any(not colon for _, colon, _ in pairs):
        raise InvalidInput("--header: expected NAME:TEXT", hint="for example --header 'Authorization: Bearer ...'")
    return {name.strip(): text.strip() for name, _, text in pairs}
