"""Outcomes of a rolling update, the configuration of haproxy, and the pod for podman."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from aiohttp import web

from rolling import rolling_update, servers
from rolling.pods import on_this_machine
from rolling.rolling_update import Outcome, Question, roll, send
from rolling.servers import SERVE, Proxy, ServedProcess

DIGITS = Path(__file__).parents[2] / "model_repository" / "digits" / "1"
ZEROS = Question(np.zeros((1, 2), np.float32), np.zeros(10, np.float32))
Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


def test_haproxy_has_both_servers_and_does_not_retry(tmp_path: Path) -> None:
    proxy = Proxy(tmp_path, 4001, 4002)
    text = (tmp_path / "haproxy.cfg").read_text()
    assert f"bind 127.0.0.1:{proxy.port}" in text
    assert "server one 127.0.0.1:4001 check" in text
    assert "server two 127.0.0.1:4002 check" in text
    assert "retries 0" in text


def test_a_request_is_a_digit_in_the_protocol_of_the_server() -> None:
    body, headers = Question.golden(DIGITS).request()
    described = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
    (tensor,) = described["inputs"]
    content = np.frombuffer(body[int(headers["Inference-Header-Content-Length"]) :], np.float32)
    assert content.reshape(tensor["shape"]).nbytes == tensor["parameters"]["binary_data_size"] == 4096


def test_an_answer_with_other_scores_is_wrong() -> None:
    question = Question.golden(DIGITS)
    scores = question.scores.tolist()
    assert question.is_answered_by(json.dumps({"outputs": [{"data": scores}]}).encode())
    assert not question.is_answered_by(json.dumps({"outputs": [{"data": scores[::-1]}]}).encode())


def send_to(outcome: Outcome, respond: Respond, has_seen_enough: Callable[[], bool]) -> None:
    """Send requests to a server of aiohttp until there were enough."""

    async def run() -> None:
        stop = asyncio.Event()

        async def handle(request: web.Request) -> web.StreamResponse:
            await request.read()
            if has_seen_enough():
                stop.set()
            return await respond(request)

        app = web.Application()
        app.router.add_post("/", handle)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            await send(f"http://127.0.0.1:{runner.addresses[0][1]}/", ZEROS, outcome, stop)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_an_answer_without_the_outputs_is_a_failure() -> None:
    outcome = Outcome(200)
    answers = iter([(200, [0.0] * 10), (503, []), (200, [0.0] * 9)])

    async def respond(_: web.Request) -> web.Response:
        status, data = next(answers, (200, [0.0] * 10))
        return web.json_response({"outputs": [{"data": data}]}, status=status)

    send_to(outcome, respond, lambda: outcome.answered > 2)
    assert outcome.failed == {"HTTP 503": 1, "wrong answer": 1}
    assert outcome.answered > 2
    assert outcome.sent == outcome.answered + 2
    assert outcome.latency_ms.keys() == {"p50", "p99", "worst"}


def test_a_connection_that_is_cut_off_is_a_failure() -> None:
    outcome = Outcome(200)
    seen: list[web.Request] = []

    async def respond(request: web.Request) -> web.Response:
        seen.append(request)
        if len(seen) == 2 and request.transport:
            request.transport.close()
        return web.json_response({"outputs": [{"data": [0.0] * 10}]})

    send_to(outcome, respond, lambda: len(seen) > 5)
    assert list(outcome.failed.values()) == [1]
    assert outcome.answered == outcome.sent - 1


def test_a_server_that_does_not_get_ready_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "READY_S", 0.1)
    server = ServedProcess(tmp_path, tmp_path / "log", (sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(RuntimeError, match="did not get ready"), server:
        pytest.fail("it is not ready")
    assert server._process.poll() == -signal.SIGTERM


class Lasting(ServedProcess):
    """A server that is replaced without processes."""

    started: list[tuple[str, ...]]

    def start(self) -> None:
        self.started.append(tuple(self.command))

    def stop(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_a_round_brings_this_release_and_the_next_one_the_other_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    Lasting.started = []
    monkeypatch.setattr(rolling_update, "ServedProcess", Lasting)
    monkeypatch.setattr(rolling_update, "Proxy", MagicMock())
    outcome = asyncio.run(roll(10, 2, "", ["other", "serve"], pause=False))
    assert Lasting.started == [("other", "serve")] * 2 + [SERVE] * 2 + [("other", "serve")] * 2
    assert [release for release, _ in outcome.starts] == ["this"] * 2 + ["other"] * 2
    assert outcome.replacements == 4


def test_a_pod_gets_unique_names_and_ports() -> None:
    container = {
        "image": "graphkiln:0.1.0",
        "args": ["serve"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "models", "mountPath": "/models"}],
        **{probe: {"httpGet": {"port": "http"}} for probe in ("startupProbe", "readinessProbe", "livenessProbe")},
    }
    volumes = [
        {"name": "shm"},
        {"name": "models", "persistentVolumeClaim": {"claimName": "graphkiln-models"}},
        {"name": "tls", "secret": {"secretName": "cert"}},
    ]
    pod = {"containers": [container], "volumes": volumes}
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "graphkiln-models"}}
    deployment = {"kind": "Deployment", "metadata": {"name": "g"}, "spec": {"template": {"spec": pod}}}
    ports = {"http": 4000, "grpc": 4001, "metrics": 4002, "page": 4003}
    changed, played = on_this_machine([claim, deployment], "mine", ports, "image:test", {"cert": Path("/certificates")})
    assert changed["metadata"]["name"] == "mine"
    spec = played["spec"]["template"]["spec"]
    assert (played["metadata"]["name"], played["spec"]["replicas"]) == ("mine", 1)
    assert spec["volumes"] == [
        {"name": "models", "persistentVolumeClaim": {"claimName": "mine"}},
        {"name": "tls", "hostPath": {"path": "/certificates"}},
    ]
    (changed_container,) = spec["containers"]
    assert changed_container["image"] == "localhost/image:test"
    listening = ["--http-port=4000", "--grpc-port=4001", "--metrics-port=4002", "--page-address=:4003"]
    assert changed_container["args"] == ["serve", *listening]
    assert changed_container["livenessProbe"]["httpGet"]["port"] == 4000
    assert container["args"] == ["serve"], "the rendered manifest is unchanged"
