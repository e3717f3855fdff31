"""What a model of `zoo.scale` multiplies by, which tells its versions apart."""

from __future__ import annotations

import numpy as np
from running import Server

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import Client


def factor(server: Server, model: str = "swap") -> float:
    """What a model multiplies by; 0 where it does not respond."""
    try:
        with Client(server.url, timeout_s=10) as client:
            return float(client.model(model).infer({"x": np.ones((1, 3), np.float32)})["y"][0, 0])
    except ClientError:
        return 0.0
