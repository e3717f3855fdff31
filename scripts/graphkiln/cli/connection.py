"""Connection options of the verbs that talk to a server, and the client that they make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.text import redact, redact_command
from graphkiln_backend.system.admin_key import KEY_FILE_VARIABLE, read_key
from graphkiln_client.defaults import DEFAULT_TIMEOUT_S, DEFAULT_URL

if TYPE_CHECKING:
    from graphkiln_client import Client

_PLACE, _ADMIN, _TIMEOUT = "connection", "admin_key_file", "timeout"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionOptions:
    """Address and security of a connection: each field is an option of the command line."""

    url: Annotated[
        str,
        typer.Option(help="http://HOST:PORT or grpc://HOST:PORT; https and grpcs with TLS.", envvar="GRAPHKILN_URL"),
    ] = DEFAULT_URL
    header: Annotated[
        list[str] | None,
        typer.Option("--header", help="Sent with every request, e.g. a token; may be repeated.", metavar="NAME:TEXT"),
    ] = None
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificate authorities to trust.", show_default="the system's", metavar="FILE")
    ] = None
    client_cert: Annotated[
        Path | None, typer.Option(help="Own certificate, for a server that asks for one (mutual TLS).", metavar="FILE")
    ] = None
    client_key: Annotated[
        Path | None, typer.Option(help="Its private key.", show_default="in the certificate's file", metavar="FILE")
    ] = None
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Holds the server's admin key.",
            envvar=KEY_FILE_VARIABLE,
            show_default="that of a server of yours on this machine",
            metavar="FILE",
        ),
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.", min=0.001, metavar="SECONDS")] = (
        DEFAULT_TIMEOUT_S
    )

    def connect(self) -> Client:
        """Create the client.

        Raises:
            InvalidInput: The URL, a header or a file cannot be used.
        """
        from graphkiln_client import Client

        return Client(**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """The arguments of the client.

        Raises:
            InvalidInput: A header or a file cannot be used.
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

    def words(self) -> tuple[str, ...]:
        """The options that lead to the same server, as a command takes them: without what is secret in them.

        Raises:
            InvalidInput: The URL cannot be used.
        """
        from graphkiln_client.transports.endpoint import Endpoint

        files = {
            "--ca-file": self.ca_file,
            "--client-cert": self.client_cert,
            "--client-key": self.client_key,
            "--admin-key-file": self.admin_key_file,
        }
        named = [word for option, file in files.items() if file for word in (option, str(file.absolute()))]
        headers = [word for header in self.header or [] for word in ("--header", header)]
        return "--url", str(Endpoint.parse(self.url)), *named, *redact_command(headers)


DEFAULT_CONNECTION = ConnectionOptions()
_HINTS = get_type_hints(ConnectionOptions, include_extras=True)


def with_connection(
    *, timeout_s: float | None = DEFAULT_TIMEOUT_S, admin: bool = False, url: OptionInfo | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a verb's parameter `connection` by the options of a connection.

    `--url` takes the parameter's place; the others follow the verb's own options.

    Args:
        timeout_s: Default of `--timeout`; None for a verb without it.
        admin: Whether the verb may need the admin key.
        url: What `--url` is there, where it is not the server that every verb asks.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        left_out = {*(() if admin else (_ADMIN,)), *((_TIMEOUT,) if timeout_s is None else ())}
        default = replace(DEFAULT_CONNECTION, timeout=timeout_s or DEFAULT_TIMEOUT_S)
        options = [_parameter(field.name, default) for field in fields(default) if field.name not in left_out]
        if url:
            options[0] = options[0].replace(annotation=Annotated[str, url])

        @functools.wraps(verb)
        def wrapper(**given: Any) -> None:
            chosen = {option.name: given.pop(option.name) for option in options}
            verb(**given, connection=replace(default, **chosen))

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(verb, eval_str=True).parameters.values():
            keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.append(options[0] if parameter.name == _PLACE else keyword)
        vars(wrapper)["__signature__"] = inspect.Signature([*parameters, *options[1:]])  # what typer reads
        return wrapper

    return decorate


def _parameter(name: str, default: ConnectionOptions) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=getattr(default, name), annotation=_HINTS[name]
    )


def _check_tls(options: ConnectionOptions) -> None:
    """Refuse options of TLS for a connection without it, which would be plain all the same.

    Raises:
        InvalidInput: There are some.
    """
    given = {"--ca-file": options.ca_file, "--client-cert": options.client_cert, "--client-key": options.client_key}
    named = [name for name, value in given.items() if value is not None]
    if named and not options.url.lower().startswith(("https://", "grpcs://")):
        raise InvalidInput(
            f"{', '.join(named)}: the connection to {redact(options.url)} is not secured",
            hint="--url https://HOST:PORT or grpcs://HOST:PORT",
        )


def _parse_headers(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition(":") for text in texts]
    if any(not colon for _, colon, _ in pairs):
        raise InvalidInput("--header: expected NAME:TEXT", hint="for example --header 'Authorization: Bearer ...'")
    return {name.strip(): text.strip() for name, _, text in pairs}
