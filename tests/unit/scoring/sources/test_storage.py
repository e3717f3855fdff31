"""What no memory should hold is refused by its size."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.files import UnusableFile
from graphkiln_backend.scoring.sources.places import IMAGE_LIMIT, check_size


def test_the_largest_image() -> None:
    check_size(IMAGE_LIMIT)
    with pytest.raises(UnusableFile, match=r"more than the 1(\.0)? GiB of an image"):
        check_size(IMAGE_LIMIT + 1)
