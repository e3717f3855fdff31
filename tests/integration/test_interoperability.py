"""Other clients against our server: `clients/` has them as their users would write them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running import Server

pytestmark = pytest.mark.server

CLIENTS = Path(__file__).parent / "clients"


def shown_by(*command: str | Path) -> bytes:
    finished = subprocess.run(
        list(map(str, command)), capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False
    )
    assert finished.returncode == 0, finished.stderr.decode()
    return finished.stdout


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_plain_tritonclient(server: Server, protocol: str) -> None:
    address = (server.url if protocol == "http" else server.grpc_url).rpartition("/")[2]
    shown = shown_by(sys.executable, CLIENTS / "plain_tritonclient.py", protocol, address)
    assert shown.count(b"b'") == 2
    assert shown.count(b":") == 4, "score, index and label"


def test_curl_with_a_raw_body(server: Server, tmp_path: Path) -> None:
    tensor = tmp_path / "tensor.bin"
    tensor.write_bytes(np.zeros((1, 1, 32, 32), np.float32).tobytes())
    answer = shown_by(CLIENTS / "raw_body.sh", server.url, tensor)
    header, scores = answer[:-40], np.frombuffer(answer[-40:], np.float32)  # raw in, raw out
    assert json.loads(header)["outputs"][0]["shape"] == [1, 10]
    assert scores.sum() == pytest.approx(1, abs=1e-5)


def test_grpc_from_generated_stubs(server: Server) -> None:
    address = server.grpc_url.rpartition("/")[2]
    assert shown_by(sys.executable, CLIENTS / "generated_stubs.py", address).strip() == b"[1, 10] 40"
