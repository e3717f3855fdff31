"""Tensors through shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from canned import INFERRED, CannedHttp, http

from graphkiln_backend.graph.errors import ServerError
from graphkiln_client import Client

X = {"X": np.arange(3, dtype=np.float32)}


def test_a_region_that_could_not_be_made_anew_is_not_used_again() -> None:
    """The server has forgotten the region, and cannot take another one at once."""
    metadata = http(b'{"name": "m", "inputs": [], "outputs": []}')
    done = http(b"{}")
    answers = [
        metadata,
        done,
        http(b"{}", "400 Bad"),
        http(b"{}", "404 No"),
        done,
        http(b"{}", "500 Oh"),
        done,
        INFERRED,
    ]
    with CannedHttp(answers) as server, Client(server.url) as client, client.shared_memory() as shared:
        model = shared.model("m")
        with pytest.raises(ServerError):
            model.infer(X)
        assert model.infer(X)["Y"] == [2]
