"""What came of a case."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

_PATHS = re.compile(r"(?:/[\w.+-]+){2,}/?")
_STACK = re.compile(r"\s*At:.*", re.DOTALL)
_LONGEST = 800


class Verdict(enum.StrEnum):
    """How an answer stands to the expected one."""

    PASSES = "passes"
    REFUSED = "refused"  # not served at all; the reason says why
    DIFFERS = "differs"  # answered with another value than the suite expects, within its tolerance
    FAILS = "fails"  # ready, and yet the request failed; or whatever asked it ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict and its reason; no reason where the case passes."""

    verdict: Verdict
    reason: str = ""

    @classmethod
    def of(cls, verdict: Verdict, reason: object) -> Outcome:
        """An outcome with a reason in one line, without the folders of this run."""
        text = _PATHS.sub("the file", _STACK.sub(" ", str(reason)))
        return cls(verdict, " ".join(text.split())[:_LONGEST])


PASSED = Outcome(Verdict.PASSES)
