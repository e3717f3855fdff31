"""Packages that are there, missing, or do not fit together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from graphkiln.doctor import packages as module
from graphkiln.doctor.finding import Finding, Level, Request
from graphkiln.doctor.packages import check_packages, find_conflicts, find_unmet, installed_versions


class Distribution:
    def __init__(self, version: str, requires: list[str] | None) -> None:
        self.version = version
        self.requires = requires


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Distribution]:
    """What is installed, for a test to fill."""
    found: dict[str, Distribution] = {}

    def look_up(name: str) -> Distribution:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(module, "distribution", look_up)
    return found


def unmet(name: str, extra: str = "") -> list[Finding]:
    return list(find_unmet(name, extra))


def test_what_is_not_installed_is_left_out(installed: dict[str, Distribution]) -> None:
    installed["numpy"] = Distribution("1.26.4", None)
    assert installed_versions(["numpy", "onnx"]) == {"numpy": "1.26.4"}


def test_two_runtimes_in_the_same_files() -> None:
    (found,) = find_conflicts({"onnxruntime": "1", "onnxruntime-gpu": "1", "onnx": "1"})
    assert found.level is Level.WARNING
    assert found.hint.startswith("pip uninstall onnxruntime onnxruntime-gpu")
    assert list(find_conflicts({"onnxruntime": "1"})) == []


def test_a_requirement_that_is_not_met(installed: dict[str, Distribution]) -> None:
    installed["nvidia-pytriton"] = Distribution("0.7.0", ["numpy<2", "wrapt>=1", 'x>1; extra == "test"'])
    installed["numpy"] = Distribution("2.1.0", None)
    numpy, wrapt = unmet("nvidia-pytriton")
    assert (numpy.level, numpy.message) == (Level.WARNING, "needs numpy<2, found 2.1.0")
    assert numpy.hint == "pip install 'numpy<2'"
    assert wrapt.message == "needs wrapt>=1, found none"


def test_requirements_of_an_extra_count_where_it_is_asked_for(installed: dict[str, Distribution]) -> None:
    installed["graphkiln"] = Distribution("0.1", ['onnx>=1.17; extra == "serve"', 'torch>2; extra == "convert"'])
    (found,) = unmet("graphkiln", "serve")
    assert (found.level, found.message) == (Level.ERROR, "needs onnx>=1.17, found none")


def test_a_triton_container_needs_no_other_server(installed: dict[str, Distribution]) -> None:
    installed["graphkiln"] = Distribution("0.1", ['nvidia-pytriton==0.7.0; extra == "serve"'])
    assert unmet("graphkiln", "serve") == []


def test_the_gpu_build_of_a_runtime_takes_its_place(installed: dict[str, Distribution]) -> None:
    installed["graphkiln"] = Distribution("0.1", ['onnxruntime>=1.22; extra == "serve"'])
    installed["onnxruntime-gpu"] = Distribution("1.23", None)
    assert unmet("graphkiln", "serve") == []


def test_what_is_not_installed_needs_nothing(installed: dict[str, Distribution]) -> None:
    assert installed == {}
    assert unmet("graphkiln") == []


def test_this_environment() -> None:
    found = list(check_packages(Request()))
    assert [each.subject for each in found[:2]] == ["Python", "versions"]
    assert "onnxruntime" in found[1].facts
