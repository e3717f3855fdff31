"""`graphkiln inspect`: what a version is, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import convert, run, write_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("tiny"))


def test_a_table_in_eighty_columns(version: Path) -> None:
    shown = run("inspect", version).output
    for words in ("INPUT_0 FP32[batch,4]", "1 Gemm", "15 (0.0 MB)", "FP32 100.0%", "opset 18", "- PASS"):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_newest_version_of_a_model(version: Path) -> None:
    assert json.loads(run("inspect", version.parent, "--json").output)["graph"] == str(version / "model.onnx")


def test_json_holds_the_census_and_the_manifest(version: Path) -> None:
    document = json.loads(run("inspect", version, "--json").output)
    assert (document["operators"], document["parameters"], document["flops"]) == ({"Gemm": 1}, 15, 24)
    assert document["signature"]["inputs"][0]["shape"] == ["batch", 4]
    assert document["conversion"]["recipe"]["name"] == "m"


def test_a_bare_graph(source: Path, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(source.read_bytes())
    shown = run("inspect", tmp_path / "1").output
    assert "came without a manifest" in " ".join(shown.replace("│", " ").split())
    document = json.loads(run("inspect", tmp_path / "1", "--json").output)
    assert "conversion" not in document
    assert document["signature"]["outputs"][0]["name"] == "y"


def test_a_file_by_itself(source: Path, version: Path) -> None:
    document = json.loads(run("inspect", source, "--json").output)
    assert document["graph"] == str(source)
    assert document["signature"]["outputs"][0]["name"] == "y"
    assert "provenance" not in document
    assert "provenance" in json.loads(run("inspect", version / "model.onnx", "--json").output)
