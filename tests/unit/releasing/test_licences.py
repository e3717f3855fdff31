"""Licences of locked packages, from pip's report, and their comparison with the lists of reviewed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from releasing import licences
from releasing.licences import IMAGES, Image, judge, licence_of, main

CLASSIFIER = "License :: OSI Approved :: MIT License"


def package(name: str, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": "1", **metadata}}


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ({"license_expression": "MIT", "classifier": [CLASSIFIER], "license": "other"}, "MIT"),
        ({"classifier": ["Topic :: Software", CLASSIFIER], "license": "other"}, "MIT License"),
        ({"license": "BSD\n\nRedistribution ..."}, "BSD"),
        ({}, ""),
    ],
)
def test_the_licence_in_a_packages_metadata(metadata: dict[str, Any], licence: str) -> None:
    assert licence_of(metadata) == licence


def test_unknown_and_unused_licences_are_faults() -> None:
    code, lines = judge({"a 1": "X", "b 1": ""}, ["X"], ["Y"])
    assert code == 1
    assert "no licence: b 1" in lines
    assert lines[-2:] == [
        "on no list, read it first: a package without a licence",
        "on the list, but of no package any more: Y",
    ]


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cpu").write_text("X\n")
    (tmp_path / "gpu").write_text("Y\n")
    images = {name: Image(tmp_path / f"{name}.lock", tmp_path / name) for name in ("cpu", "gpu")}
    monkeypatch.setattr(licences, "IMAGES", images)
    return tmp_path


def test_licences_of_the_first_image_are_allowed_in_all(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {
        lists / "cpu.lock": {"install": [package("a", license="X")]},
        lists / "gpu.lock": {"install": [package("a", license="X"), package("b", license="Y")]},
    }
    monkeypatch.setattr(licences, "ask_pip", reports.__getitem__)
    assert main([]) == 0
    reports[lists / "cpu.lock"]["install"].append(package("b", license="Y"))
    assert main(["gpu"]) == 0
    assert main(["cpu", "gpu"]) == 1


@pytest.mark.usefixtures("lists")
def test_an_unknown_image_is_refused() -> None:
    with pytest.raises(SystemExit, match="there is no image 'tpu'; expected one of cpu, gpu"):
        main(["tpu"])


def test_each_lock_file_of_an_image_has_its_list() -> None:
    assert all(image.lock.is_file() and image.read.is_file() for image in IMAGES.values())
