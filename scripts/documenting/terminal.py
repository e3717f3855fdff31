"""docs/quickstart.svg: the terminal of a real run of the quickstart."""

from __future__ import annotations

import io
import os
import re
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100
_COMMAND = "scripts/quickstart"
# They would be fetched from another site; the reader's own monospaced font does.
_FONT_FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
# What Triton says where there is no GPU, and what only the first run says.
_UNTOLD = re.compile(r"CudaDriverHelper|[Pp]inned memory|making a virtual environment|installing graphkiln|^\s*$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def record(repository: Path) -> None:
    """Runs the quickstart and draws what it printed.

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
    """A terminal as SVG that needs nothing from elsewhere.

    Args:
        printed: What stands in it, with the terminal's escape sequences.
        title: Of its window.
    """
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in shown_lines(printed):
        console.print(Text.from_ansi(line), soft_wrap=True)
    return _FONT_FACES.sub("", console.export_svg(title=title, unique_id="quickstart"))


def shown_lines(printed: str) -> list[str]:
    """The lines without empty ones and what other runs do not say."""
    return [line for line in printed.splitlines() if not _UNTOLD.search(_ESCAPES.sub("", line))]
