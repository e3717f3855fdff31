"""The options of `graphkiln convert`: one for each field, with the field's help, type and default."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from graphkiln.cli import convert as recipe_options
from graphkiln.cli.main import app
from graphkiln_converters.recipe import Flag, Recipe


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["convert", *arguments], env={"COLUMNS": "200", **environment})


def printed(*arguments: str, **environment: str) -> dict[str, Any]:
    finished = run("model.onnx", "--name", "m", "--print-recipe", *arguments, **environment)
    assert finished.exit_code == 0, finished.output
    document: dict[str, Any] = yaml.safe_load(finished.output)
    return document


def flagged() -> dict[str, Flag]:
    return {
        name: item for name, field in Recipe.model_fields.items() for item in field.metadata if isinstance(item, Flag)
    }


class TestHelp:
    def test_shows_every_field_with_its_words(self) -> None:
        shown = " ".join(run("--help").output.replace("│", " ").split())
        for name, flag in flagged().items():
            field = Recipe.model_fields[name]
            assert f"--{name.replace('_', '-')} " in shown
            assert str(field.description) in shown
            assert not flag.metavar or flag.metavar in shown
            assert not flag.panel or f" {flag.panel} " in shown

    def test_shows_defaults_and_ranges_that_are_not_empty(self) -> None:
        shown = " ".join(run("--help").output.replace("│", " ").split())
        for default in ("model_repository", "the next free one", "32", "fp32", "O2", "synthetic"):
            assert f"[default: ({default})]" in shown
        for words in ("[env var: GRAPHKILN_MODEL_STORE]", "<int range> [x>=1]"):
            assert words in shown
        for empty in ("(0)", "(False)", "(None)", "(())", "PydanticUndefined", "--quantize"):
            assert empty not in shown

    def test_neither_pydantic_nor_yaml_is_imported_for_the_main_help(self) -> None:
        program = (
            "import sys\nfrom graphkiln.cli.main import app\n"
            "try:\n    app(['--help'])\nexcept SystemExit:\n    print('modules', *sys.modules)"
        )
        finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        loaded = set(finished.stdout.split("modules")[-1].split())
        assert "graphkiln.cli.convert" in loaded
        assert not loaded & {"pydantic", "yaml", "torch", "onnx", "graphkiln_converters"}


class TestValues:
    def test_those_that_are_not_given_are_the_recipes_own(self) -> None:
        assert printed() == Recipe(source="model.onnx", name="m").frozen()

    @pytest.mark.parametrize(
        ("arguments", "field", "value"),
        [
            (["--softmax"], "softmax", True),
            (["--top-k", "3"], "top_k", 3),
            (["--relative-l2", "0.5"], "relative_l2", 0.5),
            (["--weights", "w.pth"], "weights", "w.pth"),
            (["--shape", "a=3x4", "--shape", "b=7"], "shape", ["a=3x4", "b=7"]),
            (["--out-indices", "1,2,3"], "out_indices", [1, 2, 3]),
            (["--preprocess", '{"mean": [0.5]}'], "preprocess", {"mean": [0.5]}),
            (["--precision", "bf16"], "precision", "bf16"),
            (["--keep-fp32", "Conv*", "--keep-fp32", "head"], "keep_fp32", ["Conv*", "head"]),
            (["--version", "4"], "version", 4),
            (["--model-store", "a/b"], "model_store", "a/b"),
            (["top_k=2"], "top_k", 2),
            (["--top-k", "3", "top_k=2"], "top_k", 2),
        ],
    )
    def test_reach_the_recipe(self, arguments: list[str], field: str, value: object) -> None:
        assert printed(*arguments)[field] == value

    def test_the_environment_counts_and_the_command_line_more(self) -> None:
        assert printed(GRAPHKILN_MODEL_STORE="elsewhere")["model_store"] == "elsewhere"
        assert printed("--model-store", "here", GRAPHKILN_MODEL_STORE="elsewhere")["model_store"] == "here"

    def test_nothing_is_left_of_the_call_before(self) -> None:
        assert printed("--softmax", "--shape", "3x4")["softmax"] is True
        assert printed()["softmax"] is False
        assert printed()["shape"] == []

    def test_a_source_and_an_override(self) -> None:
        finished = run("source=a.onnx", "name=m", "--print-recipe")
        assert yaml.safe_load(finished.output)["source"] == "a.onnx"
        finished = run("python:file.py:make=2", "--name", "m", "--print-recipe")
        assert yaml.safe_load(finished.output)["source"] == "python:file.py:make=2"

    def test_of_a_file_the_command_line_changes_what_it_says(self, tmp_path: Path) -> None:
        (tmp_path / "r.yaml").write_text("source: a.onnx\nname: n\nsoftmax: true\ntop_k: 2\n")
        finished = run("--recipe", str(tmp_path / "r.yaml"), "--top-k", "5", "--print-recipe")
        document = yaml.safe_load(finished.output)
        assert (document["source"], document["softmax"], document["top_k"]) == ("a.onnx", True, 5)


def test_a_field_is_an_option_as_soon_as_it_is_there() -> None:
    class Larger(BaseModel):
        depth: Annotated[int, Flag(panel="Own", metavar="N")] = Field(default=7, description="How deep.")
        quiet: Annotated[bool, Flag()] = Field(default=False, description="Say nothing.")
        hidden: int = Field(default=1, description="For files.")

    depth, quiet = recipe_options._params(Larger.model_fields)
    assert (depth.name, depth.opts, depth.help, depth.metavar, depth.multiple) == (
        "depth", ["--depth"], "How deep.", "N", False,
    )  # fmt: skip
    assert (quiet.is_flag, quiet.secondary_opts) == (True, []), "there is no --no-quiet"
