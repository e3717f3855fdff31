"""MkDocs hooks (address of the site, links out of `docs` as text), checks of links, and the picture of the quickstart.

Links of pages to files of the repository (`../SECURITY.md`, `../deploy/...`) work in a checkout. The site does not have
these files and shows their paths as text.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((\.\.?/[^()\s]+)\)")
_FOREIGN = re.compile(r"(?:https?:)?//")
_IN_STYLE = re.compile(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)")


def on_config(config: Any) -> Any:
    """MkDocs event: set the address of the site from `SITE_URL`; the 404 page, shown at any depth, needs it."""
    if address := os.environ.get("SITE_URL"):
        config.site_url = f"{address.rstrip('/')}/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs event: change a page before it becomes HTML."""
    return without_outside_links(markdown, page.file.src_uri)


def without_outside_links(markdown: str, source: str) -> str:
    """Replace links to files outside of `docs` by text.

    Args:
        markdown: The page.
        source: Path of the page below `docs`.
    """

    def replace(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target.partition("#")[0]))
        if path.startswith("docs/"):
            return found[0]
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(replace, markdown)


class _Resources(HTMLParser):
    """Collect addresses that a browser fetches for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """HTMLParser event; links that a reader may follow are not collected."""
        if ("rel", "canonical") in attrs:  # not fetched
            return
        names = {"src", "srcset", "data", *(() if tag in ("a", "area", "base") else ("href",))}
        self.found += [value for name, value in attrs if name in names and value]


def foreign_resources(folder: Path) -> list[str]:
    """Find resources of a built site that a browser would fetch from other sites: `FILE: ADDRESS`."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            parser = _Resources()
            parser.feed(path.read_text())
            found += [(path.name, address) for address in parser.found if _FOREIGN.match(address)]
        elif path.suffix == ".css":
            found += [(path.name, address) for address in _IN_STYLE.findall(path.read_text())]
    return [f"{name}: {address}" for name, address in dict.fromkeys(found)]


# Addresses of other sites in the pages. Only their form is checked: https, no credentials, and no file of a branch,
# whose content changes.

_ADDRESS = re.compile(r"https?://[^\s<>()\[\]`'\"|\\]+")
_MOVING = re.compile(
    r"/(?:blob|tree|raw)/(?:main|master|develop|dev|trunk|HEAD)(?:/|$)|^/[^/]+/[^/]+/(?:main|master|HEAD)/"
)
_FORGES = ("github.com", "gitlab.com", "codeberg.org", "raw.githubusercontent.com", "huggingface.co")
_EXAMPLES = ("example.org", "example.com", "localhost")


def outside_links(repository: Path) -> list[tuple[str, str]]:
    """List each page (its path below the repository) with each address of another site in it."""
    pages = [*sorted(repository.glob("*.md")), *sorted((repository / "docs").rglob("*.md"))]
    return [(str(page.relative_to(repository)), each) for page in pages for each in addresses(page.read_text())]


def addresses(text: str) -> Iterator[str]:
    """Yield the addresses of other sites in a text: lower-case host names with a dot, without examples."""
    for found in _ADDRESS.findall(text):
        address = found.rstrip(".,;:*_")
        host = urlsplit(address).netloc.rpartition("@")[2].partition(":")[0]
        is_name = "." in host and host == host.lower() and not re.fullmatch(r"[\d.]+", host)
        if is_name and not host.endswith(_EXAMPLES):
            yield address


def fault_of(address: str) -> str:
    """Describe a fault in the form of an address; "" if there is none."""
    parts = urlsplit(address)
    if parts.scheme != "https":
        return "it is not https"
    if "@" in parts.netloc:
        return "it contains a user name or password"
    if parts.netloc in _FORGES and _MOVING.search(parts.path):
        return "it names a file of a branch, which moves; name a tag or a commit"
    return ""


# docs/quickstart.svg: the terminal of a run of the quickstart.

COLUMNS = 100
_COMMAND = "scripts/quickstart"
# Fonts would be fetched from another site; the reader's monospaced font is used.
_FONT_FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
# Lines of Triton without a GPU, and of the first run only.
_LEFT_OUT = re.compile(r"CudaDriverHelper|[Pp]inned memory|making a virtual environment|installing graphkiln|^\s*$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def record(repository: Path) -> None:
    """Run the quickstart and draw its output.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    ran = subprocess.run(
        [str(repository / _COMMAND)],
        cwd=repository,
        env=environment,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    (repository / "docs" / "quickstart.svg").write_text(draw(f"$ ./{_COMMAND}\n{ran.stdout}", title="graphkiln"))


def draw(printed: str, title: str) -> str:
    """Draw a terminal as a self-contained SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in shown_lines(printed):
        console.print(Text.from_ansi(line))
    return _FONT_FACES.sub("", console.export_svg(title=title, unique_id="quickstart"))


def shown_lines(printed: str) -> list[str]:
    """Lines to show: without empty lines and those that other runs do not have."""
    return [line for line in printed.splitlines() if not _LEFT_OUT.search(_ESCAPES.sub("", line))]
