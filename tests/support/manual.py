"""The documentation as data: pages, fenced blocks, commands, links and anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Pages below `docs` with programs, beside the tutorial; tests/documentation/test_walkthroughs.py follows them.
GUIDES = (
    "how-to/convert", "how-to/data-frames", "how-to/drop-in", "how-to/engines", "how-to/migrate", "how-to/oneflow",
    "how-to/precision", "how-to/push", "how-to/record", "how-to/requests", "how-to/rollout", "how-to/serve",
    "how-to/story", "images", "page", "parallel", "reference/python", "scoring", "signing", "tasks", "tuning",
)  # fmt: skip
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_INLINE = re.compile(r"`(?:\.venv/bin/)?graphkiln ([a-z][^`]*)`")
_COMMAND = re.compile(r"^(?:\S+=\S+ +)*(?:\.venv/bin/)?graphkiln\s+(?=[a-z-])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: The file.
        line: Line of its fence, from 1.
        language: Language of the fence.
        title: Name of the file that the reader writes; empty for none.
        text: Text between the fences, without their indentation.
    """

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Lines of the block without comments and empty ones; continued lines are joined."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = (re.sub(r"(^|\s+)#( .*)?$", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line]


def pages(repository: Path) -> list[Path]:
    """All pages for users."""
    top = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    return [*(repository / name for name in top), *sorted((repository / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            title=found["title"] or "",
            text=re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
        )
        for found in _FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", page.read_text()), flags=re.DOTALL)


def graphkiln_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Position of each graphkiln command in a block, and its words after `graphkiln`."""
    shown = [(block.place, line) for block in blocks(page) for line in block.commands]
    joined = re.sub(r"\\\n\s*", "", prose(page))
    shown += [(page.name, line.strip()) for line in joined.splitlines() if line.startswith("    ")]
    for place, line in shown:
        if found := _COMMAND.match(line):
            yield place, words_of(line[found.end() :])


def mentioned_commands(page: Path) -> Iterator[list[str]]:
    """Words of commands mentioned in the text, as far as shown."""
    for found in _INLINE.finditer(" ".join(prose(page).split())):
        yield words_of(found[1])


def words_of(text: str) -> list[str]:
    """Words of a command up to the shell's part: a pipe, another command, a file, a comment."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            break
        words.append(word)
    return words


def links(page: Path) -> list[str]:
    """Targets of links and pictures."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))


def pictures(page: Path) -> list[str]:
    """Targets of pictures."""
    return re.findall(r"!\[[^\]]*\]\(([^()\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Anchors of headings that GitHub and MkDocs generate alike, and explicit ones."""
    text = _FENCE.sub("", page.read_text())
    slugs = [_slug(heading) for heading in _HEADING.findall(text)]
    return {one for one, other in slugs if one == other} | set(re.findall(r'<a id="([^"]+)">', text))


def _slug(heading: str) -> tuple[str, str]:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    kept = re.sub(r"[^\w\s-]", "", plain).strip()
    return kept.replace(" ", "-"), re.sub(r"[-\s]+", "-", kept)
