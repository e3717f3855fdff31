"""What a version says goes before what its model's configuration says."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.scoring.model import complete_contract

SPEC, OTHER = Preprocess(crop=(8, 8)), Preprocess(crop=(9, 9))
RANKING = Ranking(scores="y", indices="i")


def config(folder: Path, **said: Preprocess | Ranking) -> ModelConfigProto:
    written = ModelConfigProto()
    for name in ("y", "z"):
        written.output.add(name=name, label_filename=f"{name}.txt")
        (folder / f"{name}.txt").write_text(f"first of {name}\n")
    for key, value in said.items():
        written.parameters[key].string_value = value.to_json()
    return written


def version(folder: Path, contract: Contract | None = None) -> ModelVersion:
    return ModelVersion(graph_path=folder / "x", manifest=None, golden=None, contract=contract or Contract())


def test_a_bare_graph_has_what_its_configuration_says(tmp_path: Path) -> None:
    written = config(tmp_path, preprocess=SPEC, ranking=RANKING)
    assert complete_contract(version(tmp_path), written, tmp_path) == Contract(
        preprocess=SPEC, labels=("first of y",), output="y", ranking=RANKING
    )


def test_a_version_knows_better(tmp_path: Path) -> None:
    own = Contract(preprocess=OTHER, labels=("own",), output="z")
    assert complete_contract(version(tmp_path, own), config(tmp_path, preprocess=SPEC), tmp_path) == own


def test_nobody_says_anything(tmp_path: Path) -> None:
    assert complete_contract(version(tmp_path), ModelConfigProto(), tmp_path) == Contract()
