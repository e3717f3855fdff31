"""Recipes from files, manifests, options and overrides; mistakes are reported in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from odd_files import ODD

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.recipe_file import parse_document, read_recipe

NEEDED = {"source": "model.onnx", "name": "m"}

OLD_MANIFEST: dict[str, Any] = {
    "format_version": 1,
    "graph_file": "model.onnx",
    "conversion": {
        "recipe": {
            "source": "tiny.onnx", "name": "tiny", "model_store": "store", "version": 1, "weights": None,
            "pretrained": False, "features_only": False, "out_indices": [], "shape": [], "dynamic": [],
            "keep_names": False, "outputs": [], "input": "source", "gradient": "", "softmax": True, "top_k": 0,
            "layout": "nchw", "skip": [], "precision": "int8", "amp": "O2", "lower_edges": False, "keep_fp32": [],
            "search_keep": False, "calibration": "c.npz", "quantise_bias": False, "quantise_ends": False,
            "calibration_method": "minmax", "samples": None, "reference": None, "preprocess": {"resize": 16},
            "labels": None, "max_batch_size": 32, "relative_l2": None,
        },
        "precision": "int8",
    },
}  # fmt: skip
# A manifest of a release with two other spellings of keys.


def write(path: Path, document: object) -> Path:
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


class TestOrder:
    def test_later_values_win(self, tmp_path: Path) -> None:
        path = write(tmp_path / "r.yaml", {**NEEDED, "top_k": 1, "amp": "O1"})
        made = read_recipe(path, {"top_k": 2}, ["top_k=3"])
        assert (made.top_k, made.amp) == (3, "O1")
        assert read_recipe(path, {"top_k": 2}, []).top_k == 2


class TestBases:
    def test_bases_are_merged_key_by_key(self, tmp_path: Path) -> None:
        write(tmp_path / "a.yaml", {**NEEDED, "preprocess": {"resize": 8, "mean": [0.5]}, "skip": ["clean-up"]})
        path = write(tmp_path / "b.yaml", {"_base_": "a.yaml", "preprocess": {"resize": 16}, "skip": ["share-weights"]})
        made = read_recipe(path, {}, [])
        assert made.preprocess == {"resize": 16, "mean": [0.5]}
        assert made.skip == ("share-weights",), "lists are replaced"

    def test_circular_bases_are_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "a.yaml", {"_base_": "b.yaml"})
        path = write(tmp_path / "b.yaml", {"_base_": "a.yaml"})
        with pytest.raises(ConversionError, match=r"based on itself: .*b\.yaml -> .*a\.yaml"):
            read_recipe(path, {}, [])

    @pytest.mark.parametrize("base", [{"a": 1}, [3]])
    def test_bases_that_are_not_file_names_are_refused(self, tmp_path: Path, base: object) -> None:
        with pytest.raises(ConversionError, match="cannot read recipe"):
            read_recipe(write(tmp_path / "a.yaml", {**NEEDED, "_base_": base}), {}, [])


class TestManifests:
    @pytest.fixture
    def manifest(self, tmp_path: Path) -> Path:
        return write(tmp_path / "manifest.json", json.dumps(OLD_MANIFEST))

    def test_a_manifest_of_an_earlier_release_repeats_the_conversion(self, manifest: Path) -> None:
        made = read_recipe(manifest, {}, [])
        assert (made.source, made.softmax, made.precision, str(made.calibration)) == (
            "tiny.onnx",
            True,
            "int8",
            "c.npz",
        )
        assert (made.quantize_bias, made.quantize_ends) == (False, False)
        assert made.int8_by == "onnxruntime", "not the choice of later releases"

    @pytest.mark.parametrize("override", ["quantize_bias=true", "quantise_bias=true"])
    def test_keys_are_overridden_in_either_spelling(self, manifest: Path, override: str) -> None:
        made = read_recipe(manifest, {}, [override])
        assert (made.quantize_bias, made.quantize_ends) == (True, False)

    @pytest.mark.parametrize("conversion", [None, {"recipe": []}])
    def test_a_manifest_without_a_recipe_is_refused(self, tmp_path: Path, conversion: object) -> None:
        path = write(tmp_path / "manifest.json", json.dumps({**OLD_MANIFEST, "conversion": conversion}))
        with pytest.raises(ConversionError, match="has no recipe"):
            read_recipe(path, {}, [])


class TestOverrides:
    def test_values_are_yaml(self) -> None:
        overrides = [
            "out_indices=[1, 2]",
            "softmax=yes",
            "relative_l2=1.0e-3",
            "gradient=a:b",
            "preprocess={resize: 8}",
        ]
        made = read_recipe(None, NEEDED, overrides)
        assert (made.out_indices, made.softmax, made.relative_l2, made.gradient) == ((1, 2), True, 1e-3, "a:b")
        assert made.preprocess == {"resize": 8}

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("softmax", "'softmax' is not key=value"),
            ("softmaxx=1", "unknown key 'softmaxx'.*did you mean 'softmax'"),
            ("top_k={", r"top_k=\{ is not YAML"),
            ("name.first=a", "'name' is a value, not a mapping"),
            ("top_k=many", "'top_k': Input should be a valid integer"),
            ("precision=fp8", "'precision': Input should be 'fp32', 'fp16', 'bf16' or 'int8'"),
            ("=3", "unknown key"),
        ],
    )
    def test_invalid_overrides_are_refused(self, override: str, words: str) -> None:
        with pytest.raises(ConversionError, match=words):
            read_recipe(None, NEEDED, [override])


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("- a\n- b", "must be a mapping"),
            ("name: a", r"'source' is missing.*KIND:LOCATION"),
            ("1: 2\nsource: a\nname: b", "recipe: '1"),
            ("source: a\nname: b\nshape: [3,224]", r"'shape\.0'"),
        ],
    )
    def test_invalid_files_are_refused(self, tmp_path: Path, text: str, words: str) -> None:
        with pytest.raises(ConversionError, match=words):
            read_recipe(write(tmp_path / "r.yaml", text), {}, [])

    def test_unreadable_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
        for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "latin.yaml"):
            with pytest.raises(ConversionError, match="cannot read recipe"):
                read_recipe(path, {}, [])


PYTHON = {**NEEDED, "source": "python:evil.py:make"}


class TestCode:
    def test_a_file_cannot_name_code_to_run(self, tmp_path: Path) -> None:
        path = write(tmp_path / "r.yaml", PYTHON)
        with pytest.raises(ConversionError, match=r"r\.yaml would run code: python:evil\.py:make .*--allow-code"):
            read_recipe(path, {}, [])
        assert read_recipe(path, {"allow_code": True}, []).allow_code

    def test_the_command_line_can_name_code_to_run(self, tmp_path: Path) -> None:
        path = write(tmp_path / "r.yaml", NEEDED)
        assert read_recipe(path, {"source": "python:mine.py:make"}, []).source == "python:mine.py:make"
        assert read_recipe(path, {}, ["source=python:mine.py:make"]).source == "python:mine.py:make"

    def test_a_file_cannot_allow_code(self, tmp_path: Path) -> None:
        path = write(tmp_path / "r.yaml", {**PYTHON, "allow_code": True})
        with pytest.raises(ConversionError, match=r"contains allow_code"):
            read_recipe(path, {"allow_code": True}, [])


class TestOddFiles:
    @pytest.mark.parametrize("kind", ODD)
    def test_special_files_are_refused(self, tmp_path: Path, kind: str) -> None:
        make, reason = ODD[kind]
        make(tmp_path / "r.yaml")
        reason = "circle|loop|symbolic" if kind == "loop" else reason
        with pytest.raises(ConversionError, match=rf"cannot read recipe .*: .*({reason})"):
            read_recipe(tmp_path / "r.yaml", {}, [])

    def test_too_many_bases_are_refused(self, tmp_path: Path) -> None:
        for number in range(10):
            write(tmp_path / f"{number}.yaml", {"_base_": [f"{number + 1}.yaml"] * 10})
        write(tmp_path / "10.yaml", NEEDED)
        with pytest.raises(ConversionError, match=r"0\.yaml is based on more than 100 files"):
            read_recipe(tmp_path / "0.yaml", {}, [])


# YAML that is nested too deeply, has duplicate keys, or expands to too much data.

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: v}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(LAUGHS, "is not YAML: it expands to more than 1000000 values, line", id="a billion laughs"),
        pytest.param(MERGES, "is not YAML: it expands to more than 1000000 values, line", id="merges"),
        pytest.param("a: &a [*a]", "is not YAML: an alias refers to a value around it, line 1", id="circle"),
        pytest.param("[" * 100_000, "is nested too deeply", id="deep list"),
        pytest.param("- " * 100_000, "is nested too deeply", id="deep block"),
        pytest.param('{"a":' * 100_000, "is nested too deeply", id="deep JSON"),
        pytest.param("a: 1\nb: 2\na: 3", "is not YAML: key 'a' is given twice, line 3, column 1", id="twice"),
        pytest.param('{"a": 1, "a": 2}', "key 'a' is given twice", id="twice in JSON"),
        pytest.param("a: {b: 1, b: 2}", "key 'b' is given twice", id="twice inside"),
        pytest.param("a: [", "is not YAML: expected the node content", id="cut short"),
        pytest.param("a: 2024-99-99", "is not YAML: month must be in", id="date"),
        pytest.param("a: *b", "is not YAML: found undefined alias", id="unknown alias"),
        pytest.param("a: !!python/name:os.system", "is not YAML: could not determine a constructor", id="code"),
        pytest.param("? [a]\n: b", "is not YAML: found unhashable key", id="a list as key"),
        pytest.param("a: \x00", "is not YAML: unacceptable character", id="null character"),
        pytest.param("a\n---\nb", "is not YAML: but found another document", id="two documents"),
        pytest.param("a: " + "b" * (1 << 20), "is too large: it has more than 1 MiB of YAML", id="long"),
    ],
)
def test_mistakes_are_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConversionError) as caught:
        parse_document(text, "r.yaml")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("r.yaml")
    assert len(str(caught.value)) < 200


def test_ordinary_aliases_are_accepted() -> None:
    text = "base: &base {mean: [0.5], std: [0.5]}\npreprocess: {<<: *base, resize: 256}\nother: *base"
    assert parse_document(text, "r")["preprocess"] == {"mean": [0.5], "std": [0.5], "resize": 256}


def test_a_large_manifest_is_parsed_as_json() -> None:
    document = {"labels": ["name"] * 300_000}
    assert parse_document(json.dumps(document, indent=1), "manifest.json") == document
