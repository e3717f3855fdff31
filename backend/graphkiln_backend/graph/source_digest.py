"""A digest of the code that decides something: what it decided is asked anew when the code is another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_CACHED = "__pycache__"


@cache
def source_digest(*rooms: str) -> str:
    """SHA-256 of the modules of some rooms of the backend, hexadecimal, cut to 16 digits.

    A release number does not do: a rule that is changed between two releases would be answered from what was kept
    before. It takes 2 ms.

    Args:
        *rooms: Names of folders, such as `lowering`.
    """
    digest = hashlib.sha256()
    for path in (path for room in rooms for path in _modules(_ROOT / room)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _modules(folder: Path) -> Iterator[Path]:
    """Source, or what was compiled where nothing else is installed."""
    for path in sorted(folder.rglob("*.py*")):
        if path.parent.name != _CACHED:
            yield path
