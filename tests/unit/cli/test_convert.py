"""`graphkiln convert` of a small ONNX file: what is printed, as a table and as JSON, and what is written."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import convert, run, write_source

from graphkiln.cli.convert import show_conversion
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.manifest import Conversion, Manifest, PassRecord, Provenance, Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.passes.pipeline import catalog


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


def test_every_pass_is_listed_with_when_it_runs() -> None:
    text = run("convert", "--explain").output
    assert all(graph_pass.name in text for graph_pass, _ in catalog())
    assert text.count("always") >= 5
    assert "--top-k" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("flag", ["--print-recipe", "--explain"])
def test_some_flags_write_nothing(source: Path, tmp_path: Path, flag: str) -> None:
    assert run("convert", source, "--name", "m", "--model-store", tmp_path / "s", flag).exit_code == 0
    assert not (tmp_path / "s").exists()


# The tables of a conversion: every fact is there, in 80 columns, and text from outside is no markup.

VERIFICATION = Verification(
    step="export",
    samples=6,
    batch_sizes=(1, 3),
    relative_l2=1e-7,
    relative_l2_limit=1e-5,
    worst_element=1e-6,
    worst_element_limit=1e-3,
    verdict="export: error 1e-07 of signal (limit 1e-05), 6 samples, batch sizes 1, 3 - PASS",
)
CONVERSION = Conversion(
    recipe={},
    precision=Precision.BF16,
    passes=(PassRecord(name="clean-up", nodes_before=31, nodes_after=7, note="2 left [why]"),),
    output_errors={"scores": 1.25e-7},
    graph_bytes=5 << 20,
    seconds=1.26,
    notes=("kept in fp32: [/bold] conv_1",),
)
MANIFEST = Manifest(
    format_version=1,
    graph_file="model.onnx",
    sha256="0" * 64,
    signature=Signature(
        inputs=(TensorSpec(name="image", dtype=DType.FP32, shape=("batch", 3, 8, 8)),),
        outputs=(
            TensorSpec(name="scores", dtype=DType.FP32, shape=("batch", 4)),
            TensorSpec(name="features", dtype=DType.FP16, shape=("batch", 2)),
        ),
    ),
    preprocess=None,
    labels=None,
    provenance=Provenance(source="net.py", command="graphkiln convert"),
    verification=(VERIFICATION,),
    golden=None,
    conversion=CONVERSION,
)


def shown(capsys: pytest.CaptureFixture[str], manifest: Manifest = MANIFEST) -> str:
    show_conversion(Path("models/net/1"), manifest)
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_every_fact_is_there_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    facts = (
        "clean-up",
        "31",
        "image FP32[batch,3,8,8]",
        "scores FP32[batch,4]: error 1.2e-07",
        "bf16, 5.0 MB",
        "1.3 s",
    )
    for words in (*facts, "models/net/1", "kept in fp32: [/bold] conv_1", "[why]"):  # text in brackets is no markup
        assert words in text
    assert VERIFICATION.verdict in " ".join(text.replace("│", " ").split())
    (line,) = (line for line in text.splitlines() if "features FP16[batch,2]" in line)
    assert "error" not in line  # it was not compared
    assert max(map(len, text.splitlines())) <= 80


def test_a_graph_without_a_conversion(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, replace(MANIFEST, conversion=None))
    assert "nodes before" not in text
    assert "scores FP32[batch,4]" in text
    assert "MB" not in text
