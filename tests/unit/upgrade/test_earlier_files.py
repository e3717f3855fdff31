"""Files of earlier commits are read, and read new versions: upgrades, and the way back.

`earlier.zip` holds what these commits wrote, on two cores of an Intel Xeon. Of df8567b4, which called itself
`0.1.1.devN+untagged`:

    manifest.schema.json    docs/reference, which refuses unknown keys as the checkout does
    manifest.json   of `graphkiln convert python:net.py:make --shape 1x32x32 --input encoded --preprocess ...`
    scored/         of `graphkiln score images --model digits --rows-per-unit 4`, killed after 8 of 82 units
    journal.jsonl   of `graphkiln tune model_repository/digits --p99 200ms --budget 120s`, killed; folders renamed

Of 848ec1a7, since which these formats exist:

    record/         of `graphkiln serve --record DIR --record-share 100%`, 60 requests with a golden sample of digits
    rollout/        of `graphkiln rollout start digits --version 2 --shadow 100% --agree 90%`, after 106 comparisons

The artifact cache has `tests/unit/lowering/test_old_cache.py`, signatures `tests/unit/repository/test_signing.py`.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx_ir
import pytest
from graphs import draw, graph

from graphkiln.tuning.journal import Journal
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.records import Record
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.messages import InputRange
from graphkiln_backend.scoring.plan import PLAN, read_plan, read_resume_state
from graphkiln_backend.scoring.sources.base import digest
from graphkiln_backend.server.rollouts import RolloutFolder
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe

CONFIGURATION = "08f388366071d75a"  # the same in tests/unit/scoring/test_model.py
GRAPH = "(float[n,8] x) => (float[n,4] y) { y = MatMul(x, w) }"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with zipfile.ZipFile(Path(__file__).parent / "earlier.zip") as archive:
        archive.extractall(folder)
    return folder


def test_manifest(earlier: Path) -> None:
    manifest = Manifest.read(earlier / "manifest.json")
    assert [spec.name for spec in manifest.signature.inputs] == ["INPUT_0"]
    assert manifest.preprocess is not None
    assert manifest.verification


def test_digests_beside_the_recipe_are_read(earlier: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(earlier / "manifest.json")
    assert manifest.conversion is not None
    path = tmp_path / "manifest.json"
    replace(manifest, conversion=replace(manifest.conversion, digests={"source": "0" * 64})).write(path)
    assert json.loads(path.read_text())["conversion"]["digests"] == {
        "source": "0" * 64
    }  # as checkouts of one day wrote it
    conversion = Manifest.read(path).conversion
    assert conversion is not None
    assert conversion.digests == {"source": "0" * 64}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_new_versions_are_valid_before(earlier: Path, tmp_path: Path, precision: str) -> None:
    onnx_ir.save(graph(GRAPH, w=draw(8, 4)), tmp_path / "net.onnx")
    np.savez(tmp_path / "samples.npz", x=draw(64, 8, seed=1))
    np.savez(tmp_path / "calibration.npz", x=draw(64, 8, seed=2))
    files: dict[str, Any] = {"samples": tmp_path / "samples.npz"}
    if precision == "int8":
        files["calibration"] = tmp_path / "calibration.npz"
    recipe = Recipe(
        source=str(tmp_path / "net.onnx"), name="net", model_store=tmp_path / "store",
        precision=Precision(precision), relative_l2=0.5, **files,
    )  # fmt: skip
    document = json.loads((convert(recipe) / "manifest.json").read_text())
    assert document["conversion"]["recipe"]["digests"].keys() == {"source", *files}
    jsonschema.validate(document, json.loads((earlier / "manifest.schema.json").read_text()))


def test_interrupted_run_goes_on_where_it_was(earlier: Path) -> None:
    destination, plan = ParquetDestination(FolderStore(earlier / "scored")), earlier / "scored" / PLAN
    state = read_resume_state(destination.committed_ids(), plan)
    assert (state.done_units, state.done_rows, state.stale) == (8, 30, frozenset())
    committed = list(destination.describe(sorted(state.committed)))
    assert {(each.configuration, each.damage) for each in committed} == {(CONFIGURATION, "")}
    for unit in read_plan(plan):  # a source that lists the same files plans the same units
        found = InputRange(path=unit.path, part=unit.part, identity=digest(unit.part), rows=unit.rows)
        assert found.unit(CONFIGURATION).id == unit.id


def test_journal_of_another_release_is_refused_and_kept(earlier: Path, tmp_path: Path) -> None:
    """Its search would measure other software; `tune` looks for a journal of its own release."""
    path = Path(shutil.copy(earlier / "journal.jsonl", tmp_path))
    before = path.read_text()
    subject = {key: value for key, value in json.loads(before.splitlines()[0]).items() if key != "version"}
    with pytest.raises(
        MeasurementError, match=r"version is 2, the journal's 1 \(delete it to measure everything again"
    ):
        Journal(path, subject)
    assert path.read_text() == before


def test_record(earlier: Path, repository: Path) -> None:
    golden = GoldenSamples.read(repository / "model_repository" / "digits" / "1" / "golden.npz")
    rows = list(Record.find(earlier / "record").requests(range(60)))
    assert {(row.model, row.version) for row in rows} == {("digits", 2)}
    for row in (rows[0], rows[-1]):
        np.testing.assert_array_equal(row.inputs["INPUT_0"], golden.inputs["INPUT_0"][:1])
        np.testing.assert_allclose(row.outputs["OUTPUT_0"], golden.graph_outputs["OUTPUT_0"][:1], atol=1e-4)


def test_rollout(earlier: Path, tmp_path: Path) -> None:
    folder = RolloutFolder(tmp_path / "state", tmp_path / "store")
    shutil.copytree(earlier / "rollout", folder.path)
    wanted, progress = folder.read_wanted("digits"), folder.read_progress("digits")
    assert wanted
    assert (wanted.candidate, wanted.serving, wanted.phase, wanted.gates.agree) == (2, 1, "shadow", 0.9)
    assert progress
    assert (progress.compared, progress.agreed, progress.applied_serial) == (106, 106, wanted.serial)
    assert wanted.is_running
