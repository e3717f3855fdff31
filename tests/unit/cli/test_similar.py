"""`graphkiln similar`: what it finds, what it asks, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import FakeClient, RunVerb

from graphkiln.cli.vector_file import VectorWriter, replaced_file
from graphkiln.cli.vector_origin import Origin
from graphkiln.scoring import extra
from graphkiln_backend.graph.errors import InvalidInput, ModelNotFound

SOURCES = {"p/far.png": [-1, 0], "p/[b]near[/].png": [2, 0.1], "p/equal.png": [3, 0], "p/none.png": [0, 0]}


def write(path: Path, vectors: Mapping[str, Any] = SOURCES, **origin: str) -> None:
    made_by = Origin(**{"model": "m", "version": "3", "contract": "", **origin})
    with replaced_file(path) as file, VectorWriter(file, made_by) as writer:
        for source, vector in vectors.items():
            writer.add(Path(source), np.array(vector, np.float32))


@pytest.fixture
def similar(run: RunVerb, client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "v")
    client.fake_model.answers = {"query.png": np.array([1, 0], np.float32)}
    client.fake_model.versions = ["3", "4"]
    return lambda *words: run("similar", "query.png", "--in", "v", *words)


def test_a_table(similar: Any) -> None:
    finished = similar()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in finished.out.splitlines() if "│" in line]
    assert rows == [
        ["1", "1.0000", "p/equal.png"],
        ["2", "0.9988", "p/[b]near[/].png"],
        ["3", "-1.0000", "p/far.png"],
    ]
    assert "1 of 4 vectors have no direction" in finished.err


def test_json(similar: Any) -> None:
    (row,) = json.loads(similar("--json", "--top", "1").out)
    assert row == {"source": "p/equal.png", "score": 1.0}


def test_the_model_that_made_the_file_is_asked(similar: Any, client: FakeClient) -> None:
    assert similar().code == 0
    assert set(client.models_opened) == {("m", "3")}
    assert client.open == 0


@pytest.mark.parametrize(
    ("words", "opened", "said"),
    [
        (["--version", "4"], ("m", "4"), "'m' version 4"),
        (["--model", "n"], ("n", "4"), "'n' version 4"),
        (["--model", "n", "--version", "3"], ("n", "3"), "'n' version 3"),
    ],
)
def test_another_one_is_asked_where_it_is_named_and_allowed(
    similar: Any, client: FakeClient, words: list[str], opened: tuple[str, str], said: str
) -> None:
    refused = similar(*words)
    assert refused.code == 2
    assert f"were made by 'm' version 3, the image's would be by {said}" in refused.err
    assert "--allow-other" in refused.err
    assert similar(*words, "--allow-other").code == 0
    assert client.models_opened[-1] == opened


def test_another_contract_under_the_same_version(similar: Any, tmp_path: Path) -> None:
    write(tmp_path / "v", contract="abcd")
    finished = similar()
    assert (finished.code, "(contract abcd)" in finished.err) == (2, True)


def test_vectors_of_another_length_are_always_refused(similar: Any, client: FakeClient) -> None:
    client.fake_model.answers["query.png"] = np.ones(3, np.float32)
    for words in ([], ["--allow-other"]):
        finished = similar(*words)
        assert finished.code == 2
        assert "v holds vectors of 2 features, 'm' gives 3" in finished.err


def test_a_version_that_is_gone(similar: Any, client: FakeClient) -> None:
    client.fake_model.answers = {}
    client.fake_model.error = ModelNotFound("no version 3")
    finished = similar()
    assert finished.code == 2
    assert "made by 'm' version 3, which this server does not have: no version 3" in finished.err
    plain = similar("--model", "n", "--allow-other")
    assert (plain.code, plain.err.strip()) == (2, "graphkiln: no version 3")


def test_an_image_that_cannot_be_read(similar: Any, client: FakeClient) -> None:
    client.fake_model.answers = {}
    client.fake_model.error = InvalidInput("query.png is no image")
    assert similar().code == 2


@pytest.mark.usefixtures("similar")
def test_mistakes(run: RunVerb, client: FakeClient, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    for words, said in (
        (["query.png"], "--in"),
        (["--in", "v"], "IMAGE"),
        (["query.png", "--in", "none"], "none cannot be read as Parquet: No such file"),
        (["query.png", "--in", "junk"], "junk cannot be read as Parquet"),
        (["query.png", "--in", "v", "--top", "0"], "--top"),
        (["query.png", "query.png", "--in", "v"], "query.png"),
        (["-", "--in", "v"], "piped in"),
        (["https://example.org/query.png", "--in", "v"], "is a URL"),
    ):
        finished = run("similar", *words)
        assert (finished.code, said in finished.err) == (2, True), finished.err
    assert not client.connected


def test_without_what_reads_parquet(similar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda _: None)
    finished = similar()
    assert (finished.code, "similar needs pyarrow (pip install 'graphkiln[score]')" in finished.err) == (1, True)


@pytest.mark.parametrize(("flags", "form"), [((), "auto"), (("--encoded",), "encoded"), (("--tensor",), "tensor")])
def test_how_the_image_travels(similar: Any, client: FakeClient, flags: tuple[str, ...], form: str) -> None:
    assert similar(*flags).code == 0
    assert client.image_form == form


def test_where_nothing_can_be_compared_that_is_the_error(similar: Any, tmp_path: Path) -> None:
    """An empty table looked like an answer."""
    pq.write_table(pq.read_table(tmp_path / "v").slice(0, 0), tmp_path / "v")
    finished = similar("--json")
    assert (finished.code, finished.out, "v holds no vectors" in finished.err) == (2, "", True)
    write(tmp_path / "v", {"a": [0, 0], "b": [np.nan, 1]})
    finished = similar()
    assert (finished.code, "all vectors of v have no direction" in finished.err) == (2, True)
