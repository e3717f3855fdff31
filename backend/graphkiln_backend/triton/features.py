"""Features of tritonserver by release; workarounds for older releases are not imported on newer ones.

Command-line flags are not listed here: `server.installation` reads them from `tritonserver --help`. docs/operations.md
lists other differences.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum

VERSION_VARIABLE = "GRAPHKILN_TRITON_VERSION"  # set by the supervisor, because a stub cannot query its server

_VERSION = re.compile(r"2\.(\d+)\.(\d+)")
_FIRST_MINOR, _FIRST_MONTH = 51, 24 * 12 + 9  # 2.51.0 is 24.10; since then one minor version a month,
_SHARED_MINOR = 59  # except that 2.59.0 is 25.06 and 2.59.1 is 25.07


class Feature(Enum):
    """A feature: the first release with it, and the behaviour before."""

    NUMPY_2 = "24.11", "stubs support only numpy 1: with numpy 2, response tensors are empty; `serve` refuses to start"
    RESPONSE_PARAMETERS = "25.02", "responses cannot say which version of a rollout answered"
    LIMITS_CHUNKS = "25.07", "chunked bodies are not limited: the edge rejects those above 32 kB"
    GIVES_UP_SILENT_STUBS = "25.08", "Triton waits forever for a stub that dies at once: the watchdog restarts"
    TEXTS_IN_CPP = "25.10", "the stub decodes string tensors in Python: `oversized_shapes` checks their shapes"

    @property
    def since(self) -> str:
        """First release with the feature, such as `25.10`."""
        return self.value[0]


def release_of(version: str) -> str:
    """Map a version of tritonserver to the release of NVIDIA's image: `2.51.0` to `24.10`; empty if unknown."""
    match = _VERSION.match(version)
    if not match:
        return ""
    minor, patch = map(int, match.groups())
    later = minor > _SHARED_MINOR or (minor == _SHARED_MINOR and patch > 0)
    year, month = divmod(_FIRST_MONTH + minor - _FIRST_MINOR + later, 12)
    return f"{year}.{month + 1:02}"


@dataclass(frozen=True, slots=True)
class TritonFeatures:
    """Features of a tritonserver.

    Attributes:
        version: Version such as `2.51.0`; an empty string (unknown) counts as the oldest.
    """

    version: str

    @classmethod
    def of_this_stub(cls) -> TritonFeatures:
        """Features of the server that this stub belongs to."""
        return cls(os.environ.get(VERSION_VARIABLE, ""))

    @property
    def release(self) -> str:
        """Release of NVIDIA's image, such as `24.10`; empty if unknown."""
        return release_of(self.version)

    def has(self, feature: Feature) -> bool:
        """Check for a feature."""
        return self.release >= feature.since
