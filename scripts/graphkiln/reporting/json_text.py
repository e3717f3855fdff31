"""Standard JSON, without NaN and infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(document: Any, *, indent: int | None = None, compact: bool = False) -> str:
    """Serialize a document; NaN and infinity become null.

    Args:
        document: Dictionaries, lists, strings and numbers.
        indent: Spaces per level; None for one line.
        compact: Omit spaces after separators.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(document, indent=indent, separators=separators, allow_nan=False)
    except ValueError:
        return json.dumps(finite(document), indent=indent, separators=separators, allow_nan=False)


def finite(value: Any) -> Any:
    """Replace NaN and infinity in a document by None."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
