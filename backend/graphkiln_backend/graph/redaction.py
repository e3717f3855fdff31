"""What is secret, taken out of texts that are shown to others: logs, errors, records, reports, manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_CREDENTIALS = re.compile(r"(?<=://)(?:A[KS]IA[0-9A-Z]{16}:[^@\s]*|[^/?#\s]*)@")
"""Name and password before a host, also where an access key's secret holds slashes. Source: RFC 3986, 3.2.1."""
_SECRET = re.compile(
    r"(?:^|(?<=[?&\s]))"
    r"((?:sas|sig|[\w-]*(?:password|token|secret|signature|credential|access_?key)[\w-]*)=)"
    r"(?:'(?:[^'\\]|\\.)*'|[^&\s]*)",
    re.IGNORECASE,
)
"""Settings of a connection that are secret, and what signs an address. Source: libpq, "Connection Strings"; signed
addresses of S3, GCS and Azure."""
_HEADER = "--header"


def redact(text: str) -> str:
    """A text with addresses in it, without user, password and keys."""
    return _SECRET.sub(r"\1...", _CREDENTIALS.sub("", text))


def redact_command(words: Sequence[str]) -> list[str]:
    """The words of a command as the program was given them, without what is secret in addresses and headers."""
    return [*_without_headers(map(redact, words))]


def _without_headers(words: Iterator[str]) -> Iterator[str]:
    before = ""
    for word in words:
        option, equals, header = word.partition("=") if word.startswith(f"{_HEADER}=") else (before, "", word)
        named = f"{header.partition(':')[0]}: ..."
        yield (f"{option}={named}" if equals else named) if option == _HEADER else word
        before = word
