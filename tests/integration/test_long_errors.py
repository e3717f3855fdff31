"""Errors of 100 kB: clients of every protocol get the message without a traceback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zoo
from onnx import TensorProto, helper
from running import StartServer

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import Client

pytestmark = pytest.mark.server

LONG = "ä" * 50_000


@pytest.mark.slow
def test_message_over_both_protocols(start_server: StartServer, tmp_path: Path) -> None:
    values = [zoo.value("x", ("batch", 2), TensorProto.INT64)], [zoo.value("y", ("batch", 2))]
    gather = helper.make_node("Gather", ["table", "x"], ["y"], name=LONG)
    table = {"table": np.zeros(3, np.float32)}
    zoo.add(tmp_path / "store", "wordy", zoo.model([gather], *values, table))
    unknown = helper.make_node(LONG, ["x"], ["y"])
    zoo.add(tmp_path / "store", "broken", zoo.model([unknown], *values))
    zoo.add(tmp_path / "store", "broken", zoo.model([unknown], *values), version=2)
    server = start_server("--model-store", tmp_path / "store", "--model-control-mode=explicit", "--load-model=wordy")
    server.wait_ready()
    for url in (server.url, server.grpc_url):
        with Client(url) as client:
            with pytest.raises(ClientError, match=r"[Gg]ather.*bytes in all\)") as failed:
                client.model("wordy").infer({"x": np.array([[1, 7]])})
            with pytest.raises(ClientError, match=r"broken.*bytes in all") as refused:
                client.load("broken")
            for raised in (failed, refused):
                assert len(str(raised.value).encode()) < 5000
                assert "At:" not in str(raised.value)
            reasons = [model.reason for model in client.models() if model.name == "broken"]
            assert all("bytes in all" in reason and "\n" not in reason for reason in reasons), reasons
