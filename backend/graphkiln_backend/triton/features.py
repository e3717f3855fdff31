"""Behaviour of tritonserver by release: newer servers do not need all workarounds, and do not even import them.

Flags need no table: `server.installation` asks the program for them. docs/operations.md lists other differences.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum

VERSION_VARIABLE = "GRAPHKILN_TRITON_VERSION"  # set by the supervisor, as a stub cannot ask its server

_VERSION = re.compile(r"2\.(\d+)\.(\d+)")
_FIRST_MINOR, _FIRST_MONTH = 51, 24 * 12 + 9  # 2.51.0 is 24.10; one minor version a month since then
_SECOND_OF_ITS_MINOR = 59  # but 2.59.0 is 25.06 and 2.59.1 is 25.07


class Feature(Enum):
    """A behaviour: the release that brought it, and what holds before."""

    NUMPY_2 = "24.11", "stubs know numpy 1 alone: with numpy 2 the tensors of responses are empty; `serve` refuses"
    LIMITS_CHUNKS = "25.07", "chunked bodies have no limits: the edge passes none of more than 32 kB"
    GIVES_UP_SILENT_STUBS = "25.08", "a stub that dies at once is waited for without an end: the watchdog restarts"
    TEXTS_IN_CPP = "25.10", "the stub makes arrays of texts in Python: `text_shapes` checks their shapes"

    @property
    def since(self) -> str:
        """The release of NVIDIA's image that brought it, such as `25.10`."""
        return self.value[0]


def release_of(version: str) -> str:
    """The release of NVIDIA's image that a version of tritonserver belongs to: `24.10` for `2.51.0`; or empty."""
    found = _VERSION.match(version)
    if not found:
        return ""
    minor, patch = map(int, found.groups())
    later = minor > _SECOND_OF_ITS_MINOR or (minor == _SECOND_OF_ITS_MINOR and patch > 0)
    year, month = divmod(_FIRST_MONTH + minor - _FIRST_MINOR + later, 12)
    return f"{year}.{month + 1:02}"


@dataclass(frozen=True, slots=True)
class TritonFeatures:
    """What a tritonserver does.

    Attributes:
        version: Such as `2.51.0`; empty where it is not known, which counts as the oldest.
    """

    version: str

    @classmethod
    def of_this_stub(cls) -> TritonFeatures:
        """Those of the server that this stub belongs to."""
        return cls(os.environ.get(VERSION_VARIABLE, ""))

    @property
    def release(self) -> str:
        """The release of NVIDIA's image, such as `24.10`; empty where it is not known."""
        return release_of(self.version)

    def has(self, feature: Feature) -> bool:
        """True if the server behaves so."""
        return self.release >= feature.since
