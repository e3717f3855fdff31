"""The tritonserver that would be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.doctor.finding import Level, Request
from graphkiln.doctor.packages import check_triton, read_version
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import installation


def test_the_one_of_this_environment() -> None:
    (found,) = check_triton(Request())
    assert found.level is Level.OK
    assert str(found.facts["version"]).startswith("2.51.0 of nvidia-pytriton")
    flags = found.facts["flags"]
    assert isinstance(flags, int)
    assert flags > 50


def test_none_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ServerSetupError("no tritonserver found", hint="pip install 'graphkiln[serve]'")

    monkeypatch.setattr(installation, "find_installation", refuse)
    (found,) = check_triton(Request())
    assert (found.level, found.message) == (Level.ERROR, "no tritonserver found")
    assert "graphkiln[serve]" in found.hint


def test_a_flag_that_it_does_not_know_is_one_too() -> None:
    (found,) = check_triton(Request(arguments=("--http-prt=9",)))
    assert found.level is Level.ERROR
    assert "--http-port" in found.hint


def test_a_container_says_its_version(tmp_path: Path) -> None:
    (tmp_path / "TRITON_VERSION").write_text("2.61.0\n")
    assert read_version(tmp_path / "bin" / "tritonserver") == "2.61.0"
    assert read_version(tmp_path / "other" / "bin" / "tritonserver") == ""
