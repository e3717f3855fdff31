"""`Client`: how it is opened."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client import Client


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match="use http://HOST:PORT, https://HOST:PORT"):
        Client("ftp://somewhere")
