"""`graphkiln convert`: options of the recipe, what is printed as a table and as JSON, and what is written."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import tiny
import yaml
from commands import RunVerb, words
from pydantic import BaseModel, Field

from graphkiln.cli import convert as module
from graphkiln.cli.convert import show_conversion
from graphkiln_backend.graph.manifest import Manifest, PassRecord
from graphkiln_backend.passes.pipeline import catalog
from graphkiln_converters.recipe import Flag, Recipe


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.convert(tmp_path_factory.mktemp("tiny"))


def test_what_was_written_is_shown(run: RunVerb, source: Path, tmp_path: Path) -> None:
    finished = run("convert", source, "--name", "m", "--model-store", tmp_path)
    assert finished.code == 0, finished.err
    for fact in ("add-into-producer", "x FP32[batch,4]", "y FP32[batch,3]: error", "PASS", "fp32, "):
        assert fact in finished.out
    assert str(tmp_path / "m" / "1") in words(finished.out).replace(" ", "")
    assert max(map(len, finished.out.splitlines())) <= 80


def test_json_is_the_manifest(run: RunVerb, source: Path, tmp_path: Path) -> None:
    odd = tmp_path / "my model.onnx"
    odd.write_bytes(source.read_bytes())
    document = json.loads(run("convert", odd, "--name", "m", "--model-store", tmp_path, "--json").out)
    assert document == json.loads((tmp_path / "m" / "1" / "manifest.json").read_text())
    assert document["provenance"]["command"] == shlex.join(["graphkiln", *sys.argv[1:]])


def test_a_manifest_repeats_its_conversion(run: RunVerb, version: Path, tmp_path: Path) -> None:
    finished = run("convert", "--recipe", version / "manifest.json", "--model-store", tmp_path, "softmax=true")
    assert finished.code == 0, finished.err
    conversion = Manifest.read(tmp_path / "m" / "1" / "manifest.json").conversion
    assert conversion is not None
    assert conversion.recipe["softmax"] is True


def test_passes_are_listed_with_when_they_run(run: RunVerb) -> None:
    text = run("convert", "--explain").out
    assert all(graph_pass.name in text for graph_pass, _ in catalog())
    assert text.count("always") >= 5
    assert "--top-k" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("flag", ["--print-recipe", "--explain"])
def test_some_flags_write_nothing(run: RunVerb, source: Path, tmp_path: Path, flag: str) -> None:
    assert run("convert", source, "--name", "m", "--model-store", tmp_path / "s", flag).code == 0
    assert not (tmp_path / "s").exists()


def test_texts_of_files_are_not_markup(version: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.conversion is not None
    odd = PassRecord(name="clean-up", nodes_before=31, nodes_after=7, note="2 left [why]")
    conversion = replace(manifest.conversion, passes=(odd,), output_errors={}, notes=("kept in fp32: [/bold] conv_1",))
    show_conversion(version, replace(manifest, conversion=conversion))
    text = capsys.readouterr().out
    for fact in ("31", "[why]", "kept in fp32: [/bold] conv_1"):
        assert fact in text
    assert "error" not in next(line for line in text.splitlines() if "y FP32" in line)  # it was not compared
    show_conversion(version, replace(manifest, conversion=None))
    assert "nodes before" not in capsys.readouterr().out


class TestOptions:
    @pytest.fixture
    def printed(self, run: RunVerb) -> Any:
        """Recipe of a conversion with options."""

        def print_recipe(*options: object) -> dict[str, Any]:
            finished = run("convert", "model.onnx", "--name", "m", "--print-recipe", *options)
            assert finished.code == 0, finished.err
            document: dict[str, Any] = yaml.safe_load(finished.out)
            return document

        return print_recipe

    def test_help_of_every_field(self, run: RunVerb, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        shown = words(run("convert", "--help").out)
        flags = {name: each for name, field in Recipe.model_fields.items() for each in field.metadata}
        for name, flag in flags.items():
            if not isinstance(flag, Flag):
                continue
            assert f"--{name.replace('_', '-')} " in shown
            for text in (str(Recipe.model_fields[name].description), flag.metavar, flag.panel):
                assert text in shown
        for default in ("model_repository", "the next free one", "32", "fp32", "O2", "synthetic"):
            assert f"[default: ({default})]" in shown
        for text in ("[env var: GRAPHKILN_MODEL_STORE]", "<int range> [x>=1]"):
            assert text in shown
        for empty in ("(0)", "(False)", "(None)", "(())", "PydanticUndefined", "--quantize"):
            assert empty not in shown

    @pytest.mark.parametrize(
        ("options", "field", "value"),
        [
            (["--softmax"], "softmax", True),
            (["--keep-names"], "keep_names", True),
            (["--no-keep-names"], "keep_names", False),
            (["--top-k", "3"], "top_k", 3),
            (["--relative-l2", "0.5"], "relative_l2", 0.5),
            (["--weights", "w.pth"], "weights", "w.pth"),
            (["--shape", "a=3x4", "--shape", "b=7"], "shape", ["a=3x4", "b=7"]),
            (["--out-indices", "1,2,3"], "out_indices", [1, 2, 3]),
            (["--preprocess", '{"mean": [0.5]}'], "preprocess", {"mean": [0.5]}),
            (["--precision", "bf16"], "precision", "bf16"),
            (["--top-k", "3", "top_k=2"], "top_k", 2),
        ],
    )
    def test_options_reach_the_recipe(self, printed: Any, options: list[str], field: str, value: object) -> None:
        assert printed(*options)[field] == value
        assert printed() == Recipe(source="model.onnx", name="m").frozen()  # nothing is left of the call before

    def test_environment(self, printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRAPHKILN_MODEL_STORE", "elsewhere")
        assert printed()["model_store"] == "elsewhere"
        assert printed("--model-store", "here")["model_store"] == "here"

    def test_source_among_the_overrides(self, run: RunVerb) -> None:
        assert "source: a.onnx\n" in run("convert", "source=a.onnx", "name=m", "--print-recipe").out
        printed = run("convert", "python:file.py:make=2", "--name", "m", "--print-recipe").out
        assert "source: python:file.py:make=2\n" in printed

    def test_options_change_a_recipe_file(self, run: RunVerb, tmp_path: Path) -> None:
        (tmp_path / "r.yaml").write_text("source: a.onnx\nname: n\nsoftmax: true\ntop_k: 2\n")
        finished = run("convert", "--recipe", tmp_path / "r.yaml", "--top-k", "5", "--print-recipe")
        document = yaml.safe_load(finished.out)
        assert (document["source"], document["softmax"], document["top_k"]) == ("a.onnx", True, 5)

    def test_fields_with_a_flag_become_options(self) -> None:
        class Larger(BaseModel):
            depth: Annotated[int, Flag(panel="Own", metavar="N")] = Field(default=7, description="How deep.")
            quiet: Annotated[bool, Flag()] = Field(default=False, description="Say nothing.")
            hidden: int = Field(default=1, description="For files.")

        depth, quiet = module._params(Larger.model_fields)
        assert (depth.opts, depth.help, depth.metavar, depth.multiple) == (["--depth"], "How deep.", "N", False)
        assert (quiet.is_flag, quiet.secondary_opts) == (True, []), "there is no --no-quiet"
