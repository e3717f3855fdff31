"""The format of manifests: every one that there is fits the schema, what does not fit is refused by both."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from documenting import manifest
from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.manifest import Manifest


@pytest.fixture(scope="module")
def document(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / "model_repository/digits/1/manifest.json").read_text())
    return found


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = manifest.schema()
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
def test_what_the_reader_refuses_does_not_fit(
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


def test_every_part_and_key_is_on_the_page() -> None:
    page = manifest.render()
    for part in manifest.parts():
        section = page.partition(f"\n## {part.__name__}\n")[2].partition("\n## ")[0]
        assert all(f"| `{name}` |" in section for name in manifest.schema()["$defs"][part.__name__]["properties"])
