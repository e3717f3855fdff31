"""What the page reads of a model store, and what a URL cannot have it read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from graphkiln.page.server import Stores
from graphkiln_backend.graph.errors import ManifestError


def test_a_proof_has_the_figures_and_no_command(repository: Path) -> None:
    proof = Stores([repository / "docs", repository / "model_repository"]).proof("digits", "1")
    assert proof is not None
    assert proof["verification"][0]["relative_l2_limit"] == 1e-05
    assert proof["provenance"]["metrics"]["test_accuracy"] > 0.99
    assert "command" not in json.dumps(proof)
    assert len(proof["digest"]) == 64


def test_golden_samples(repository: Path) -> None:
    golden = Stores([repository / "model_repository"]).golden("digits", "1")
    assert golden is not None
    assert golden.inputs["INPUT_0"].shape == (4, 1, 32, 32)


@pytest.mark.parametrize(
    ("model", "version"),
    [
        ("digits", "2"),
        ("nothing", "1"),
        ("..", "1"),
        (".", "1"),
        ("digits", ".."),
        ("digits", "01"),
        ("a/b", "1"),
        ("", "1"),
    ],
)
def test_what_is_not_there(repository: Path, model: str, version: str) -> None:
    stores = Stores([repository / "model_repository"])
    assert stores.proof(model, version) is None
    assert stores.golden(model, version) is None


@pytest.mark.parametrize(("model", "version"), [("..", "1"), ("../digits", "1"), ("inner", "../1"), ("inner/..", "1")])
def test_a_url_leads_to_nothing_outside_of_the_store(
    repository: Path, tmp_path: Path, model: str, version: str
) -> None:
    source = repository / "model_repository" / "digits"
    (tmp_path / "store" / "inner" / "1").mkdir(parents=True)
    for outside in (tmp_path / "1", tmp_path / "digits" / "1", tmp_path / "store" / "1"):
        shutil.copytree(source / "1", outside)
    assert Stores([tmp_path / "store"]).proof(model, version) is None


def test_a_damaged_manifest(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "model_repository" / "digits", tmp_path / "digits")
    path = tmp_path / "digits" / "1" / "manifest.json"
    path.write_text(path.read_text().replace("0.9933", "0.9999"))
    with pytest.raises(ManifestError, match="not as it was written"):
        Stores([tmp_path]).proof("digits", "1")
