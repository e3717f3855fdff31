"""Finds the nodes that must keep their precision: a set of which none can be left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def smallest_kept(names: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Finds a minimal set of nodes with which a test passes.

    Args:
        names: All nodes; keeping all of them passes, which is not tested.
        passes: Whether the test passes while some of them are kept. What passes must pass with more of them, too.

    Returns:
        Their names; empty when the test passes without any.

    Source: Junker, "QuickXplain", 2004: halves the set, and tests each half with the other kept.
    """

    def needed(among: Sequence[str], kept: Sequence[str]) -> list[str]:
        if len(kept) == len(names) or passes(kept):
            return []
        if len(among) == 1:
            return list(among)
        first, second = among[: len(among) // 2], among[len(among) // 2 :]
        from_first = needed(first, [*kept, *second])
        return [*from_first, *needed(second, [*kept, *from_first])]

    return tuple(needed(names, []))
