"""Checks of ports."""

from __future__ import annotations

import os
import socket

import psutil
import pytest
from running import free_ports

from graphkiln.doctor.examination import Level, Request
from graphkiln.doctor.serving import check_ports, find_holder


def arguments(http: int, *more: str) -> Request:
    grpc, metrics = free_ports(2)
    return Request(arguments=(f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", *more))


def test_all_ports_are_checked() -> None:
    found = list(check_ports(arguments(free_ports(1)[0])))
    assert [each.level for each in found] == [Level.OK] * 3
    assert [each.subject.split()[0] for each in found] == ["HTTP", "gRPC", "metrics"]


def test_port_in_use_names_its_process() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        found = next(iter(check_ports(arguments(port))))
        assert found.level is Level.ERROR
        assert f"port {port} (HTTP) is in use by" in found.message
        assert f"(process {os.getpid()})" in found.message
        assert "--http-port=" in found.hint
        assert found.facts["free"] is False


def test_hidden_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refuse)
    assert find_holder(1) == ""


def test_disabled_service() -> None:
    request = arguments(free_ports(1)[0], "--allow-metrics=false")
    assert list(check_ports(request))[2].message == "disabled"


def test_invalid_port() -> None:
    found = next(iter(check_ports(Request(arguments=("--http-port=web",)))))
    assert (found.subject, found.level) == ("http", Level.ERROR)
    assert "'web'" in found.message


def test_foreign_address() -> None:
    """Source: RFC 5737, addresses for documentation."""
    request = arguments(free_ports(1)[0])
    found = next(iter(check_ports(Request(host="192.0.2.1", arguments=request.arguments))))
    assert found.level is Level.ERROR
    assert "cannot listen on 192.0.2.1" in found.message


def test_invalid_flags_use_the_default_ports() -> None:
    found = list(check_ports(Request(arguments=("--no-such-flag",))))
    assert [each.facts["port"] for each in found] == [8000, 8001, 8002]


def test_same_port_for_two_services() -> None:
    (port,) = free_ports(1)
    found = list(check_ports(Request(arguments=(f"--http-port={port}", f"--metrics-port={port}"))))
    assert (found[0].level, found[2].level) == (Level.OK, Level.ERROR)
    assert "HTTP and metrics cannot both listen" in found[2].message
