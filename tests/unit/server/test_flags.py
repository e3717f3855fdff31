"""tritonserver's flags: read, completed, checked, and otherwise left as typed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.flags import TritonFlags

KNOWN = {
    **dict.fromkeys(("http-port", "http-address", "grpc-port", "allow-http", "backend-config", "log-file"), True),
    **dict.fromkeys(("backend-directory", "model-repository", "reuse-http-port", "log-verbose"), True),
    "disable-auto-complete-config": False,
}


def test_arguments_stay_as_typed() -> None:
    typed = ["--http-port", "9000", "--backend-config=a,b=c", "--log-file=a b=c", "--disable-auto-complete-config"]
    flags = TritonFlags.parse(typed, KNOWN)
    assert list(flags.arguments) == typed
    assert flags.values["backend-config"] == "a,b=c"
    assert flags.values["log-file"] == "a b=c"


def test_model_stores_are_taken_out() -> None:
    flags = TritonFlags.parse(["--model-repository", "a", "--model-repository=b"], KNOWN)
    assert flags.stores == (Path("a"), Path("b"))
    assert flags.arguments == ()


def test_the_last_value_counts() -> None:
    address = TritonFlags.parse(["--http-port=1", "--http-port=2"], KNOWN).listen_address("http")
    assert address is not None
    assert address.port == 2


def test_services_that_are_switched_off_listen_nowhere() -> None:
    flags = TritonFlags.parse(["--allow-http=false", "--grpc-port=7"], KNOWN)
    assert [(a.protocol, a.port) for a in flags.listen_addresses()] == [("gRPC", 7), ("metrics", 8002)]


def test_a_port_that_may_be_shared_is_not_checked() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        others = ["--allow-grpc=false", "--allow-metrics=false"]
        known = {**KNOWN, "allow-grpc": True, "allow-metrics": True}
        TritonFlags.parse([f"--http-port={port}", "--reuse-http-port=true", *others], known).check_ports()
        with pytest.raises(ServerSetupError, match=f"port {port} "):
            TritonFlags.parse([f"--http-port={port}", *others], known).check_ports()
