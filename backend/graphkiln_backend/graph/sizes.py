"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMGT]?)i?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def read_size(text: str) -> int | None:
    """Reads a size such as `500M`, `20G` or `1.5GiB` (powers of 1024); None where the text is none."""
    found = _SIZE.fullmatch(text.strip())
    return int(float(found[1]) * 2 ** _POWERS[found[2].upper()]) if found else None
