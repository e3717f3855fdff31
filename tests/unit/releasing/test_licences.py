"""Licences of what is locked: read from pip's report, and held to the lists of those that somebody has read."""

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
def test_what_a_package_says_of_its_licence(metadata: dict[str, Any], licence: str) -> None:
    assert licence_of(metadata) == licence


def test_one_that_nobody_has_read_is_named() -> None:
    code, lines = judge({"a 1": "X", "b 1": ""}, ["X"], [])
    assert code == 1
    assert "says nothing: b 1" in lines
    assert lines[-1] == "on no list, read it first: a package that names none"


def test_one_that_is_gone_is_named() -> None:
    code, lines = judge({"a 1": "X"}, ["X"], ["Y"])
    assert (code, lines[-1]) == (1, "on the list, and no package has it any more: Y")


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cpu").write_text("X\n")
    (tmp_path / "gpu").write_text("Y\n")
    images = {name: Image(tmp_path / f"{name}.lock", tmp_path / name) for name in ("cpu", "gpu")}
    monkeypatch.setattr(licences, "IMAGES", images)
    return tmp_path


def test_every_image_may_have_what_the_first_one_has(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        lists / "cpu.lock": {"install": [package("a", license="X")]},
        lists / "gpu.lock": {"install": [package("a", license="X"), package("b", license="Y")]},
    }
    monkeypatch.setattr(licences, "ask_pip", told.__getitem__)
    assert main([]) == 0
    told[lists / "cpu.lock"]["install"].append(package("b", license="Y"))
    assert main(["gpu"]) == 0
    assert main(["cpu", "gpu"]) == 1


@pytest.mark.usefixtures("lists")
def test_an_image_that_there_is_not() -> None:
    with pytest.raises(SystemExit, match="there is no image 'tpu': cpu, gpu"):
        main(["tpu"])


def test_each_lock_file_of_an_image_has_its_list() -> None:
    assert all(image.lock.is_file() and image.read.is_file() for image in IMAGES.values())
