"""`graphkiln embed`: a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import FakeClient, Finished, RunVerb

from graphkiln.scoring import extra
from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.errors import InvalidInput, ModelNotFound
from graphkiln_backend.graph.preprocess import Preprocess


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


@pytest.mark.parametrize("name", ["v.csv", "v.NPY"])
def test_a_file_that_is_named_as_something_else(run: RunVerb, image: Path, name: str) -> None:
    finished = run("embed", image, "--model", "m", "--out", image.parent / name)
    assert (finished.code, "v.parquet" in finished.err) == (2, True)
    assert not (image.parent / name).exists()


# `graphkiln embed --out`: the file, what is said of images that fail, and what ends it.

OUT = "v.parquet"


def published(size: int) -> dict[str, Any]:
    said = Contracts.of({"2": Contract(preprocess=Preprocess(resize=size, crop=(size, size)))})
    return {"parameters": {"contracts": {"string_value": said.to_json()}}}


@pytest.fixture
def photos(tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.png", "b/10.png", "a/3.png", "c.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    names = ("3.png", "10.png", "2.png", "c.png")
    client.fake_model.answers = {name: np.full(3, place, np.float32) for place, name in enumerate(names)}
    client.fake_model.versions, client.fake_model.config = ["1", "2"], published(4)
    return Path("photos")


@pytest.fixture
def embed(run: RunVerb, photos: Path) -> Any:
    def run_embed(*words: object) -> Finished:
        return run("embed", *(words or [photos]), "--model", "m", "--out", OUT)

    return run_embed


def test_rows_are_sorted_by_path_and_each_image_has_one(embed: Any, client: FakeClient, photos: Path) -> None:
    finished = embed(photos / "c.png", photos / "b", photos)
    assert (finished.code, finished.out) == (0, "")
    assert "4 vectors of 3 features, of lengths from 0 to 5.196, by 'm' version 2" in finished.err
    table = pq.read_table(OUT)
    expected = ["photos/a/3.png", "photos/b/10.png", "photos/b/2.png", "photos/c.png"]
    assert table.column("source").to_pylist() == expected
    assert [vector[0] for vector in table.column("vector").to_pylist()] == [0, 1, 2, 3]
    assert table.schema.metadata[b"graphkiln.version"] == b"2"
    assert client.open == 0


@pytest.mark.parametrize("form", [["--out", OUT], ["--json"], ["--csv"]])
@pytest.mark.parametrize(("flags", "normalize"), [((), None), (("--normalize",), True)])
def test_the_length_is_as_asked_for(
    run: RunVerb, client: FakeClient, photos: Path, *, form: list[str], flags: Any, normalize: Any
) -> None:
    assert run("embed", photos, "--model", "m", *form, *flags).code == 0
    assert client.fake_model.options["normalize"] is normalize


def test_requests_go_to_the_version_that_the_file_names(embed: Any, client: FakeClient) -> None:
    embed()
    assert set(client.models_opened) == {("m", ""), ("m", "2")}
    assert client.fake_model.options["batch_size"] == 16
    assert client.fake_model.options["on_error"] == "return"


def test_images_that_fail_are_listed_and_the_others_written(embed: Any, client: FakeClient) -> None:
    del client.fake_model.answers["10.png"]
    client.fake_model.error = InvalidInput("damaged")
    finished = embed()
    assert finished.code == 1
    assert "photos/b/10.png: damaged" in finished.err
    assert pq.read_table(OUT).num_rows == 3


@pytest.mark.parametrize("errors", [["bad"] * 4, ["bad", "worse", "bad", "bad"]])
def test_where_all_fail_nothing_is_written(embed: Any, client: FakeClient, tmp_path: Path, errors: list[str]) -> None:
    names = sorted(client.fake_model.answers)
    client.fake_model.answers = {name: InvalidInput(error) for name, error in zip(names, errors, strict=True)}
    (tmp_path / OUT).write_bytes(b"PAR1 old")
    finished = embed()
    assert finished.code == (2 if len(set(errors)) == 1 else 1)
    assert finished.err.count("bad") == (1 if len(set(errors)) == 1 else 3)
    assert "vectors" not in finished.err
    assert (tmp_path / OUT).read_bytes() == b"PAR1 old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", OUT]


def stop_after_one(error: type[BaseException] | None, client: FakeClient) -> Any:
    def embed_many(images: list[Path], **options: Any) -> Iterator[Any]:
        assert options
        for place, image in enumerate(images):
            if place and error:
                raise error
            yield client.fake_model.answers[image.name]
        client.fake_model.config = published(8)

    return embed_many


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelNotFound("gone")])
def test_ctrl_c_or_an_error_leaves_no_file(
    embed: Any, client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    monkeypatch.setattr(client.fake_model, "embed_many", stop_after_one(error, client), raising=False)
    assert embed().code == (130 if error is KeyboardInterrupt else 2)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_version_that_is_replaced_meanwhile_leaves_no_file(
    embed: Any, client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.fake_model, "embed_many", stop_after_one(None, client), raising=False)
    finished = embed()
    assert finished.code == 1
    assert "was replaced while it embedded" in finished.err
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_mistakes(run: RunVerb, photos: Path, client: FakeClient, tmp_path: Path) -> None:
    for words, said in (
        (["--out", OUT, "--json"], "leave out --json"),
        (["--out", OUT, "--csv"], "leave out --json"),
        (["--out", "none/v.parquet"], "No such file"),
        (["--out", photos], "no file"),
        (["--out"], "requires an argument"),
    ):
        finished = run("embed", photos, "--model", "m", *words)
        assert (finished.code, said in " ".join(finished.err.split())) == (2, True), finished.err
    (tmp_path / "void").mkdir()
    assert "holds no image" in run("embed", tmp_path / "void", "--model", "m", "--out", OUT).err
    assert not client.connected


def test_without_what_writes_parquet(embed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda _: None)
    finished = embed()
    assert finished.code == 1
    assert "embed --out needs pyarrow (pip install 'graphkiln[score]')" in finished.err


@pytest.mark.parametrize(
    ("value", "said"), [(3**-0.5, "of length 1, by"), (float("nan"), "none of which is finite, by")]
)
def test_whether_vectors_are_normalized_is_told(embed: Any, client: FakeClient, value: float, said: str) -> None:
    for vector in client.fake_model.answers.values():
        vector[:] = value
    assert f"4 vectors of 3 features, {said} 'm'" in embed().err


def test_a_file_of_something_else_is_not_written_over(embed: Any, client: FakeClient, tmp_path: Path) -> None:
    """`embed --out *.jpg`, which the shell makes a list of: the first image became Parquet."""
    for content, code in ((b"\xff\xd8\xff an image", 2), (b"PAR1 of before", 0), (b"", 0)):
        (tmp_path / OUT).write_bytes(content)
        finished = embed()
        assert finished.code == code
        assert ("there is a file that is no Parquet" in finished.err) == (code == 2)
        assert ((tmp_path / OUT).read_bytes() == content) == (code == 2)
    assert len(client.connected) == 2


@pytest.mark.alone
@pytest.mark.usefixtures("hangup_ends")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_file(
    embed: Any, client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def embed_many(images: list[Path], **_: Any) -> Iterator[Any]:
        yield client.fake_model.answers[images[0].name]
        signal.raise_signal(number)

    monkeypatch.setattr(client.fake_model, "embed_many", embed_many, raising=False)
    assert embed().code == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
