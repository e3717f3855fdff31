"""`graphkiln convert` of a small ONNX file: what is printed, as a table and as JSON, and what is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny import convert, run, write_source

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.manifest import Manifest


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("tiny"))


def test_shows_what_it_wrote(source: Path, tmp_path: Path) -> None:
    finished = run("convert", source, "--name", "m", "--model-store", tmp_path)
    assert finished.exit_code == 0
    for words in ("add-into-producer", "INPUT_0 FP32[batch,4]", "OUTPUT_0 FP32[batch,3]: error", "PASS", "fp32, "):
        assert words in finished.output
    assert max(map(len, finished.output.splitlines())) <= 80


def test_json_is_the_manifest(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/graphkiln", "convert", "my model.onnx"])
    finished = run("convert", source, "--name", "m", "--model-store", tmp_path, "--json")
    document = json.loads(finished.stdout)
    assert document == json.loads((tmp_path / "m" / "1" / "manifest.json").read_text())
    assert document["provenance"]["command"] == "graphkiln convert 'my model.onnx'"


def test_a_manifest_repeats_it(version: Path, tmp_path: Path) -> None:
    finished = run("convert", "--recipe", version / "manifest.json", "--model-store", tmp_path, "softmax=true")
    assert finished.exit_code == 0, finished.output
    conversion = Manifest.read(tmp_path / "m" / "1" / "manifest.json").conversion
    assert conversion is not None
    assert conversion.recipe["softmax"] is True


def test_explains_the_passes() -> None:
    shown = run("convert", "--explain").output
    for words in ("fold-constants", "always", "top-k", "--top-k", "input-uint8-nhwc"):
        assert words in shown


@pytest.mark.parametrize("flag", ["--print-recipe", "--explain"])
def test_some_flags_write_nothing(source: Path, tmp_path: Path, flag: str) -> None:
    assert run("convert", source, "--name", "m", "--model-store", tmp_path / "s", flag).exit_code == 0
    assert not (tmp_path / "s").exists()


def test_an_error_is_ours(tmp_path: Path) -> None:
    finished = run("convert", tmp_path / "missing.onnx", "--name", "m", "--model-store", tmp_path)
    assert isinstance(finished.exception, ConversionError)
    assert "there is no file" in str(finished.exception)
