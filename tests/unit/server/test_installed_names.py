"""The names of our backend, where Triton is installed and where it is not."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import installation
from graphkiln_backend.server.run_folder import BACKEND_NAMES, installed_backend_names


def test_names_that_another_backend_has_are_not_ours() -> None:
    names = installed_backend_names()
    assert "graphkiln" in names
    assert names <= BACKEND_NAMES


def test_without_a_triton_all_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> None:
        raise ServerSetupError("no tritonserver")

    monkeypatch.setattr(installation, "find_installation", find)
    assert installed_backend_names() == BACKEND_NAMES
