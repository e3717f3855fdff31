"""How much memory tritonserver may take."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from graphkiln_backend.server import memory_limit as module
from graphkiln_backend.server.memory_limit import default_limit, free_memory


def test_half_of_what_is_free() -> None:
    assert 2 << 30 <= default_limit() <= max(psutil.virtual_memory().total // 2, 2 << 30)


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("3000\n")
    (tmp_path / "current").write_text("1000\n")
    (tmp_path / "none").write_text("max\n")
    pairs = ((str(tmp_path / "none"), str(tmp_path / "current")), (str(tmp_path / "max"), str(tmp_path / "current")))
    monkeypatch.setattr(module, "_GROUPS", pairs)
    assert free_memory() == 2000
    assert default_limit() == 2 << 30, "too little to start with would be no protection"
