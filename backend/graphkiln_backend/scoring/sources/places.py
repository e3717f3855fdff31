"""What a text names: a path of this machine, or one in a bucket."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache

from graphkiln_backend.graph.redaction import redact
from graphkiln_backend.repository.remote_address import RemoteAddress
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.local_storage import LocalStorage
from graphkiln_backend.scoring.sources.object_storage import ObjectStorage
from graphkiln_backend.scoring.sources.storage import Storage

READABLE = "paths, s3://, gs:// and file:// can"
_OTHER_SCHEME = re.compile(r"(?!s3://|gs://)[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Place:
    """A path, and where it lies.

    Attributes:
        storage: Where.
        path: As the storage names it.
        text: As a user names it.
    """

    storage: Storage
    path: str
    text: str

    def below(self, path: str) -> Place:
        """A path below this one."""
        return Place(self.storage, f"{self.path.rstrip('/')}/{path}", f"{self.text.rstrip('/')}/{path}")


def locate(text: str) -> Place:
    """What a text names: a path, `file://` or a bucket's address.

    Raises:
        ScoringError: It is an address of another kind.
        RepositoryError: It is a bucket's address, but incomplete.
    """
    text = text.removeprefix("file://")
    if _OTHER_SCHEME.match(text):
        raise ScoringError(f"'{redact(text)}' cannot be read", hint=READABLE)
    address = RemoteAddress.parse(text)
    if address is None:
        path = os.path.abspath(text)  # noqa: PTH100 - it may hold a pattern
        return Place(LocalStorage(), path, path)
    return Place(_remote(address.scheme, tuple(address.options.items()), _service(address)), address.root, address.text)


def _service(address: RemoteAddress) -> str:
    """The address down to its bucket: what credentials may depend on."""
    bucket, _, rest = address.root.partition("/")
    return address.text.removesuffix(f"/{rest}") if rest else address.text or bucket


@cache
def _remote(scheme: str, options: tuple[tuple[str, str], ...], text: str) -> Storage:
    bucket = text.rpartition("/")[2]
    return ObjectStorage(RemoteAddress(scheme=scheme, root=bucket, options=dict(options), text=text))
