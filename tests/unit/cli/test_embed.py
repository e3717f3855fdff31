"""`graphkiln embed`: a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from commands import FakeClient, RunVerb


@pytest.fixture
def image(tmp_path: Path, client: FakeClient) -> Path:
    (tmp_path / "a.png").write_bytes(b"")
    client.fake_model.answers = {"a.png": np.array([3, 4, 0, 0, 0], np.float32)}
    return tmp_path / "a.png"


def test_a_table(run: RunVerb, image: Path) -> None:
    out = run("embed", image, "--model", "m").out
    assert "5.0000" in out
    assert "3.0000 4.0000 0.0000 0.0000" in out


def test_json(run: RunVerb, image: Path) -> None:
    (row,) = json.loads(run("embed", image, "--model", "m", "--json").out)
    assert row == {"source": str(image), "vector": [3, 4, 0, 0, 0]}


def test_csv(run: RunVerb, image: Path) -> None:
    (row,) = csv.DictReader(io.StringIO(run("embed", image, "--model", "m", "--csv").out))
    assert (row["source"], row["v1"], row["v4"]) == (str(image), "4.0", "0.0")


def test_both_formats(run: RunVerb, image: Path) -> None:
    assert run("embed", image, "--model", "m", "--csv", "--json").code == 2


@pytest.mark.parametrize(("flags", "form"), [((), "auto"), (("--encoded",), "encoded"), (("--tensor",), "tensor")])
def test_how_images_travel(run: RunVerb, image: Path, client: FakeClient, flags: tuple[str, ...], form: str) -> None:
    run("embed", image, "--model", "m", *flags)
    assert client.image_form == form


@pytest.mark.parametrize("name", ["v.csv", "v.NPY"])
def test_a_file_that_is_named_as_something_else(run: RunVerb, image: Path, name: str) -> None:
    finished = run("embed", image, "--model", "m", "--out", image.parent / name)
    assert (finished.code, "v.parquet" in finished.err) == (2, True)
    assert not (image.parent / name).exists()


@pytest.mark.parametrize(("flags", "normalize"), [((), None), (("--normalize",), True)])
def test_vectors_are_divided_by_their_length_when_that_is_asked_for(
    run: RunVerb, image: Path, client: FakeClient, flags: tuple[str, ...], normalize: bool | None
) -> None:
    for form in ("--json", "--csv"):
        run("embed", image, "--model", "m", form, *flags)
        assert client.fake_model.options["normalize"] is normalize
