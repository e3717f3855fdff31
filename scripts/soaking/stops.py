"""Stop servers under 100 requests a second: every request must be answered, and no connection reset.

scripts/soak --stops 20
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil

from graphkiln.story.server import LocalServer, start_server
from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, MeasurementError, ModelNotReady
from graphkiln_backend.server.edge_plan import find_haproxy
from graphkiln_client import Client
from soaking.models import DIGITS

_PERIOD_S = 0.04  # for each of four senders: 100 requests a second in total
_LOADED_S = 2.0
_STOP_S = 60.0
_SHAPE = [1, 1, 32, 32]
_IMAGE = {"INPUT_0": np.full(_SHAPE, 0.5, np.float32)}
_REQUEST = {"inputs": [{"name": "INPUT_0", "datatype": "FP32", "shape": _SHAPE, "data": [0.5] * 1024}]}
_SMALL = json.dumps(_REQUEST)
_LARGE = json.dumps({**_REQUEST, "parameters": {"padding": "x" * 600_000}})


class Sender(threading.Thread):
    """Send requests until connections are refused.

    Attributes:
        outcomes: Statuses and connection errors.
    """

    def __init__(self, port: int, body: str, *, keep: bool) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._body, self._keep = body, keep
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        """Send requests and count the outcomes."""
        while True:
            begun = time.monotonic()
            try:
                self._connection.request("POST", "/v2/models/digits/infer", self._body)
                response = self._connection.getresponse()
                response.read()
                self.outcomes[str(response.status)] += 1
            except ConnectionRefusedError:  # the server has exited
                return
            except (OSError, http.client.HTTPException) as error:
                self.outcomes[repr(error)] += 1
                self._connection.close()
            if not self._keep:
                self._connection.close()
            time.sleep(max(0.0, begun + _PERIOD_S - time.monotonic()))


def stop_under_load() -> Counter[str]:
    """Start a server behind the edge, load it, and stop it.

    Returns:
        Counts of outcomes: `200`, `503`, and others if something is wrong.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(start_server(DIGITS.parent, flags=("--edge=on",), log=folder / "log"))
        port = int(server.http_url.rpartition(":")[2])
        kinds = ((_SMALL, True), (_SMALL, True), (_LARGE, True), (_SMALL, False))
        senders = [Sender(port, body, keep=keep) for body, keep in kinds]
        for sender in senders:
            sender.start()
        time.sleep(_LOADED_S)
        grpc_errors = _end(server)
        for sender in senders:
            sender.join(_STOP_S)
        return sum((sender.outcomes for sender in senders), grpc_errors)


def _end(server: LocalServer) -> Counter[str]:
    """Send SIGTERM; return the outcomes of gRPC calls other than UNAVAILABLE."""
    outcomes: Counter[str] = Counter()
    with Client(server.grpc_url, max_retries=0) as client:
        model = client.model("digits")
        model.infer(_IMAGE)
        process = psutil.Process(server.pid)
        os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            try:
                model.infer(_IMAGE)
            except (ConnectionFailed, ModelNotReady):  # UNAVAILABLE
                pass
            except ClientError as error:
                outcomes[repr(error)] += 1
            time.sleep(_PERIOD_S)
    return outcomes


def check_stops(count: int) -> int:
    """Stop servers under load; print each outcome, and return the number of failures.

    Raises:
        MeasurementError: HAProxy is not installed.
    """
    if find_haproxy() is None:
        raise MeasurementError("HAProxy is not installed", hint="apt-get install haproxy")
    lost = 0
    for number in range(1, count + 1):
        outcomes = stop_under_load()
        lost += not set(outcomes) <= {"200", "503"}
        print(
            f"stop {number}/{count}: {', '.join(f'{each}: {outcomes[each]}' for each in sorted(outcomes))}", flush=True
        )
    return lost
