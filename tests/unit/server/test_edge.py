"""HAProxy in front of a plain server in place of tritonserver."""

from __future__ import annotations

import errno
import http.client
import http.server
import itertools
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
import trustme
from certificates import write
from running import free_ports
from waiting import wait_until

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import edge as module
from graphkiln_backend.server.access import Access, AdminKey
from graphkiln_backend.server.edge import Edge, EdgePlan, behind_edge, find_haproxy
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.tls import TlsFiles
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER
from graphkiln_backend.system.signals import ending_on_signals
from graphkiln_backend.triton.features import TritonFeatures

needs_haproxy = pytest.mark.skipif(find_haproxy() is None, reason="HAProxy is not installed")
# HAProxy is started again from a thread.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

KEY = "a-very-secret-key"
KNOWN = dict.fromkeys(
    (
        *(f"{kind}-{service}" for service in ("http", "grpc", "metrics") for kind in ("allow",)),
        *(f"{service}-{kind}" for service in ("http", "grpc", "metrics") for kind in ("port", "address")),
        *("grpc-use-ssl", "http-restricted-api", "grpc-restricted-protocol"),
    ),
    True,
)


def parse(*arguments: str, host: str = "127.0.0.1") -> TritonFlags:
    return TritonFlags.parse(arguments, KNOWN, host)


class Inner(http.server.BaseHTTPRequestHandler):
    """Returns what it got: for `/wait/SECONDS` later, for `/held` once it is released."""

    protocol_version = "HTTP/1.1"
    released: threading.Event

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.answer(b"".join(iter(self.chunk, b"")))
        else:
            self.answer(self.rfile.read(int(self.headers.get("Content-Length", "0"))))

    def chunk(self) -> bytes:
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    def answer(self, body: bytes) -> None:
        if self.path.startswith("/wait/"):
            time.sleep(float(self.path.removeprefix("/wait/")))
        elif self.path == "/held":
            self.released.wait(30)
        answer = json.dumps({"path": self.path, "headers": dict(self.headers), "bytes": len(body)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


class InnerServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """HAProxy was killed."""


class Front:
    """An edge, and clients of it."""

    def __init__(self, plan: EdgePlan, edge: Edge) -> None:
        self.plan, self.edge = plan, edge
        self.ports = {name: address.port for name, address in plan.services().items()}
        self.answers: list[int] = []
        Inner.released = threading.Event()

    @contextmanager
    def held(self, context: ssl.SSLContext | None = None) -> Iterator[None]:
        """Holds one request in flight until the end of the block, which adds its status to `answers`."""
        asking = threading.Thread(target=lambda: self.answers.append(self.ask("/held", context=context)[0]))
        asking.start()
        wait_until(lambda: self.edge.in_flight()["http"] == 1)
        try:
            yield
        finally:
            Inner.released.set()
            asking.join(30)

    def is_refused(self) -> bool:
        try:
            self.ask()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it was pending when the listener was closed
            return False
        return False

    def ask(
        self, path: str = "/v2", body: bytes | None = None, context: ssl.SSLContext | None = None, **headers: str
    ) -> tuple[int, dict[str, object], http.client.HTTPResponse]:
        port = self.ports["http"]
        connection = (
            http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
            if context
            else http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        )
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read()), response
        finally:
            connection.close()

    def send(self, text: bytes) -> bytes:
        """Sends bytes as they are; returns the first ones that come back."""
        with socket.create_connection(("127.0.0.1", self.ports["http"]), timeout=30) as connection:
            connection.sendall(text)
            return connection.recv(4096)

    def call(self, method: str, **metadata: str) -> tuple[grpc.StatusCode, str]:
        """Calls a method of Triton's service without a message."""
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['grpc']}") as channel:
            called = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                called(b"", timeout=30, metadata=[(name.replace("_", "-"), value) for name, value in metadata.items()])
            return caught.value.code(), caught.value.details()


OpenFront = Callable[..., Front]


def start(
    stack: ExitStack, *flags: str, key: str = KEY, tls: TlsFiles | None = None, rate: int = 0, admit: bool = True
) -> Front:
    """Starts an edge in front of a plain server for HTTP and metrics."""
    ports = free_ports(3)
    arguments = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    users = parse(*arguments, *flags)
    access = Access.plan(users, AdminKey(key) if key else None)
    plan = EdgePlan.choose("on", users, access, tls, rate=rate)
    assert plan is not None
    for service in ("http", "metrics"):
        if address := plan.inner.listen_address(service):
            server = InnerServer((address.host, address.port), Inner)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
    edge = stack.enter_context(Edge(plan))
    if admit:
        edge.admit()
    return Front(plan, edge)


@pytest.fixture
def open_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenFront]:
    """Starts edges, of which nothing may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_LONG_PAUSE_S", 0.05)
    with ExitStack() as stack:
        yield partial(start, stack)
    assert list(tmp_path.glob("graphkiln-*")) == []


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """One that tests leave as it is."""
    with ExitStack() as stack:
        yield start(stack)


def kill(pid: int) -> None:
    """Kills a child and waits until it has died."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def trust(authority: trustme.CA, own: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if own:
        own.configure_cert(context)
    return context


class TestPlan:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "find_haproxy", lambda: Path("/haproxy"))

    FILES = TlsFiles(certificate=Path("/c"), key=Path("/k"))

    @pytest.mark.parametrize(
        ("mode", "host", "tls", "used"),
        [
            ("auto", "127.0.0.1", None, False),
            ("auto", "0.0.0.0", None, True),
            ("auto", "127.0.0.1", FILES, True),
            ("on", "127.0.0.1", None, True),
            ("off", "0.0.0.0", None, False),
        ],
    )
    def test_it_is_used_beyond_this_machine_and_for_tls(
        self, mode: str, host: str, tls: TlsFiles | None, used: bool
    ) -> None:
        assert (EdgePlan.choose(mode, parse(host=host), Access(), tls) is not None) == used

    @pytest.mark.parametrize(("mode", "tls", "rate"), [("on", None, 0), ("auto", FILES, 0), ("auto", None, 5)])
    def test_without_haproxy_what_needs_it_is_an_error(
        self, mode: str, tls: TlsFiles | None, rate: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "find_haproxy", lambda: None)
        with pytest.raises(ServerSetupError, match="apt-get install haproxy"):
            EdgePlan.choose(mode, parse(), Access(), tls, rate=rate)

    def test_without_haproxy_an_open_server_is_one_warning(
        self, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        monkeypatch.setattr(module, "find_haproxy", lambda: None)
        assert EdgePlan.choose("auto", parse(host="0.0.0.0"), Access(), None) is None
        assert len(logged) == 1
        assert "apt-get install haproxy" in logged[0]

    @pytest.mark.parametrize(("version", "used"), [("2.51.0", True), ("2.70.0", False)])
    def test_a_server_that_limits_chunks_gets_them(self, version: str, used: bool) -> None:
        plan = EdgePlan.choose("on", parse(), Access(), None, features=TritonFeatures(version))
        assert plan is not None
        assert ("411" in plan.shown()) == used

    def test_off_with_tls_and_an_unknown_mode(self) -> None:
        with pytest.raises(ServerSetupError, match="leave out --edge off"):
            EdgePlan.choose("off", parse(), Access(), self.FILES)
        with pytest.raises(ServerSetupError, match="no such mode"):
            EdgePlan.choose("always", parse(), Access(), None)

    def test_tritonserver_moves_to_the_loopback_interface(self) -> None:
        inner = behind_edge(parse("--http-port=9000", "--metrics-address=10.0.0.2", host="::"))
        addresses = inner.listen_addresses()
        assert {address.host for address in addresses} == {"127.0.0.1"}
        assert len({address.port for address in addresses} - {9000, 8001, 8002}) == 3
        assert inner.arguments[0] == "--http-port=9000"
        assert f"--http-port={addresses[0].port}" in inner.arguments[1:], "the last one counts"

    def test_metrics_of_tritonserver_move_behind_those_of_the_supervisor(self) -> None:
        flags = parse("--http-port=9000", "--metrics-port=9002", host="0.0.0.0")
        inner = behind_edge(flags)
        triton = inner.on_loopback(["metrics"], flags.listen_addresses())
        assert triton.listen_address("http") == inner.listen_address("http")
        ports = [address.port for address in (*flags.listen_addresses(), *inner.listen_addresses())]
        address = triton.listen_address("metrics")
        assert address
        assert address.host == "127.0.0.1"
        assert address.port not in ports
        assert parse("--allow-metrics=false").on_loopback(["metrics"]) == parse("--allow-metrics=false")

    def test_grpc_with_the_users_own_tls_stays_where_it_is(self) -> None:
        plan = EdgePlan.choose("on", parse("--grpc-use-ssl=true"), Access(), None)
        assert plan is not None
        assert [*plan.services()] == ["http", "metrics"]
        assert plan.inner.listen_address("grpc") == plan.public.listen_address("grpc")

    def test_what_is_shown_holds_no_secret_and_names_the_addresses(self) -> None:
        access = Access.plan(parse(), AdminKey(KEY))
        plan = EdgePlan.choose("on", parse(), access, self.FILES, rate=7)
        assert plan is not None
        shown = plan.shown()
        assert KEY not in shown
        assert "127.0.0.1:8000" in shown
        assert "7 requests a second" in shown


@needs_haproxy
def test_every_configuration_is_one_of_haproxys(tmp_path: Path) -> None:
    program = find_haproxy()
    assert program is not None
    authority = trustme.CA()
    mutual = write(authority.issue_cert("127.0.0.1"), tmp_path, authority)
    (tmp_path / "server.pem").write_text(mutual.bundle())
    (tmp_path / "clients.pem").write_text(mutual.authorities())
    (tmp_path / "key").write_text(KEY)
    secured = (None, replace(mutual, client_authorities=None), mutual)
    own = "--http-restricted-api=trace:a=b"
    users = ((), (own,), ("--allow-grpc=false",), ("--allow-http=false",), ("--allow-metrics=false",))
    others = itertools.cycle([(AdminKey(KEY), 0, True), (None, 9, False), (AdminKey(KEY), 9, True), (None, 0, True)])
    for number, ((tls, words), (key, rate, whole)) in enumerate(zip(itertools.product(secured, users), others)):  # noqa: B905
        flags = parse(*words)
        plan = EdgePlan(
            program=program,
            public=flags,
            inner=behind_edge(flags),
            access=Access.plan(flags, key),
            tls=tls,
            rate=rate,
            whole_bodies=whole,
        )
        with ExitStack() as stack:
            sockets = {
                name: stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                for name in ("control", *plan.services())
            }
            file = tmp_path / f"{number}.cfg"
            file.write_text(plan.configuration(tmp_path, {name: each.fileno() for name, each in sockets.items()}))
            checked = subprocess.run(
                [program, "-c", "-f", file],
                pass_fds=[each.fileno() for each in sockets.values()],
                capture_output=True,
                text=True,
                check=False,
            )
        assert checked.returncode == 0, checked.stderr + file.read_text()
        assert "WARNING" not in checked.stderr, checked.stderr


@needs_haproxy
class TestRequests:
    def test_until_it_is_live_and_while_it_restarts(self, open_front: OpenFront) -> None:
        front = open_front(admit=False)
        for _ in range(2):
            status, body, response = front.ask("/v2/models/m/infer", b"x" * 1_000_000)  # read whole, not reset
            assert status == 503
            assert body == {"error": "the server restarts, try again in a few seconds"}
            assert (response.getheader("Retry-After"), response.getheader("Connection")) == ("1", "close")
            assert front.call("ModelInfer") == (grpc.StatusCode.UNAVAILABLE, body["error"])
            front.edge.admit()
            assert front.ask("/v2", b"x" * 1_000_000)[1]["bytes"] == 1_000_000
            front.edge.refuse()

    def test_a_server_that_has_just_died(self, open_front: OpenFront) -> None:
        front = open_front("--allow-http=false")
        assert front.call("ModelInfer")[0] == grpc.StatusCode.UNAVAILABLE, "nothing listens behind it"

    def test_clients_and_request_headers_are_passed_on(self, front: Front) -> None:
        status, body, _ = front.ask(
            "/v2/models/m/infer", b"{}", **{"Inference-Header-Content-Length": "2", "Accept-Encoding": "gzip"}
        )
        assert status == 200
        headers = {name.lower(): value for name, value in body["headers"].items()}  # type: ignore[attr-defined]
        assert headers["inference-header-content-length"] == "2"
        assert headers["accept-encoding"] == "gzip"
        assert headers["x-forwarded-for"] == "127.0.0.1"

    def test_a_connection_to_the_server_ends_with_a_request_of_http_1_0(self, front: Front) -> None:
        """Triton answers it without a length."""
        with socket.create_connection(("127.0.0.1", front.ports["http"]), timeout=30) as connection:
            connection.sendall(b"GET /v2 HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert b"keep-alive" not in answer.lower()
        wait_until(lambda: front.edge.in_flight()["http-1.0"] == 0)

    def test_metrics_do_not_wait_until_it_is_live(self, open_front: OpenFront) -> None:
        front = open_front(admit=False)
        connection = http.client.HTTPConnection("127.0.0.1", front.ports["metrics"], timeout=30)
        with closing(connection):
            connection.request("GET", "/metrics")
            assert connection.getresponse().status == 200

    def test_metrics_of_both(self, front: Front) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", front.ports["metrics"], timeout=30)
        for path, expected in (("/metrics", b'"/metrics"'), ("/edge/metrics", b"haproxy_frontend_http_requests_total")):
            connection.request("GET", path)
            assert expected in connection.getresponse().read()
        connection.close()

    @pytest.mark.parametrize(
        "path",
        [
            "/v2/repository/index",
            "/v2/repository/models/m/load",
            "/v2/%72epository/index",
            "/v2/systemsharedmemory/region/r/register",
            "/v2/cudasharedmemory/status",
            "/v2/trace/setting",
            "/v2/models/m/trace/setting",
            "/v2/logging",
        ],
    )
    def test_what_changes_the_server_needs_the_key(self, front: Front, path: str) -> None:
        for headers in ({}, {HTTP_HEADER: "another"}, {HTTP_HEADER: f"{KEY},{KEY}"}):
            status, body, _ = front.ask(path, b"{}", **headers)
            assert (status, body) == (403, {"error": f"This API is restricted, expecting header '{HTTP_HEADER}'"})
        assert front.ask(path, b"{}", **{HTTP_HEADER: KEY})[0] == 200

    def test_what_does_not_needs_none(self, front: Front) -> None:
        for path in ("/v2", "/v2/models/trace/infer", "/v2/models/m/config", "/v2/health/ready", "/v2/models/stats"):
            assert front.ask(path, b"{}")[0] == 200
        assert front.ask("/v2/health/ready", b"", **{HTTP_HEADER: "another"})[0] == 200

    @pytest.mark.parametrize(
        "method", ["RepositoryModelLoad", "SystemSharedMemoryStatus", "TraceSetting", "LogSettings"]
    )
    def test_nor_over_grpc(self, front: Front, method: str) -> None:
        code, reason = front.call(method)
        assert code == grpc.StatusCode.UNAVAILABLE
        assert reason == f"This protocol is restricted, expecting header '{GRPC_HEADER}'"
        assert "restricted" not in front.call(method, **{GRPC_HEADER: KEY})[1]
        assert "restricted" not in front.call("ModelInfer")[1]

    def test_the_users_own_restrictions_are_tritons(self, open_front: OpenFront) -> None:
        front = open_front("--http-restricted-api=model-repository:own=word")
        assert front.ask("/v2/repository/index", b"")[0] == 200
        assert front.ask("/v2/logging")[0] == 403

    def test_without_a_key_all_is_open(self, open_front: OpenFront) -> None:
        assert open_front(key="").ask("/v2/repository/index", b"")[0] == 200

    def test_a_rate_for_each_client_spares_health_checks(self, open_front: OpenFront) -> None:
        front = open_front(rate=5)
        statuses = [front.ask()[0] for _ in range(20)]
        assert statuses[:5] == [200] * 5
        assert 429 in statuses
        assert front.call("ModelInfer")[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [front.ask("/v2/health/ready")[0] for _ in range(20)] == [200] * 20

    @pytest.mark.parametrize(
        "head", [b"GET / HTTP/1.1\r\nHost: a\r\nBad header: 1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nX\r\n\r\n"]
    )
    def test_malformed_headers_do_not_pass(self, front: Front, head: bytes) -> None:
        assert front.send(head).startswith(b"HTTP/1.1 400")

    def test_headers_without_end_are_refused(self, front: Front) -> None:
        answer = b""
        with socket.create_connection(("127.0.0.1", front.ports["http"]), timeout=30) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
            with suppress(OSError):
                for number in range(20_000):
                    connection.sendall(b"x-%d: %s\r\n" % (number, b"y" * 5000))
            with suppress(OSError):
                answer = connection.recv(4096)
        assert answer[:12] in (b"HTTP/1.1 400", b"")
        assert psutil.Process(front.edge.pid).memory_info().rss < 200 << 20
        assert front.ask()[0] == 200

    def test_chunks(self, front: Front) -> None:
        """Few bytes pass, in however many chunks; many need a length."""

        def chunked(size: int, count: int) -> bytes:
            chunk = b"%x\r\n%s\r\n" % (size, b"x" * size)
            head = b"POST /v2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            return front.send(head + chunk * count + b"0\r\n\r\n")

        answer = chunked(2, 10_000)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"bytes": 20000' in answer
        assert chunked(1000, 100).startswith(b"HTTP/1.1 411")

    def test_slow_senders(self, open_front: OpenFront, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_SLOW_S", 1)
        front = open_front()
        for head in (b"POST /v2 HTT", b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nx"):
            assert front.send(head).startswith(b"HTTP/1.1 408")
        assert front.ask("/wait/1.2")[0] == 200, "a server may take its time"

    def test_many_connections(self, front: Front) -> None:
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection(("127.0.0.1", front.ports["http"]), timeout=30))
            assert front.ask()[0] == 200


@needs_haproxy
class TestTls:
    @pytest.fixture
    def authority(self) -> trustme.CA:
        return trustme.CA()

    def test_http(self, open_front: OpenFront, authority: trustme.CA, tmp_path: Path) -> None:
        front = open_front(tls=write(authority.issue_cert("127.0.0.1"), tmp_path))
        assert front.ask("/v2", os.urandom(3 << 20), trust(authority))[1]["bytes"] == 3 << 20
        with pytest.raises(ssl.SSLCertVerificationError):
            front.ask(context=trust(trustme.CA()))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("graphkiln-*/*")}
        assert modes["server.pem"] == modes["key"] == 0o600

    def test_mutual(self, open_front: OpenFront, authority: trustme.CA, tmp_path: Path) -> None:
        front = open_front(tls=write(authority.issue_cert("127.0.0.1"), tmp_path, authority))
        own = authority.issue_cert("someone@example.org")
        assert front.ask(context=trust(authority, own))[0] == 200
        for refused in (trust(authority), trust(authority, trustme.CA().issue_cert("a@example.org"))):
            with pytest.raises((OSError, http.client.HTTPException)):
                front.ask(context=refused)

    def test_files_that_change(
        self,
        open_front: OpenFront,
        authority: trustme.CA,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        logged: list[str],
    ) -> None:
        """Another HAProxy serves a new certificate and ends the old one's connections; a broken one changes nothing."""
        monkeypatch.setattr(module, "_CHECK_S", 0.05)
        front = open_front(tls=write(authority.issue_cert("127.0.0.1"), tmp_path, authority))
        first = front.edge.pid
        context = trust(authority, authority.issue_cert("a@example.org"))
        (tmp_path / "cert.pem").write_text("broken")
        wait_until(lambda: any("cannot be used" in line for line in logged))
        assert front.ask(context=context)[0] == 200
        assert front.edge.pid == first
        other = trustme.CA()
        connection = http.client.HTTPSConnection("127.0.0.1", front.ports["http"], context=context, timeout=30)
        connection.request("GET", "/v2")
        connection.getresponse().read()
        write(other.issue_cert("127.0.0.1"), tmp_path, other)
        renewed = trust(other, other.issue_cert("a@example.org"))
        wait_until(lambda: self.is_served(front, renewed))
        wait_until(lambda: not self.is_served(front, context))  # the old one may accept for a moment
        connection.request("GET", "/v2")
        assert connection.getresponse().status == 200, "a connection of before is still served"
        connection.close()
        renewed.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", front.ports["grpc"]), timeout=30) as bare,
            renewed.wrap_socket(bare, server_hostname="127.0.0.1") as secured,
        ):
            assert secured.selected_alpn_protocol() == "h2", "gRPC needs it"
        renewed.set_alpn_protocols(["http/1.1"])
        second = front.edge.pid
        assert second != first
        kill(second)
        assert front.ask(context=renewed)[0] == 200, "the next one serves it, too"
        wait_until(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE)

    def test_requests_of_a_replaced_haproxy_are_counted(
        self, open_front: OpenFront, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A drain waits for them. Another HAProxy accepts no control connections once it stops softly."""
        monkeypatch.setattr(module, "_CHECK_S", 0.05)
        front = open_front(tls=write(authority.issue_cert("127.0.0.1"), tmp_path))
        first = front.edge.pid
        with front.held(trust(authority)):
            for _ in range(2):
                before = front.edge.pid
                write(authority.issue_cert("127.0.0.1"), tmp_path)
                wait_until(lambda before=before: front.edge.pid != before)
            front.edge.refuse()
            assert front.ask(context=trust(authority))[0] == 503
            assert front.edge.in_flight() == {"http": 1, "http-1.0": 0, "grpc": 0, "streams": 0}
            os.kill(first, 0)
        assert front.answers == [200]
        wait_until(lambda: not any(front.edge.in_flight().values()))
        wait_until(lambda: not psutil.pid_exists(first))

    def test_another_haproxy_that_does_not_respond(
        self,
        open_front: OpenFront,
        authority: trustme.CA,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        logged: list[str],
    ) -> None:
        monkeypatch.setattr(module, "_CHECK_S", 0.05)
        front = open_front(tls=write(authority.issue_cert("127.0.0.1"), tmp_path))
        first = front.edge.pid
        monkeypatch.setattr(module, "_START_S", 0.5)
        monkeypatch.setattr(module, "_ANSWER_S", 1.0)
        monkeypatch.setattr(Edge, "_command", lambda *_: ["sleep", "1000"])
        write(authority.issue_cert("127.0.0.1"), tmp_path)
        wait_until(lambda: any("did not respond" in line for line in logged))
        assert front.edge.pid == first
        assert front.ask(context=trust(authority))[0] == 200, "the old one goes on"

    def test_a_stop_does_not_wait_for_another_haproxy(
        self, open_front: OpenFront, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_CHECK_S", 0.05)
        front = open_front(tls=write(authority.issue_cert("127.0.0.1"), tmp_path))
        first = front.edge.pid
        monkeypatch.setattr(module, "_START_S", 100.0)
        monkeypatch.setattr(module, "_ANSWER_S", 0.5)
        with monkeypatch.context() as patch:
            patch.setattr(Edge, "_command", lambda *_: ["sleep", "1000"])
            write(authority.issue_cert("127.0.0.1"), tmp_path)
            wait_until(lambda: front.edge.pid != first)
            begun = time.monotonic()
            front.edge.refuse()
            assert time.monotonic() - begun < 30
            assert front.edge.pid == first
        assert front.ask(context=trust(authority))[0] == 503

    def test_a_full_disk_delays_a_renewal(
        self,
        open_front: OpenFront,
        authority: trustme.CA,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        logged: list[str],
    ) -> None:
        front = open_front(tls=write(authority.issue_cert("127.0.0.1"), tmp_path))
        first = front.edge.pid

        def fail(_: Edge) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(module, "_CHECK_S", 0.05)
            patch.setattr(Edge, "_write_files", fail)
            other = trustme.CA()
            write(other.issue_cert("127.0.0.1"), tmp_path)
            wait_until(lambda: sum("retrying: [Errno 28]" in line for line in logged) > 2)
            assert front.edge.pid == first
            front.edge.in_flight()  # its control socket answers
            assert front.ask(context=trust(authority))[0] == 200, "the old certificate is still served"
        monkeypatch.setattr(module, "_CHECK_S", 0.05)
        wait_until(lambda: self.is_served(front, trust(other)))

    def is_served(self, front: Front, context: ssl.SSLContext) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return front.ask(context=context)[0] == 200
        return False


@needs_haproxy
class TestLife:
    def test_one_that_is_killed_is_started_again_and_clients_wait(
        self, open_front: OpenFront, logged: list[str]
    ) -> None:
        front = open_front()
        first = front.edge.pid
        kill(first)
        assert front.ask()[0] == 200, "the listener has kept the client waiting"
        assert front.edge.pid != first
        assert any("restarting it" in line for line in logged)

    def test_one_that_hangs_is_replaced(
        self, open_front: OpenFront, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        monkeypatch.setattr(module, "_CHECK_S", 0.05)
        monkeypatch.setattr(module, "_ANSWER_S", 1.0)
        front = open_front()
        first = front.edge.pid
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: front.edge.pid != first)
        assert front.ask()[0] == 200
        assert any("does not respond" in line for line in logged)

    @pytest.mark.parametrize("killed", [False, True], ids=["the first", "one that was started again"])
    def test_requests_in_flight_are_counted_and_end_before_it_leaves(self, open_front: OpenFront, killed: bool) -> None:
        front = open_front()
        if killed:
            kill(front.edge.pid)
        idle = http.client.HTTPConnection("127.0.0.1", front.ports["http"], timeout=30)
        idle.request("GET", "/v2")
        idle.getresponse().read()
        with front.held():
            front.edge.refuse()
            assert front.ask()[0] == 503
            front.edge.leave()
            wait_until(front.is_refused)  # HAProxy handles signals between other events
            idle.request("GET", "/v2")
            response = idle.getresponse()
            assert (response.status, response.will_close) == (503, True)
        assert front.answers == [200]
        idle.close()

    def test_closing_ends_requests_in_flight_in_order(
        self, open_front: OpenFront, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As where a signal comes while tritonserver is started again."""
        monkeypatch.setattr(module, "_SOFT_STOP_S", 30.0)
        front = open_front()
        with front.held():
            ending = threading.Thread(target=front.edge.close)
            ending.start()
            wait_until(front.is_refused)
        ending.join(30)
        assert front.answers == [200]

    @pytest.mark.alone
    def test_a_signal_during_closing_ends_all_at_once(
        self, open_front: OpenFront, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_SOFT_STOP_S", 200.0)
        front = open_front()
        child = psutil.Process(front.edge.pid)
        with socket.create_connection(("127.0.0.1", front.ports["http"]), timeout=30) as idle:
            idle.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert idle.recv(1 << 16).startswith(b"HTTP/1.1 200")
            begun = time.monotonic()
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(SystemExit), ending_on_signals():
                front.edge.close()
        assert time.monotonic() - begun < 60
        assert not child.is_running()

    def test_closing_ends_idle_connections(self, open_front: OpenFront, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_SOFT_STOP_S", 0.1)
        front = open_front()
        with socket.create_connection(("127.0.0.1", front.ports["http"]), timeout=30) as idle:
            idle.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert idle.recv(1 << 16).startswith(b"HTTP/1.1 200")
            front.edge.close()
            assert idle.recv(1) == b""

    def test_a_port_in_use_and_a_haproxy_that_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with socket.create_server(("127.0.0.1", 0)) as holder:
            plan = EdgePlan.choose("on", parse(f"--http-port={holder.getsockname()[1]}"), Access(), None)
            assert plan is not None
            with pytest.raises(ServerSetupError, match="HTTP"):
                Edge(plan)
        (http_port,) = free_ports(1)
        words = (f"--http-port={http_port}", "--allow-grpc=false", "--allow-metrics=false")
        plan = EdgePlan.choose("on", parse(*words), Access(), None)
        assert plan is not None
        with pytest.raises(ServerSetupError, match="--edge off"):
            Edge(replace(plan, program=Path("/bin/false")))
        assert list(tmp_path.iterdir()) == []
