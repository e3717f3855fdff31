"""YAML that is deep, repeats itself, or stands for more than there is room for: one line each."""

from __future__ import annotations

import json

import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.recipe_file import parse_document

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
        pytest.param(LAUGHS, "is not YAML: it stands for more than 1000000 values, line", id="a billion laughs"),
        pytest.param(MERGES, "is not YAML: it stands for more than 1000000 values, line", id="merges"),
        pytest.param("a: &a [*a]", "is not YAML: an alias stands for something around it, line 1", id="circle"),
        pytest.param("[" * 100_000, "is nested too deeply", id="deep list"),
        pytest.param("{" * 100_000, "is nested too deeply", id="deep mapping"),
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
        pytest.param("a: " + "b" * (1 << 20), "is not read: it holds more than 1 MiB of YAML", id="long"),
    ],
)
def test_mistakes_are_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConversionError) as caught:
        parse_document(text, "r.yaml")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("r.yaml")
    assert len(str(caught.value)) < 200


def test_aliases_may_be_used_as_people_do() -> None:
    text = "base: &base {mean: [0.5], std: [0.5]}\npreprocess: {<<: *base, resize: 256}\nother: *base"
    assert parse_document(text, "r")["preprocess"] == {"mean": [0.5], "std": [0.5], "resize": 256}


@pytest.mark.parametrize("text", ["", "# nothing", "---"])
def test_nothing(text: str) -> None:
    assert parse_document(text, "r") is None


def test_a_large_manifest_is_json() -> None:
    document = {"labels": ["name"] * 300_000}
    assert parse_document(json.dumps(document, indent=1), "manifest.json") == document


def test_yaml_in_braces() -> None:
    assert parse_document("{a: 1, b: [x]}", "r") == {"a": 1, "b": ["x"]}
