"""`graphkiln embed`: table, JSON, CSV and atomically written Parquet files."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import FakeClient, Finished, RunVerb, words

from graphkiln.cli import embed as verb
from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.errors import InvalidInput, ModelNotFound
from graphkiln_backend.graph.preprocess import Preprocess

OUT = "v.parquet"
NAMES = ("3.png", "10.png", "2.png", "c.png")


def published(size: int) -> dict[str, Any]:
    contracts = Contracts.of({"2": Contract(preprocess=Preprocess(resize=size, crop=(size, size)))})
    return {"parameters": {"contracts": {"string_value": contracts.to_json()}}}


@pytest.fixture
def photos(tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.png", "b/10.png", "a/3.png", "c.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    client.fake_model.answers = {name: np.full(3, place, np.float32) for place, name in enumerate(NAMES)}
    client.fake_model.versions, client.fake_model.config = ["1", "2"], published(4)
    return Path("photos")


@pytest.fixture
def embed(run: RunVerb, photos: Path) -> Any:
    def run_embed(*words: object) -> Finished:
        return run("embed", *(words or [photos]), "--model", "m", "--out", OUT)

    return run_embed


def test_table_json_and_csv(run: RunVerb, photos: Path, client: FakeClient) -> None:
    client.fake_model.answers["c.png"] = np.array([3, 4, 0, 0, 0], np.float32)
    image = photos / "c.png"
    table = run("embed", image, "--model", "m").out
    assert "5.0000" in table
    assert "3.0000 4.0000 0.0000 0.0000" in table
    assert json.loads(run("embed", image, "--model", "m", "--json").out) == [
        {"source": str(image), "vector": [3, 4, 0, 0, 0]}
    ]
    (row,) = csv.DictReader(io.StringIO(run("embed", image, "--model", "m", "--csv").out))
    assert (row["source"], row["v1"], row["v4"]) == (str(image), "4.0", "0.0")


def test_parquet_rows_are_distinct_and_sorted(embed: Any, client: FakeClient, photos: Path) -> None:
    """All requests go to the version in the metadata."""
    finished = embed(photos / "c.png", photos / "b", photos)
    assert (finished.code, finished.out) == (0, "")
    assert "4 vectors of 3 features, of lengths from 0 to 5.196, by 'm' version 2" in finished.err
    table = pq.read_table(OUT)
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 3)
    expected = ["photos/a/3.png", "photos/b/10.png", "photos/b/2.png", "photos/c.png"]
    assert table.column("source").to_pylist() == expected
    assert [vector[0] for vector in table.column("vector").to_pylist()] == [0, 1, 2, 3]
    contract = Contract(preprocess=Preprocess(resize=4, crop=(4, 4)))
    expected = {b"model": b"m", b"version": b"2", b"contract": contract.digest.encode(), b"graph": b""}
    assert table.schema.metadata == {b"graphkiln." + key: value for key, value in expected.items()}
    assert set(client.models_opened) == {("m", ""), ("m", "2")}
    assert client.open == 0


def test_row_groups_and_undecodable_names(
    embed: Any, photos: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = os.fsdecode(b"\xff.png")
    (photos / odd).write_bytes(b"")
    client.fake_model.answers[odd] = np.zeros(3, np.float32)
    monkeypatch.setattr(verb, "_ROW_GROUP_BYTES", 2 * 3 * 4)  # two vectors
    assert embed().code == 0
    assert pq.ParquetFile(OUT).num_row_groups == 3
    assert pq.read_table(OUT).column("source").to_pylist()[-1] == "photos/\\xff.png"


@pytest.mark.parametrize("form", [["--out", OUT], ["--json"]])
def test_normalize_option(run: RunVerb, client: FakeClient, photos: Path, form: list[str]) -> None:
    for flags, normalize in ((), None), (["--normalize"], True):
        assert run("embed", photos, "--model", "m", *form, *flags).code == 0
        assert client.fake_model.options["normalize"] is normalize


def test_lengths_are_reported(embed: Any, client: FakeClient) -> None:
    for value, lengths in ((3**-0.5, "of length 1"), (float("nan"), "none finite")):
        for vector in client.fake_model.answers.values():
            vector[:] = value
        assert f"4 vectors of 3 features, {lengths}, by 'm'" in embed().err


def test_failed_images_are_listed(embed: Any, client: FakeClient) -> None:
    del client.fake_model.answers["10.png"]
    client.fake_model.error = InvalidInput("damaged")
    finished = embed()
    assert finished.code == 1
    assert "photos/b/10.png: damaged" in finished.err
    assert pq.read_table(OUT).num_rows == 3


@pytest.mark.parametrize("errors", [["bad"] * 4, ["bad", "worse", "bad", "bad"]])
def test_nothing_is_written_if_all_images_fail(
    embed: Any, client: FakeClient, tmp_path: Path, errors: list[str]
) -> None:
    names = sorted(client.fake_model.answers)
    client.fake_model.answers = {name: InvalidInput(error) for name, error in zip(names, errors, strict=True)}
    (tmp_path / OUT).write_bytes(b"PAR1 old")
    finished = embed()
    assert finished.code == (2 if len(set(errors)) == 1 else 1)
    assert finished.err.count("bad") == (1 if len(set(errors)) == 1 else 3)
    assert (tmp_path / OUT).read_bytes() == b"PAR1 old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", OUT]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (ModelNotFound("gone"), 2),
        (None, 1),  # replaced during the run
        *(pytest.param(number, 128 + number, marks=pytest.mark.alone) for number in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
@pytest.mark.usefixtures("hangup_ends")
def test_interrupted_run_leaves_no_file(
    embed: Any, client: FakeClient, monkeypatch: pytest.MonkeyPatch, *, error: Any, code: int
) -> None:
    def embed_many(images: list[Path], **_: Any) -> Iterator[Any]:
        for place, image in enumerate(images):
            if place and isinstance(error, signal.Signals):
                signal.raise_signal(error)
            elif place and error:
                raise error
            yield client.fake_model.answers[image.name]
        client.fake_model.config = published(8)

    monkeypatch.setattr(client.fake_model, "embed_many", embed_many, raising=False)
    finished = embed()
    assert finished.code == code
    assert error or "was replaced" in finished.err
    assert [path.name for path in Path().iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "--csv"], "choose one"),
        (["--out", OUT, "--json"], "--json"),
        (["--out", "none/v.parquet"], "No such file"),
        (["--out", "n" * 300], "cannot write"),
        (["--out", "/dev/null"], "not a regular file"),
        (["--out", "v.NPY"], "v.parquet"),
    ],
)
def test_mistakes(run: RunVerb, photos: Path, client: FakeClient, options: list[str], message: str) -> None:
    finished = run("embed", photos, "--model", "m", *options)
    assert (finished.code, message in words(finished.err)) == (2, True), finished.err
    assert not client.connected


@pytest.mark.parametrize("size", [0, 4])
def test_vectors_of_different_lengths(embed: Any, client: FakeClient, tmp_path: Path, size: int) -> None:
    client.fake_model.answers["c.png"] = np.zeros(size, np.float32)
    assert "features" in embed().err
    assert not (tmp_path / OUT).exists()


def test_missing_pyarrow(embed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphkiln_backend.graph.modules.find_spec", lambda _: None)
    finished = embed()
    assert finished.code == 1
    assert "embed --out needs pyarrow" in finished.err


def test_other_formats_are_not_overwritten_and_links_are_kept(embed: Any, client: FakeClient, tmp_path: Path) -> None:
    """A shell expands `embed --out *.jpg` to several images."""
    for content, code in ((b"\xff\xd8\xff an image", 2), (b"PAR1 of before", 0), (b"", 0)):
        (tmp_path / "target").write_bytes(content)
        (tmp_path / OUT).unlink(missing_ok=True)
        (tmp_path / OUT).symlink_to("target")
        finished = embed()
        assert finished.code == code
        assert ("not a Parquet file" in finished.err) == (code == 2)
        assert ((tmp_path / "target").read_bytes() == content) == (code == 2)
        assert (tmp_path / OUT).is_symlink()
    assert len(client.connected) == 2


@pytest.mark.parametrize(
    ("versions", "asked", "used"),
    [([], "", ""), (["9", "10"], "", "10"), (["9", "10"], "9", "9")],
)
def test_one_version_computes_all_vectors(
    run: RunVerb, photos: Path, client: FakeClient, *, versions: list[str], asked: str, used: str
) -> None:
    contracts = {"9": Contract(), "10": Contract(preprocess=Preprocess(resize=4, crop=(4, 4)))}
    client.fake_model.versions = versions
    client.fake_model.config = {"parameters": {"contracts": {"string_value": Contracts.of(contracts).to_json()}}}
    assert run("embed", photos, "--model", "m", "--out", OUT, *(["--version", asked] if asked else [])).code == 0
    assert client.models_opened[-1] == ("m", used)
    metadata = pq.read_table(OUT).schema.metadata
    digest = contracts[used].digest if used else ""
    assert (metadata[b"graphkiln.version"], metadata[b"graphkiln.contract"]) == (used.encode(), digest.encode())
