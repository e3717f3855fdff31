"""What holds resources frees them at the end of a block."""

from __future__ import annotations

import pytest

from graphkiln_backend.system.closing import Closeable


class Resource(Closeable):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_the_block_gets_the_object_and_closes_it() -> None:
    resource = Resource()
    with resource as entered:
        assert entered is resource
        assert not resource.closed
    assert resource.closed == 1


def test_an_error_in_the_block_closes_it_and_goes_on() -> None:
    resource = Resource()
    with pytest.raises(ValueError, match="inside"), resource:
        raise ValueError("inside")
    assert resource.closed == 1
