"""What MkDocs is told beside `mkdocs.yml`: where the site will be, and what becomes of links out of `docs`.

Pages name files of the checkout (`../SECURITY.md`, `../deploy/...`), which work where the checkout is looked at. The
site does not have these files: there such a link is their path, as text.
"""

from __future__ import annotations

import os
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((\.\.?/[^()\s]+)\)")
_FOREIGN = re.compile(r"(?:https?:)?//")
_IN_STYLE = re.compile(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)")


def on_config(config: Any) -> Any:
    """MkDocs' event: `SITE_URL` says where the site will be; its 404 page, shown at any depth, has paths from there."""
    if address := os.environ.get("SITE_URL"):
        config.site_url = f"{address.rstrip('/')}/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs' event: a page before it becomes HTML."""
    # what lies in <details> is Markdown on GitHub as it stands; here it must be told
    return without_outside_links(markdown, page.file.src_uri).replace("<details>", '<details markdown="1">')


def without_outside_links(markdown: str, source: str) -> str:
    """A page whose links to files outside of `docs` are text.

    Args:
        markdown: The page.
        source: Its path below `docs`.
    """

    def replace(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target.partition("#")[0]))
        if path.startswith("docs/"):
            return found[0]
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(replace, markdown)


class _Resources(HTMLParser):
    """What a page of the site has a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """HTMLParser's event: links that a reader may follow are none of these."""
        if ("rel", "canonical") in attrs:  # says where a page is, and has nothing fetched
            return
        names = {"src", "srcset", "data", *(() if tag in ("a", "area", "base") else ("href",))}
        self.found += [value for name, value in attrs if name in names and value]


def foreign_resources(folder: Path) -> list[str]:
    """What pages or style sheets of a built site have a browser fetch from other sites: it must work without any.

    Args:
        folder: Of the site.

    Returns:
        File and address, of each once.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            parser = _Resources()
            parser.feed(path.read_text())
            found += [(path.name, address) for address in parser.found if _FOREIGN.match(address)]
        elif path.suffix == ".css":
            found += [(path.name, address) for address in _IN_STYLE.findall(path.read_text())]
    return [f"{name}: {address}" for name, address in dict.fromkeys(found)]
