"""The hint of every "unknown name" error: the nearest known name, else the known ones."""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 40
"""Names that anybody reads."""


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """A hint for somebody who wrote a name that does not exist.

    Args:
        name: What was written.
        known: What could have been meant.
        prefix: Put before the name that is shown, for example `--`.
        otherwise: What to say when nothing is near; the known names when empty.
    """
    names = list(known)
    if near := nearest(name, names):
        return f"did you mean '{prefix}{near}'?"
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return otherwise or f"known: {', '.join(names[:_MOST]) or 'none'}{more}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like another one; empty where none is."""
    import difflib  # for who misspells

    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else ""
