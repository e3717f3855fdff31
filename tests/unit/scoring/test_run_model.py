"""What the driver knows of a model, and mistakes in it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.driver import read_run_model
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.request import ScoreRequest


def request(model: Path) -> ScoreRequest:
    return ScoreRequest(source="a", destination="b", model=str(model), backends=frozenset({"graphkiln"}))


def test_its_version_and_what_changes_an_answer(digits: Path, tmp_path: Path) -> None:
    found = read_run_model(request(digits), tmp_path)
    assert (found.request.version, found.request.model) == (1, str(digits))
    other = read_run_model(replace(request(digits), top_k=2), tmp_path)
    assert found.configuration != other.configuration


def test_one_that_takes_no_images(digits: Path, tmp_path: Path) -> None:
    model = shutil.copytree(digits, tmp_path / "digits")
    for path in model.rglob("*.*"):
        if path.suffix != ".onnx":
            path.unlink()
    with pytest.raises(GraphkilnError, match="does not say how an image becomes its input"):
        read_run_model(request(model), tmp_path)


def test_an_output_that_it_does_not_have(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match="the model has no output 'nothing'"):
        read_run_model(replace(request(digits), outputs=("nothing",)), tmp_path)


@pytest.mark.parametrize(("columns", "name"), [({}, "labels"), ({"scores": True}, "scores")])
def test_a_column_of_the_input_that_is_called_like_an_answer(
    digits: Path, tmp_path: Path, columns: dict[str, Any], name: str
) -> None:
    """Told before workers are started, each of which would refuse its first unit."""
    taken = replace(request(digits), keep_columns=("price", name), **columns)
    with pytest.raises(ScoringError, match=f"the input has a column '{name}', and so has the output"):
        read_run_model(taken, tmp_path)
