"""The options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphkiln_backend.graph.admin_key import KEY_FILE_VARIABLE

Url = Annotated[
    str, typer.Option(help="http://HOST:PORT or grpc://HOST:PORT; https and grpcs with TLS.", envvar="GRAPHKILN_URL")
]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", help="Sent with every request, e.g. a token; may be repeated.", metavar="NAME:TEXT"),
]
CaFile = Annotated[
    Path | None, typer.Option(help="Certificate authorities to trust.", show_default="the system's", metavar="FILE")
]
ClientCert = Annotated[
    Path | None, typer.Option(help="Own certificate, for a server that asks for one (mutual TLS).", metavar="FILE")
]
ClientKey = Annotated[
    Path | None, typer.Option(help="Its private key.", show_default="in the certificate's file", metavar="FILE")
]
AdminKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="Holds the server's admin key.",
        envvar=KEY_FILE_VARIABLE,
        show_default="that of a server of yours on this machine",
        metavar="FILE",
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds that one request may take.", min=0.001)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Cache = Annotated[
    str,
    typer.Option(
        help="Folder for lowered graphs and compiled artifacts, or 'off'.",
        envvar="GRAPHKILN_CACHE",
        show_default="~/.cache/graphkiln",
    ),
]
