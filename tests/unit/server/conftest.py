"""Installations of Triton that hold no Triton."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_repository import StoreOfFakes

from graphkiln_backend.server.installation import Installation

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MakeContainer = Callable[..., Path]


@pytest.fixture
def make_container(tmp_path: Path) -> MakeContainer:
    """Makes the files of a Triton container whose Python backend was built for some Python; returns the root."""

    def make(name: str = "triton", python: str = PYTHON) -> Path:
        root = tmp_path / name
        (root / "bin").mkdir(parents=True)
        (root / "bin" / "tritonserver").write_text("#!/bin/sh\necho '  --http-port <integer>'\n")
        (root / "bin" / "tritonserver").chmod(0o755)
        backend = root / "backends" / "python"
        backend.mkdir(parents=True)
        (backend / "triton_python_backend_stub").write_bytes(f"\0libpython{python}.so.1.0\0".encode())
        (backend / "libtriton_python.so").write_bytes(b"")
        return root

    return make


@pytest.fixture
def installation(make_container: MakeContainer) -> Installation:
    """An installation whose tritonserver does nothing."""
    root = make_container()
    return Installation(
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        caches=root / "caches",
        stub=root / "backends" / "python" / "triton_python_backend_stub",
        libraries=(),
    )


@pytest.fixture
def fake_store(tmp_path: Path) -> StoreOfFakes:
    return StoreOfFakes(tmp_path / "store")
