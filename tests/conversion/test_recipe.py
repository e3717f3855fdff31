"""Recipes: read, based on each other, overridden, frozen, and refused with the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from running import run_command, run_here

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.recipe_file import read_recipe

BASE = "source: timm:resnet18\nname: base\nsoftmax: true\npreprocess: {resize: 16, mean: [0.5, 0.5, 0.5]}\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_files_options_and_overrides_in_that_order(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE)
    path = write(tmp_path / "own.yaml", "_base_: base.yaml\nname: own\npreprocess: {resize: 32}\ntop_k: 2\n")
    recipe = read_recipe(path, {"top_k": 3}, ["max_batch_size=4", "preprocess.color=BGR"])
    assert (recipe.name, recipe.top_k, recipe.max_batch_size, recipe.softmax) == ("own", 3, 4, True)
    assert recipe.preprocess == {"resize": 32, "mean": [0.5, 0.5, 0.5], "color": "BGR"}
    again = read_recipe(write(tmp_path / "frozen.yaml", yaml.safe_dump(recipe.frozen())), {}, [])
    assert again == recipe


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("source: a\nname: b\nsoftmaxx: true", "unknown key 'softmaxx'.*did you mean 'softmax'"),
        ("source: a\nname: b\nprecision: fp8", "'precision'"),
        ("source: a\nname: b/c", "'name'"),
        ("source: a\nname: b\ndynamic: [x]", "NAME:AXIS=MIN..MAX"),
        ("source: a\nname: b\nshape: [3,224]", "'shape"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("_base_: r.yaml", "based on itself"),
        ("_base_: none.yaml", "cannot read recipe"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        read_recipe(write(tmp_path / "r.yaml", text), {}, [])


def test_an_override_is_key_and_value() -> None:
    with pytest.raises(ConversionError, match="'softmax' is not key=value"):
        read_recipe(None, {}, ["softmax"])


class TestCommand:
    def test_prints_the_frozen_recipe(self, tmp_path: Path) -> None:
        path = write(tmp_path / "r.yaml", BASE)
        finished = run_here("convert", "--recipe", path, "--print-recipe", "--name", "n")
        assert finished.returncode == 0, finished.stderr
        document = yaml.safe_load(finished.stdout)
        assert (document["name"], document["source"], document["softmax"]) == ("n", "timm:resnet18", True)
        assert document["precision"] == "fp32"

    def test_explains_the_passes(self) -> None:
        finished = run_here("convert", "--explain")
        for name in ("fold-constants", "pad-into-conv", "add-into-producer", "input-uint8-nhwc"):
            assert name in finished.stdout

    def test_lists_architectures(self) -> None:
        assert "resnet34" in run_here("convert", "--list", "resnet3*").stdout.split()

    def test_a_mistake_is_one_line_and_a_code(self, tmp_path: Path) -> None:
        finished = run_command("convert", "torchvision:resnet99", "--name", "m", "--model-store", tmp_path / "s")
        assert finished.returncode == 2
        assert "did you mean" in finished.stderr.splitlines()[-1]
        assert not (tmp_path / "s").exists()
