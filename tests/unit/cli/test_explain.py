"""`graphkiln explain`: settings with origins, the plan, and the result."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from lowered import add_unrunnable
from typer.testing import CliRunner, Result

from graphkiln.cli.main import app
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.manifest import Conversion, Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.deployment import Deployment


@pytest.fixture
def model(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits, tmp_path / "store" / "digits")


def explain(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments), "--cache=off"], env={"COLUMNS": "80"})


def row(result: Result, setting: str) -> list[str]:
    """Return the cells of a setting's row."""
    line = next(line for line in result.stdout.splitlines() if re.match(rf"│ {setting} ", line))
    return [cell.strip() for cell in line.strip("│").split("│")]


def add_parameters(model: Path, **parameters: str) -> None:
    lines = (f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items())
    with (model / "config.pbtxt").open("a") as file:
        file.write("\n".join(lines))


class TestSettings:
    def test_values_and_origins(self, model: Path) -> None:
        add_parameters(model, engine="openvino", fallback="openvino:fp32, onnxruntime", self_test="off", streams="2")
        result = explain(model, "--plan-only", "--set", "threads=3", "--set", "precision=fp16")
        assert row(result, "engine") == ["engine", "openvino", "parameters.engine"]
        assert row(result, "precision") == ["precision", "fp16", "--set"]
        assert row(result, "threads") == ["threads", "3", "--set"]
        assert row(result, "self_test") == ["self_test", "off", "parameters.self_test"]

        assert row(result, "fallback")[1].startswith("openvino:fp32")
        assert all(len(line) <= 80 for line in result.stdout.splitlines() if line.startswith(("│", "┃")))


class TestConversion:
    def test_notes_of_the_conversion(self, model: Path) -> None:
        path = model / "1" / "manifest.json"
        note = "rate of int8 to that of fp32: 0.50x with onnxruntime"
        conversion = Conversion(
            recipe={}, precision=Precision.INT8, passes=(), output_errors={}, graph_bytes=1, seconds=1.0, notes=(note,)
        )
        replace(Manifest.read(path), conversion=conversion).write(path)
        assert f"conversion: {note}" in explain(model, "--plan-only").stdout.splitlines()
        assert json.loads(explain(model, "--plan-only", "--json").stdout)["conversion"] == [note]


class TestPlan:
    def test_sessions_and_rejections(self, model: Path) -> None:
        add_parameters(model, xrt="oneflow")
        result = explain(model, "--plan-only", "--set", "engine=openvino", "--set", "fallback=onnxruntime")
        assert "1. openvino on cpu, " in result.stdout
        assert "2. onnxruntime on cpu, " in result.stdout
        assert "rejected: engine onnxruntime of parameters.xrt: --set requests openvino" in result.stdout

    def test_plan_only_builds_nothing(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            pytest.fail("a session is built")

        monkeypatch.setattr(Deployment, "build", fail)
        result = explain(model, "--plan-only")
        assert (result.exit_code, result.exception) == (0, None)
        assert "1. onnxruntime on cpu" in result.stdout


class TestResult:
    def test_result_placement_and_proof(self, model: Path) -> None:
        lines = explain(model, "--set", "threads=1").stdout.splitlines()
        assert "serves: onnxruntime on cpu" in lines
        assert any(re.fullmatch(r"ran: \d+ nodes on CPUExecutionProvider; products: 5 in fp32", line) for line in lines)
        assert any(re.fullmatch(r"self-test: fp32 on onnxruntime: .* - PASS", line) for line in lines)

    def test_auto_compares_precisions(self, model: Path) -> None:
        """The measurement is shown for any choice."""
        result = explain(model, "--set", "engine=auto", "--set", "precision=bf16")
        assert result.exit_code == 0, result.exception
        assert re.search(r"^because: requested by --set, .*; the fastest here, ", result.stdout, re.MULTILINE) or (
            re.search(r"^because: baseline that bf16 must beat, .*; the fastest", result.stdout, re.MULTILINE)
        )
        measured = "bf16 was measured " in result.stdout
        assert measured or "this CPU has no instructions for bf16" in result.stdout

    def test_fallback_has_a_reason(self, model: Path) -> None:
        result = explain(model, "--set", "engine=tensorrt", "--set", "fallback=onnxruntime")
        assert "rejected: tensorrt on cpu: tensorrt serves gpu:N, not cpu" in result.stdout
        assert "serves: onnxruntime on cpu" in result.stdout

    def test_note_about_a_skipped_self_test(self, model: Path) -> None:
        result = explain(model, "--set", "self_test=off")
        assert "self-test: none" in result.stdout
        assert "note: self_test: off: the golden samples were not replayed" in result.stdout

    def test_graph_that_does_not_run_on_zeros(self, tmp_path: Path) -> None:
        folder = add_unrunnable(tmp_path / "store")
        (folder.parent / "config.pbtxt").write_text("max_batch_size: 0")
        result = explain(folder)
        assert result.exit_code == 0, result.exception
        assert "ran: unknown: no golden samples, and the graph does not run on zeros" in result.stdout


def test_mistakes(model: Path, tmp_path: Path) -> None:
    result = explain(model, "--set", "precision=int8")
    assert isinstance(result.exception, LoweringError)
    assert result.stdout == ""
    result = explain(zoo.add(tmp_path / "other", "newer", zoo.scale(("batch", 3), opset=99)))
    assert isinstance(result.exception, LoweringError)
    assert "1. onnxruntime on cpu" in result.stdout
    assert "onnxruntime on cpu: " in result.exception.attempts[0]


def test_json(model: Path) -> None:
    planned = json.loads(explain(model, "--plan-only", "--json", "--set", "threads=1").stdout)
    assert planned["settings"]["threads"] == {"value": "1", "origin": "--set"}
    assert planned["settings"]["engine"] == {"value": "the default", "origin": None}
    assert [config["engine"] for config in planned["candidates"]] == ["onnxruntime"]
    assert "session" not in planned
    built = json.loads(explain(model, "--json").stdout)["session"]
    assert built["placement"]["products"] == {"fp32": 5}
    assert built["self_test"]["verdict"].endswith("PASS")


class TestImages:
    def test_image_model(self, model: Path) -> None:
        assert "images" not in explain(model, "--plan-only").stdout
        add_parameters(model, accept_images="true")

        shown = explain(model, "--plan-only").stdout
        assert re.search(r"^images: JPEG, PNG, .* by digits\.images, decoded in \d processes of \d+", shown, re.M)
        document = json.loads(explain(model, "--plan-only", "--json").stdout)
        assert document["images"].startswith("JPEG, PNG, ")

    def test_reason_for_no_image_model(self, tmp_path: Path) -> None:
        zoo.add(tmp_path / "store", "cats", zoo.scale(("batch", 3)), "")
        add_parameters(tmp_path / "store" / "cats", accept_images="true")

        shown = explain(tmp_path / "store" / "cats", "--plan-only").stdout
        assert "images: not accepted: parameters: accept_images of 'cats': the model has no preprocessing" in shown
