"""Addresses of other sites in the pages: `scripts/docs --links` lists them for who has a network to try them in.

What can be known without one is checked: that an address is secure and whole, carries no name or password, and names no
file of a branch, which moves and is renamed while the page stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_ADDRESS = re.compile(r"https?://[^\s<>()\[\]`'\"|\\]+")
_MOVING = re.compile(
    r"/(?:blob|tree|raw)/(?:main|master|develop|dev|trunk|HEAD)(?:/|$)|^/[^/]+/[^/]+/(?:main|master|HEAD)/"
)
_FORGES = ("github.com", "gitlab.com", "codeberg.org", "raw.githubusercontent.com", "huggingface.co")
_EXAMPLES = ("example.org", "example.com", "localhost")


def outside_links(repository: Path) -> list[tuple[str, str]]:
    """Page, below the checkout, and each address of another site in it, in order; those of examples are none."""
    pages = [*sorted(repository.glob("*.md")), *sorted((repository / "docs").rglob("*.md"))]
    return [(str(page.relative_to(repository)), each) for page in pages for each in addresses(page.read_text())]


def addresses(text: str) -> Iterator[str]:
    """The addresses of other sites in a text: hosts with a dot, in small letters, that are no examples."""
    for found in _ADDRESS.findall(text):
        address = found.rstrip(".,;:*_")
        host = urlsplit(address).netloc.rpartition("@")[2].partition(":")[0]
        is_name = "." in host and host == host.lower() and not re.fullmatch(r"[\d.]+", host)
        if is_name and not host.endswith(_EXAMPLES):
            yield address


def fault_of(address: str) -> str:
    """What is wrong with an address, in words; empty where nothing can be seen from here."""
    parts = urlsplit(address)
    if parts.scheme != "https":
        return "it is not https"
    if "@" in parts.netloc:
        return "it carries a name or a password"
    if parts.netloc in _FORGES and _MOVING.search(parts.path):
        return "it names a file of a branch, which moves: name a tag or a commit"
    return ""
