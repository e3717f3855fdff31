"""Finding a tritonserver, without starting it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import installation as finding
from graphkiln_backend.server.installation import Installation, find_installation

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MakeContainer = Callable[..., Path]


def test_the_container_comes_before_the_wheel(monkeypatch: pytest.MonkeyPatch, make_container: MakeContainer) -> None:
    monkeypatch.setattr(finding, "_CONTAINER", (root := make_container()))
    assert find_installation().binary == root / "bin" / "tritonserver"


def test_the_wheel_is_found() -> None:
    found = find_installation()
    assert found.stub.parent.name == PYTHON
    assert found.flags["http-port"]
    assert found.flags["disable-auto-complete-config"] is False


def test_a_container_of_another_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, make_container: MakeContainer
) -> None:
    monkeypatch.setattr(finding, "_CONTAINER", make_container(python="3.6"))
    with pytest.raises(ServerSetupError, match=f"built for another Python than {PYTHON}"):
        find_installation()


def test_a_missing_libpython_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding.sysconfig, "get_config_var", lambda _: "/nonexistent")
    monkeypatch.setattr(finding.sys, "base_prefix", "/nonexistent")
    with pytest.raises(ServerSetupError, match=f"apt-get install libpython{PYTHON}"):
        find_installation()


def test_a_program_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "tritonserver"
    broken.write_text("#!/bin/sh\necho 'cannot open shared object file' >&2; exit 127\n")
    broken.chmod(0o755)
    found = Installation(binary=broken, backends=tmp_path, caches=tmp_path, stub=tmp_path, libraries=())
    with pytest.raises(ServerSetupError, match="cannot open shared object file"):
        _ = found.flags
