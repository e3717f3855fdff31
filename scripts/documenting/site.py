"""MkDocs hooks: the address of the site, and links out of `docs` as text.

Pages name files of the checkout (`../SECURITY.md`, `../deploy/...`), which work where the checkout is looked at. The
site does not have these files: there such a link is their path, as text.
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
    """MkDocs' event: `SITE_URL` says where the site will be; its 404 page, shown at any depth, has paths from there."""
    if address := os.environ.get("SITE_URL"):
        config.site_url = f"{address.rstrip('/')}/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs' event: a page before it becomes HTML."""
    # GitHub renders Markdown in <details>; here an attribute asks for it
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
    """Collect addresses that a browser fetches for a page."""

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
    """Find resources of a built site that a browser would fetch from other sites.

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


# Addresses of other sites in the pages. Without a network only their form is checked: https, no credentials, and no
# file of a branch, which moves while the page stays.

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
    """Describe a fault of an address; "" if none can be seen without a network."""
    parts = urlsplit(address)
    if parts.scheme != "https":
        return "it is not https"
    if "@" in parts.netloc:
        return "it carries a name or a password"
    if parts.netloc in _FORGES and _MOVING.search(parts.path):
        return "it names a file of a branch, which moves: name a tag or a commit"
    return ""


# docs/quickstart.svg: the terminal of a real run of the quickstart.

COLUMNS = 100
_COMMAND = "scripts/quickstart"
# They would be fetched from another site; the reader's own monospaced font does.
_FONT_FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
# What Triton says where there is no GPU, and what only the first run says.
_UNTOLD = re.compile(r"CudaDriverHelper|[Pp]inned memory|making a virtual environment|installing graphkiln|^\s*$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def record(repository: Path) -> None:
    """Run the quickstart and draw what it printed.

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
    """A terminal as SVG that needs nothing from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in shown_lines(printed):
        console.print(Text.from_ansi(line), soft_wrap=True)
    return _FONT_FACES.sub("", console.export_svg(title=title, unique_id="quickstart"))


def shown_lines(printed: str) -> list[str]:
    """The lines without empty ones and what other runs do not say."""
    return [line for line in printed.splitlines() if not _UNTOLD.search(_ESCAPES.sub("", line))]
