"""Pages that are generated from the code."""

from __future__ import annotations

import json
import re
import shutil
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from documenting import commands, pages, reference
from documenting.text import attributes_of, code, table
from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.errors import GraphkilnError, ManifestError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.lowering import settings as setting_keys

ROOMS = ("backend", "client", "converters", "scripts/graphkiln")


@pytest.fixture(scope="module", autouse=True)
def _defined() -> None:
    for name in reference.MODULES:
        import_module(name)


def classes(repository: Path) -> dict[str, set[str]]:
    """Names of the bases of each public class of the sources."""
    texts = (path.read_text() for room in ROOMS for path in (repository / room).rglob("*.py"))
    found = (each for text in texts for each in re.findall(r"^ *class ([A-Za-z]\w*)\(([^)]*)\):", text, re.MULTILINE))
    return {name: set(re.findall(r"\w+", bases)) for name, bases in found}


def test_empty_columns_are_left_out() -> None:
    rows = [("`--a`", "", "x|y"), ("`--b`", "", "")]
    assert (
        table(("option", "default", "says"), rows)
        == "| option | says |\n| --- | --- |\n| `--a` | x\\|y |\n| `--b` |  |\n"
    )


def test_every_error_of_the_sources_is_there(repository: Path) -> None:
    known, bases = {GraphkilnError.__name__}, classes(repository)
    while found := {name for name, above in bases.items() if known & above} - known:
        known |= found
    assert {each.__name__ for each in reference.tree()} == known


def test_errors_follow_their_base_in_the_order_of_modules() -> None:
    found = list(reference.tree())
    assert all(found.index(each.__bases__[0]) < found.index(each) for each in found[1:])  # type: ignore[arg-type]
    names = [each.__name__ for each in found]
    assert names[1] == "ManifestError"
    assert names.index("ProtocolError") < names.index("ContractChanged") < names.index("ScoringError")


def test_codes_of_errors() -> None:
    page = reference.render_errors()
    assert "| `InvalidInput` | `ClientError` | 2 | INVALID_ARG: 400, INVALID_ARGUMENT |" in page
    assert "| `GraphkilnError` |  | 1 | INTERNAL: 500, INTERNAL |" in page
    assert "| `RunInterrupted` | `ScoringError` | 128 and the number of the signal |" in page
    assert "| `OutOfMemory` | `GraphkilnError` | 1 | UNAVAILABLE: 503, UNAVAILABLE |" in page
    assert "`retry_after_s`: Seconds to wait" in page


# The page of settings.


def test_settings_have_their_docstring() -> None:
    rows = {key: (values, said) for key, values, said in reference.own_settings()}
    assert set(rows) == {f"`{key}`" for key in setting_keys.OWN_KEYS}
    assert rows["`threads`"][1] == "Threads inside one operator."
    assert "`auto`" in rows["`engine`"][0]
    assert "`bf16`" in rows["`precision`"][0]


# The schema of manifests accepts the saved ones, and refuses what the reader refuses.


@pytest.fixture(scope="module")
def document(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / "model_repository/digits/1/manifest.json").read_text())
    return found


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = reference.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_every_manifest_fits(repository: Path, validator: jsonschema.Draft202012Validator) -> None:
    found = [json.loads(path.read_text()) for path in (repository / "model_repository").rglob("manifest.json")]
    assert len(found) >= 2
    for each in found:
        validator.validate(each)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("sha256",), 5),
        (("signature", "inputs", 0, "dtype"), "FP33"),
        (("signature", "inputs", 0, "shape"), "batch"),
        (("preprocess", "layout"), "WHC"),
        (("new",), 1),
        (("provenance", "versions"), []),
        (("verification", 0, "samples"), "six"),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(
    path: tuple[Any, ...], value: Any, document: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    changed = deepcopy(document)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert not validator.is_valid(changed)
    with pytest.raises(ManifestError):
        decode(Manifest, changed)


# Markdown from values and docstrings.


class Documented:
    """What it is,
    on two lines.

    More of it.

    Attributes:
        one: The first,
            on two lines: with a colon.
        two: The second | with a bar.

    Raises:
        three: Not an attribute.
    """  # noqa: D205 - a summary on two lines


def test_attributes_of_a_docstring() -> None:
    assert attributes_of(Documented) == {
        "one": "The first, on two lines: with a colon.",
        "two": "The second | with a bar.",
    }
    assert attributes_of(Documented, "Raises") == {"three": "Not an attribute."}
    assert attributes_of(code) == {}


# The page of commands.


def test_every_command_is_there_with_its_options() -> None:
    page = commands.render()
    found = dict(commands.commands())
    assert len(found) > 25
    assert "graphkiln cache list" in found
    for name, command in found.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for param in commands.parameters(command):
            assert all(f"`{option}`" in section for option in param.opts if option.startswith("--")), (name, param.name)


def test_defaults_and_choices_are_shown() -> None:
    page = commands.render()
    assert "`--objective` `throughput\\|latency\\|memory\\|cost`" in page
    assert "| *required* |" in page
    assert "half of the free memory" in page


# The page of journeys.


def test_a_row_for_each_journey_and_its_commands(tmp_path: Path) -> None:
    commands = [{"command": "graphkiln serve x | y", "seconds": 3.21}, {"command": "graphkiln models", "seconds": 0.5}]
    journey = {
        "name": "a",
        "title": "A way",
        "page": "tutorial.md",
        "given": "Nothing.",
        "seconds": 4.6,
        "load": 2.3,
        "commands": commands,
    }
    recorded = tmp_path / "journeys.json"
    facts = {"machine": "two cores", "date": "today", "place": "a new container"}
    recorded.write_text(json.dumps({"facts": facts, "journeys": [journey]}))
    page = pages.render_journeys(recorded)
    assert "| A way | [tutorial.md](tutorial.md) | 2 | 5 | 2.3 |" in page
    assert "## A way\n\nNothing.\n" in page
    assert "| `graphkiln serve x \\| y` | 3.2 |" in page
    assert "two cores; today; in a new container." in page


def test_every_page_is_up_to_date() -> None:
    assert pages.stale() == [], "run scripts/docs"


def test_changed_and_missing_pages_are_written_again(repository: Path, tmp_path: Path) -> None:
    for name in pages.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / "docs" / name, tmp_path / name)
    (tmp_path / "reference" / "errors.md").write_text("by hand")
    (tmp_path / "reference" / "cli.md").unlink()
    assert pages.write(tmp_path) == ["reference/cli.md", "reference/errors.md"]
    assert pages.stale(tmp_path) == []
