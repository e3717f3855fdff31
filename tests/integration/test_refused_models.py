"""A refused model on a real server: one line of the log, and what clients, the page and `doctor` say of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import zoo
from onnx import helper
from running import StartServer

from graphkiln_client import Client

pytestmark = pytest.mark.server


def unknown_operator() -> zoo.onnx.ModelProto:
    nodes = [helper.make_node("NoSuchOperator", ["x"], ["y"], domain="nowhere")]
    proto = zoo.model(nodes, [zoo.value("x", ("batch", 3))], [zoo.value("y", ("batch", 3))])
    proto.opset_import.add(domain="nowhere", version=1)
    return proto


@pytest.mark.parametrize("mode", ["none", pytest.param("explicit", marks=pytest.mark.wide)])
def test_its_reason_is_one_line(start_server: StartServer, tmp_path: Path, mode: str) -> None:
    store = tmp_path / "store"
    zoo.add(store, "good", zoo.scale(("batch", 3)), "max_batch_size: 4")
    zoo.add(store, "bad", unknown_operator(), "max_batch_size: 4 instance_group { count: 2 kind: KIND_CPU }")
    flags = ["--load-model=*"] if mode == "explicit" else []
    server = start_server("--model-store", store, f"--model-control-mode={mode}", *flags)
    server.wait_until(lambda: "serving HTTP" in server.log)
    lines = [line for line in server.log.splitlines() if "is not a registered function" in line]
    assert len(lines) == 1, "\n".join(lines)
    assert lines[0].startswith("graphkiln: bad version 1 is not served: ")
    assert str(store / "bad" / "1") in lines[0]
    assert "overlay" not in server.log
    assert not re.search("^[EW]\\d{4} .*bad", server.log, re.MULTILINE)
    assert server.status("/v2/health/ready") == 400
    (refused,) = [name for name in server.metrics() if name.startswith("graphkiln_version_refused")]
    assert 'model="bad",version="1",reason="cannot serve bad/1/model.onnx' in refused, (
        "without a key, and without paths"
    )
    with Client(server.url) as client:
        states = {model.name: model for model in client.models()}
    assert states["good"].ready
    assert "NoSuchOperator" in states["bad"].reason
