"""What a recipe names is looked at before minutes pass."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.convert import convert
from graphkiln_converters.given_files import check_file, check_given_files, near_file
from graphkiln_converters.recipe import Recipe


def recipe(folder: Path, **fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "m.onnx", "model_store": folder / "store", **fields})


def test_what_is_there_passes(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("one\n")
    check_given_files(recipe(tmp_path, labels=file, weights=file, reference=file, samples=tmp_path, calibration=file))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("option", ["weights", "labels", "samples", "calibration", "reference"])
def test_what_is_missing_is_told_before_the_source_is_opened(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConversionError, match=rf"{option}: there is no file .*nowhere.* \(expected an? "):
        convert(recipe(tmp_path, **{option: tmp_path / "nowhere"}))


@pytest.mark.parametrize("option", ["weights", "labels", "reference"])
def test_a_folder_in_the_place_of_a_file(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConversionError, match="is a folder, not a file"):
        check_given_files(recipe(tmp_path, **{option: tmp_path}))


def test_a_name_that_is_near(tmp_path: Path) -> None:
    (tmp_path / "resnet.onnx").touch()
    with pytest.raises(ConversionError, match=r"did you mean '.*/resnet\.onnx'"):
        check_file(tmp_path / "resnt.onnx")
    assert near_file(tmp_path / "nowhere" / "resnet.onnx") == ""


def test_the_only_graph_in_a_folder_named_like_a_graph(tmp_path: Path) -> None:
    folder = tmp_path / "model.onnx"
    folder.mkdir()
    (folder / "model.onnx").touch()
    with pytest.raises(ConversionError, match=r"is a folder, not a file \(did you mean '.*/model.onnx/model.onnx'"):
        check_file(folder)


class TestStores:
    @pytest.mark.parametrize("store", ["s3://bucket/models", "gs://bucket", "s3:/bucket/models"])
    def test_that_are_no_folders(self, tmp_path: Path, store: str) -> None:
        with pytest.raises(ConversionError, match="versions are written into folders"):
            check_given_files(recipe(tmp_path, model_store=store))

    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConversionError, match="file is not a folder"):
            check_given_files(recipe(tmp_path, model_store=tmp_path / "file" / "store"))

    def test_that_may_not_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
        with pytest.raises(ConversionError, match="may not be written"):
            check_given_files(recipe(tmp_path))

    def test_that_may_not_even_be_looked_at(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "exists", refuse)
        with pytest.raises(ConversionError, match=r"--model-store .*store may not be looked at"):
            check_given_files(recipe(tmp_path))
