"""Addresses of remote stores: `s3://`, `gs://`, `as://`, `hf://`, `oci://`.

Triton's notation: `s3://BUCKET/PATH`, and for other servers than Amazon's `s3://HOST:PORT/BUCKET/PATH` (HTTP) and
`s3://https://HOST:PORT/BUCKET/PATH`; `gs://BUCKET/PATH`; `as://ACCOUNT/CONTAINER/PATH`. In addition
`hf://OWNER/REPOSITORY[@REVISION]/PATH`, and `oci://HOST/REPOSITORY:TAG` for an artifact in a container registry, which
is accessed over HTTP if it is on this machine or written as `oci://http://HOST/...`. Addresses contain no credentials:
the services' clients find them.
Source: "Model Repository" in Triton's user guide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.text import redact

_ADDRESS = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.S)
_ENDPOINT = re.compile(r"(?P<protocol>https?://)?(?P<host>[^/@]+:\d+)/(?P<path>.*)", re.S)
_FORMS = {
    "s3": "s3://BUCKET/PATH or s3://HOST:PORT/BUCKET/PATH",
    "gs": "gs://BUCKET/PATH",
    "as": "as://ACCOUNT/CONTAINER/PATH",
    "hf": "hf://OWNER/REPOSITORY/PATH",
    "oci": "oci://HOST/REPOSITORY:TAG",
}
# An artifact in a registry, and a path in it. Source: OCI Distribution, "Pulling manifests".
OCI_REFERENCE = re.compile(
    r"(?P<artifact>(?P<host>[^/@\s]+)/[a-z0-9][a-z0-9._/-]*"
    r"(?::\w[\w.-]{0,127}|(?::\w[\w.-]{0,127})?@sha256:[0-9a-f]{64}))(?P<path>/.*)?",
    re.S,
)
_OCI = re.compile(rf"((?P<protocol>https?)://)?(?P<root>{OCI_REFERENCE.pattern})", re.S)
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")


class RemoteStoreError(RepositoryError):
    """A remote store cannot be read.

    Args:
        message: What happened.
        hint: What to do.
        passing: True for temporary faults of the network or the service.
    """

    def __init__(self, message: str, *, hint: str = "", passing: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.passing = passing


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteAddress:
    """A folder of a remote service.

    Attributes:
        scheme: `s3`, `gs`, `as`, `hf` or `oci`.
        root: Folder in the notation of the service's client, without slashes at its ends.
        options: Further options of the client.
        text: The user's text, without slashes at the end.
    """

    scheme: str
    root: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    text: str

    @classmethod
    def parse(cls, text: str) -> RemoteAddress | None:
        """Parse an address; return None for the path of a folder.

        Raises:
            RepositoryError: The address is of an unknown service.
        """
        found = _ADDRESS.fullmatch(text)
        if not found:
            return None
        scheme, rest = found["scheme"], found["rest"].rstrip("/")
        if scheme not in _FORMS:
            raise RepositoryError(
                f"'{redact(text)}': model stores of the kind {scheme}:// are not known",
                hint=", ".join(_FORMS.values()),
            )
        if redact(text) != text:
            raise RepositoryError(
                f"'{redact(text)}': credentials in an address are shown by logs and by lists of processes",
                hint=f"{_FORMS[scheme]}; the client finds them in the environment, or in its own files",
            )
        return _PARSERS[scheme](f"{scheme}://{rest}", rest)

    def split(self) -> tuple[RemoteAddress, str]:
        """Return the parent folder and the name of this folder.

        Raises:
            RepositoryError: It has no parent.
        """
        root, slash, name = self.root.rpartition("/")
        if not slash:
            raise RepositoryError(f"{self} is a whole store", hint=f"name a model in it: {self}/NAME")
        above = RemoteAddress(
            scheme=self.scheme, root=root, options=self.options, text=self.text.removesuffix(f"/{name}")
        )
        return above, name

    def __str__(self) -> str:
        return self.text


def is_remote(text: str) -> bool:
    """Return true for an address, false for a path."""
    return _ADDRESS.fullmatch(text) is not None


def parse_store(text: str) -> Path | RemoteAddress:
    """Parse a model store: a path or an address.

    Raises:
        RepositoryError: The address is of an unknown service.
    """
    return RemoteAddress.parse(text) or Path(text)


def _parse_s3(text: str, rest: str) -> RemoteAddress:
    if not (found := _ENDPOINT.fullmatch(rest)):
        return _plain("s3", text, rest)
    endpoint = f"{found['protocol'] or 'http://'}{found['host']}"
    return _plain("s3", text, found["path"], {"endpoint_url": endpoint})


def _parse_azure(text: str, rest: str) -> RemoteAddress:
    account, _, root = rest.partition("/")
    # Triton's name of the container's address is accepted, too.
    return _plain("as", text, root, {"account_name": account.partition(".")[0]})


def _parse_hub(text: str, rest: str) -> RemoteAddress:
    address = _plain("hf", text, rest)
    if "/" not in address.root:
        raise _incomplete("hf", text)
    return address


def _parse_oci(text: str, rest: str) -> RemoteAddress:
    if not (found := _OCI.fullmatch(rest)):
        raise _incomplete("oci", text)
    protocol = found["protocol"] or ("http" if _LOCAL_HOST.fullmatch(found["host"]) else "https")
    return _plain("oci", text, found["root"], {"protocol": protocol, "artifact": found["artifact"]})


def _plain(scheme: str, text: str, root: str, options: Mapping[str, Any] | None = None) -> RemoteAddress:
    root = root.rstrip("/")
    parts = root.split("/")
    if not root or "@" in parts[0] or {"", ".", ".."} & set(parts):
        raise _incomplete(scheme, text)
    return RemoteAddress(scheme=scheme, root=root, options=options or {}, text=text)


def _incomplete(scheme: str, text: str) -> RepositoryError:
    return RepositoryError(f"'{text}' is not the address of a folder ({scheme}://)", hint=_FORMS[scheme])


_PARSERS = {
    "s3": _parse_s3,
    "gs": lambda text, rest: _plain("gs", text, rest),
    "as": _parse_azure,
    "hf": _parse_hub,
    "oci": _parse_oci,
}
