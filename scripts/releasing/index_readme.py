"""The README for a package index, with absolute links in place of relative ones.

.venv/bin/python -m releasing.index_readme https://HOST/OWNER/graphkiln v0.2.0 > README.index.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<target>[^()\s]+)\)")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def with_absolute_links(text: str, address: str, tag: str) -> str:
    """Make the links of a page at the root of the repository absolute.

    Args:
        text: The page, in Markdown.
        address: Address of the repository in a browser; pages are below `blob/TAG`, files below `raw/TAG`.
        tag: Tag of the release.
    """

    def replace(found: re.Match[str]) -> str:
        if _ABSOLUTE.match(found["target"]):
            return found[0]
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}{found['text']}({address.rstrip('/')}/{kind}/{tag}/{found['target']})"

    return _LINK.sub(replace, text)


def main() -> None:
    """Print the README with absolute links."""
    if len(sys.argv) != 3:
        sys.exit(
            "graphkiln: python -m releasing.index_readme ADDRESS TAG, such as https://github.com/OWNER/graphkiln v0.2.0"
        )
    print(with_absolute_links((REPOSITORY / "README.md").read_text(), *sys.argv[1:]), end="")


if __name__ == "__main__":
    main()
