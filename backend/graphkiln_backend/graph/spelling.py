"""The hint of every "unknown name" error: the nearest known name, else the known ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """A hint for somebody who wrote a name that does not exist.

    Args:
        name: What was written.
        known: What could have been meant.
        prefix: Put before the name that is shown, for example `--`.
        otherwise: What to say when nothing is near; the known names when empty.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean '{prefix}{near[0]}'?"
    return otherwise or f"known: {', '.join(names) or 'none'}"
