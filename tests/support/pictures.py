"""Pictures of the documentation, made by tests from the running product.

A picture carries the hash of the style sheets and templates that it shows. Whoever changes these makes it anew:
`GRAPHKILN_RECORD=1 scripts/test -m slow -n 0 tests/integration/test_pictures.py`.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from graphkiln.page.app import STATIC
from graphkiln.reporting import LOOK

# Name in `docs` -> the folder that decides how it looks, beside `LOOK`.
PICTURES: Mapping[str, Path] = {"page.png": STATIC, "report.png": LOOK.parent}
MOST_BYTES = 200_000
_KEY = "made of"
_COLORS = 256
# Other files have separate tests; not every change must need new pictures.
_LOOKS = {".css", ".html", ".j2", ".svg"}


def made_of(name: str) -> str:
    """Hash of the files that determine the picture now."""
    files = sorted({LOOK, *(path for path in PICTURES[name].iterdir() if path.suffix in _LOOKS)})
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def keep(name: str, shot: bytes, docs: Path) -> None:
    """Write a picture: a PNG with fewer colors and the hash of its sources."""
    told = PngInfo()
    told.add_text(_KEY, made_of(name))
    colors = Image.open(io.BytesIO(shot)).convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE)
    colors.save(docs / name, "PNG", optimize=True, pnginfo=told)


def fault_of(path: Path) -> str:
    """Describe what is wrong with a picture of the documentation; empty if nothing is."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size > MOST_BYTES:
        return f"{path.name} has {path.stat().st_size} bytes"
    with Image.open(path) as picture:
        if picture.width < 600 or len(picture.convert("RGB").getcolors(1 << 24) or ()) < 20:
            return f"{path.name} shows nothing"
        return "" if picture.info.get(_KEY) == made_of(path.name) else f"{path.name} shows what is no more"
