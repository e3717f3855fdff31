"""Access to administrative endpoints, with and without the key, over both protocols."""

from __future__ import annotations

import base64
import http.client
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest
import zoo
from running import Server, Serving, StartServer, run_command

from graphkiln_backend.graph.errors import Unauthorized
from graphkiln_backend.system.admin_key import HTTP_HEADER, find_key
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.wide]

_CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
_CONFIG = {"backend": "python", "max_batch_size": 0, "input": [], "output": []}


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server in explicit mode."""
    store, folder = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("explicit")
    zoo.add(store, "plain", zoo.identity(("n", 3), 1))
    with Serving(folder, "--model-store", store, "--model-control-mode=explicit") as server:
        server.wait_until(lambda: server.status("/v2/health/live") == 200)
        yield server


def post(server: Server, path: str, document: object, **headers: str) -> int:
    """Send a POST; return the status."""
    request = Request(f"{server.url}{path}", json.dumps(document).encode(), headers, method="POST")
    try:
        with urlopen(request) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


class TestRunningCode:
    def test_a_load_with_files_needs_the_key(self, explicit: Server, tmp_path: Path) -> None:
        """A load request may contain a Python model, which runs as the server's user."""
        marker = tmp_path / "ran"
        code = base64.b64encode(_CODE.format(marker=str(marker)).encode()).decode()
        load = {"parameters": {"config": json.dumps(_CONFIG), "file:1/model.py": code}}
        path = "/v2/repository/models/evil/load"
        assert post(explicit, path, load) == 403
        assert post(explicit, path, load, **{HTTP_HEADER: "wrong"}) == 403
        assert not marker.exists()
        key = {HTTP_HEADER: find_key("127.0.0.1", explicit.http_port)}
        post(explicit, path, load, **key)
        assert marker.exists(), "with the key the request runs code: the test would have seen it"
        assert post(explicit, "/v2/repository/models/evil/unload", {}, **key) == 200  # Triton removes its files

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v2/repository/index"),
            ("POST", "/v2/repository/models/plain/unload"),
            ("POST", "/v2/systemsharedmemory/region/r/register"),
            ("GET", "/v2/systemsharedmemory/status"),
            ("POST", "/v2/cudasharedmemory/unregister"),
            ("GET", "/v2/trace/setting"),
            ("POST", "/v2/models/plain/trace/setting"),
            ("POST", "/v2/logging"),
        ],
    )
    def test_administrative_requests_need_the_key(self, explicit: Server, method: str, path: str) -> None:
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(f"{explicit.url}{path}", data=b"{}" if method == "POST" else None, method=method))
        with caught.value:
            assert caught.value.code == 403


class TestKey:
    def test_another_key_is_refused_over_both_protocols(self, explicit: Server) -> None:
        for url in (explicit.url, explicit.grpc_url):
            with Client(url, admin_key="wrong") as client:
                for call in (client.models, lambda client=client: client.load("plain")):
                    with pytest.raises(Unauthorized, match="--admin-key-file"):
                        call()

    def test_shared_memory_with_the_key(self, explicit: Server) -> None:
        inputs = {"x": np.zeros((1, 3), np.float32)}
        for url in (explicit.url, explicit.grpc_url):
            with Client(url) as client:
                client.load("plain")
                with client.shared_memory() as shared:
                    assert shared.model("plain").infer(inputs)
            with (
                Client(url, admin_key="wrong") as client,
                client.shared_memory() as shared,
                pytest.raises(Unauthorized, match="--admin-key-file"),
            ):
                shared.model("plain").infer(inputs)

    def test_commands_find_the_key(self, explicit: Server) -> None:
        for url in (explicit.url, explicit.grpc_url):
            assert run_command("load", "plain", "--url", url).stdout == "plain: version 1 ready\n"
            assert "READY" in run_command("models", "--url", url).stdout
            assert run_command("unload", "plain", "--url", url).returncode == 0

    def test_error_without_key_says_what_to_do(self, explicit: Server, tmp_path: Path) -> None:
        elsewhere = {"XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
        refused = run_command("load", "plain", "--url", explicit.url, env=elsewhere)
        assert refused.returncode == 1
        assert "--admin-key-file FILE" in refused.stderr
        (tmp_path / "key").write_text(find_key("127.0.0.1", explicit.http_port))
        allowed = run_command(
            "load", "plain", "--url", explicit.url, "--admin-key-file", tmp_path / "key", env=elsewhere
        )
        assert allowed.returncode == 0


def test_only_loopback_is_bound(explicit: Server) -> None:
    """Every socket of the server is bound to the loopback interface."""
    supervisor = psutil.Process(explicit.process.pid)
    (triton,) = [each for each in supervisor.children() if each.name() == "tritonserver"]
    found = {
        each.laddr
        for process in (supervisor, triton)
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    assert {address.ip.removeprefix("::ffff:") for address in found} == {"127.0.0.1"}
    public = {explicit.http_port, explicit.grpc_port, explicit.metrics_port}
    assert public < {address.port for address in found}
    assert len(found) == 4, "tritonserver's metrics are behind the supervisor's"


@pytest.mark.slow
class TestBombs:
    def test_compressed_bomb_is_refused_and_others_are_served(
        self, start_server: StartServer, digits: Path, repository: Path
    ) -> None:
        """3 MB of gzip that inflate to 3 GB."""
        flags = ("--server-memory", "1500M")
        server = start_server("--model-store", digits.parent, *flags)
        server.wait_ready()
        (triton,) = [each for each in psutil.Process(server.process.pid).children() if each.name() == "tritonserver"]
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        with closing(connection):
            headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "0"}
            connection.request("POST", "/v2/models/digits/infer", bomb(3 << 30), headers)
            assert connection.getresponse().status == 500
        assert triton.memory_info().rss < 1500 << 20
        with Client(server.url) as client:
            assert client.model("digits").classify(repository / "docs" / "digits" / "seven.png").top.label == "seven"
        (again,) = [each for each in psutil.Process(server.process.pid).children() if each.name() == "tritonserver"]
        assert again == triton, "it was not restarted"


def bomb(size_bytes: int) -> bytes:
    """Compress zeros."""
    packer, chunk = zlib.compressobj(9, zlib.DEFLATED, 31), bytes(16 << 20)
    return b"".join(packer.compress(chunk) for _ in range(size_bytes // len(chunk))) + packer.flush()
