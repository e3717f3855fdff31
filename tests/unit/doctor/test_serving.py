"""Checks of packages, tritonserver, HAProxy and ports."""

from __future__ import annotations

import os
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import psutil
import pytest
from running import free_ports

from graphkiln.doctor import serving as module
from graphkiln.doctor.examination import Finding, Level, Request
from graphkiln.doctor.serving import (
    check_backends,
    check_edge,
    check_packages,
    check_ports,
    check_triton,
    find_conflicts,
    find_holder,
    find_unmet,
    installed_versions,
)
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import edge, installation


class Distribution:
    def __init__(self, version: str, requires: list[str] | None) -> None:
        self.version = version
        self.requires = requires


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Distribution]:
    """Fake installed distributions."""
    found: dict[str, Distribution] = {}

    def look_up(name: str) -> Distribution:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(module, "distribution", look_up)
    return found


def unmet(name: str, extra: str = "") -> list[Finding]:
    return list(find_unmet(name, extra))


def test_missing_package(installed: dict[str, Distribution]) -> None:
    installed["numpy"] = Distribution("1.26.4", None)
    assert installed_versions(["numpy", "onnx"]) == {"numpy": "1.26.4"}
    assert unmet("graphkiln") == []


def test_conflicting_runtimes() -> None:
    (found,) = find_conflicts({"onnxruntime": "1", "onnxruntime-gpu": "1", "onnx": "1"})
    assert found.level is Level.WARNING
    assert found.hint.startswith("pip uninstall onnxruntime onnxruntime-gpu")
    assert list(find_conflicts({"onnxruntime": "1"})) == []


def test_unmet_requirement(installed: dict[str, Distribution]) -> None:
    installed["nvidia-pytriton"] = Distribution("0.7.0", ["numpy<2", "wrapt>=1", 'x>1; extra == "test"'])
    installed["numpy"] = Distribution("2.1.0", None)
    numpy, wrapt = unmet("nvidia-pytriton")
    assert (numpy.level, numpy.message) == (Level.WARNING, "needs numpy<2, found 2.1.0")
    assert numpy.hint == "pip install 'numpy<2'"
    assert wrapt.message == "needs wrapt>=1, found none"


def test_requirements_of_an_extra(installed: dict[str, Distribution]) -> None:
    installed["graphkiln"] = Distribution("0.1", ['onnx>=1.17; extra == "serve"', 'torch>2; extra == "convert"'])
    (found,) = unmet("graphkiln", "serve")
    assert (found.level, found.message) == (Level.ERROR, "needs onnx>=1.17, found none")


def test_replaced_requirements(installed: dict[str, Distribution]) -> None:
    requires = ['nvidia-pytriton==0.7.0; extra == "serve"', 'onnxruntime>=1.22; extra == "serve"']
    installed["graphkiln"] = Distribution("0.1", requires)
    installed["onnxruntime-gpu"] = Distribution("1.23", None)
    assert unmet("graphkiln", "serve") == []


def test_this_environment() -> None:
    found = list(check_packages(Request()))
    assert [each.subject for each in found[:2]] == ["Python", "versions"]
    assert "onnxruntime" in found[1].facts


def test_tritonserver() -> None:
    server, advisories = check_triton(Request())
    assert server.level is Level.OK
    assert server.message.startswith("Triton 2.51.0 (24.10), of nvidia-pytriton")
    assert advisories.level is Level.WARNING
    assert "--target triton" in advisories.hint
    assert any("CVE-2025-23310" in str(row) for row in advisories.facts["reachable"])
    (found,) = check_triton(Request(arguments=("--http-prt=9",)))
    assert found.level is Level.ERROR
    assert "--http-port" in found.hint


def test_backends(tmp_path: Path) -> None:
    (found,) = check_backends(Request())
    assert (found.level, found.facts["backends"]) == (Level.OK, [])  # those of the wheel: none
    for name in ("onnxruntime", "tensorrt", "python"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"libtriton_{name}.so").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "onnxruntime" / "libonnxruntime.so.1.19.2").touch()
    (found,) = check_backends(Request(arguments=(f"--backend-directory={tmp_path}",)))
    assert found.message == "onnxruntime (ONNX Runtime 1.19.2), tensorrt"
    missing, found = check_backends(Request(arguments=(f"--backend-directory={tmp_path}/missing",)))
    assert (missing.level, found.facts["backends"]) == (Level.ERROR, [])
    assert "missing is not a folder" in missing.message


def test_missing_tritonserver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ServerSetupError("no tritonserver found", hint="pip install 'graphkiln[serve]'")

    monkeypatch.setattr(installation, "find_installation", refuse)
    (found,) = check_triton(Request())
    assert (found.level, found.message) == (Level.ERROR, "no tritonserver found")
    assert "graphkiln[serve]" in found.hint


@pytest.mark.parametrize(
    ("host", "program", "level"),
    [("0.0.0.0", None, Level.WARNING), ("127.0.0.1", None, Level.OK), ("0.0.0.0", "/usr/sbin/haproxy", Level.OK)],
)
def test_haproxy_for_public_addresses(
    monkeypatch: pytest.MonkeyPatch, host: str, program: str | None, level: Level
) -> None:
    monkeypatch.setattr(edge, "find_haproxy", lambda: program)
    (found,) = check_edge(Request(host=host))
    assert found.level is level
    assert found.facts["program"] == (program or "")


# Ports.


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
