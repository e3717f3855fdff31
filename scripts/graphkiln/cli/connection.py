"""The client of the verbs that talk to a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.admin_key import read_key
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client.defaults import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from graphkiln_client import Client


def connect(
    url: str,
    header: list[str] | None,
    ca_file: Path | None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    *,
    client_cert: Path | None = None,
    client_key: Path | None = None,
    admin_key_file: Path | None = None,
) -> Client:
    """Creates a client from the options that say where the server is and how the connection is secured.

    Raises:
        InvalidInput: The URL, a header or a file cannot be used.
    """
    from graphkiln_client import Client

    return Client(
        url,
        timeout_s=timeout_s,
        headers=_parse_headers(header or []),
        ca_file=ca_file,
        client_cert=client_cert,
        client_key=client_key,
        admin_key=read_key(admin_key_file) if admin_key_file else "",
    )


def _parse_headers(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition(":") for text in texts]
    if any(not colon for _, colon, _ in pairs):
        raise InvalidInput("--header: expected NAME:TEXT", hint="for example --header 'Authorization: Bearer ...'")
    return {name.strip(): text.strip() for name, _, text in pairs}
