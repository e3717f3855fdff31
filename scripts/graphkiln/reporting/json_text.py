"""Documents as JSON that every reader takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(document: Any, *, indent: int | None = None, compact: bool = False) -> str:
    """A document as JSON; NaN and infinity, which JSON does not have, are null.

    Args:
        document: Of dictionaries, lists, texts and numbers.
        indent: Spaces of each level; None for one line.
        compact: No space between its parts.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(document, indent=indent, separators=separators, allow_nan=False)
    except ValueError:
        return json.dumps(finite(document), indent=indent, separators=separators, allow_nan=False)


def finite(value: Any) -> Any:
    """A document in which NaN and infinity are None."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
