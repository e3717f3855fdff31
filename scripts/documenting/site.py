"""What MkDocs is told beside `mkdocs.yml`: a hook for links out of `docs`.

Pages name files of the checkout (`../SECURITY.md`, `../deploy/...`), which work where the checkout is looked at.
The site
does not have these files: there such a link is their path, as text.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((\.\.?/[^()\s]+)\)")


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
