"""Options as users give them, and the request made from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphkiln.scoring.options import ScoreOptions, absolute, build_request, check_places, check_source, parse_model
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import InputRange, ScoreRequest


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    request = build_request("photos/*.jpg", "store/m:3", "out", {})
    assert request.source == f"{tmp_path}/photos/*.jpg"
    assert (request.model, request.version) == (f"{tmp_path}/store/m", 3)
    assert request.destination == f"{tmp_path}/out"
    assert absolute("~/photos") == "/home/somebody/photos"
    assert absolute("s3://bucket/a") == "s3://bucket/a"


@pytest.mark.parametrize(
    ("text", "model", "version"),
    [
        ("/store/m", "/store/m", None),
        ("/store/m/", "/store/m", None),
        ("/store/m:12", "/store/m", 12),
        ("/store/m/12", "/store/m", 12),
        ("s3://bucket/store/m", "s3://bucket/store/m", None),
        ("s3://bucket/store/m:2", "s3://bucket/store/m", 2),
        ("s3://bucket/store/m/2", "s3://bucket/store/m", 2),
        ("s3://host:9000/bucket/store/m", "s3://host:9000/bucket/store/m", None),
        ("s3://https://host:9000/bucket/m:7", "s3://https://host:9000/bucket/m", 7),
    ],
)
def test_model_and_version(text: str, model: str, version: int | None) -> None:
    assert parse_model(text) == (model, version)


@pytest.mark.parametrize("text", ["/store/m:newest", "/store/m:", "/store/m:01"])
def test_invalid_version_is_refused(text: str) -> None:
    with pytest.raises(RepositoryError, match="version"):
        parse_model(text)


def test_settings_may_be_a_list_or_a_mapping() -> None:
    by_command = build_request("a", "/s/m", "b", {"settings": ["precision=bf16", "threads=2"]})
    by_python = build_request("a", "/s/m", "b", {"settings": {"precision": "bf16", "threads": "2"}})
    assert by_command == by_python
    assert [(each.key, each.value) for each in by_python.overrides] == [("precision", "bf16"), ("threads", "2")]


def test_every_option_reaches_the_request() -> None:
    given: ScoreOptions = {
        "address": "auto", "workers": 3, "cores_per_worker": 2, "top_k": 2, "softmax": True, "keep_columns": ["a"],
        "image_column": "i", "id_column": "n", "query": "t", "rows_per_unit": 7, "cache": Path("/c"), "format": "delta",
        "ledger": "postgresql://x", "replace": True,
    }  # fmt: skip
    request = build_request("a", "/s/m", "b", given)
    for name, value in given.items():
        assert getattr(request, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scores": True, "top_k": 3}, "--top-k and --scores contradict"),
        ({"scores": True, "outputs": ["Y"]}, "--scores and --output contradict"),
        ({"rows_per_unit": 0}, "--rows-per-unit 0: expected at least 1"),
        ({"top_k": 0}, "--top-k 0"),
        ({"workers": -1}, "--workers -1"),
        ({"cores_per_worker": -1}, "--cores-per-worker -1"),
        ({"settings": ["precison=bf16"]}, "did you mean 'precision'"),
        ({"settings": ["precision"]}, "a value is missing"),
    ],
)
def test_invalid_options_are_refused(options: Any, words: str) -> None:
    with pytest.raises(GraphkilnError) as caught:
        build_request("a", "/s/m", "b", options)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_single_string_is_one_value() -> None:
    options: ScoreOptions = {"keep_columns": "price, shop,price", "outputs": "logits", "settings": "precision=bf16"}
    request = build_request("a", "/s/m", "b", options)
    assert (request.keep_columns, request.outputs) == (("price", "shop"), ("logits",))
    assert [(each.key, each.value) for each in request.overrides] == [("precision", "bf16")]


def test_cache_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, expected in (("c", tmp_path / "c"), ("~/c", Path("/home/somebody/c")), (Path("/c"), Path("/c"))):
        assert build_request("a", "/s/m", "b", {"cache": given}).cache == expected
    assert build_request("a", "/s/m", "b", {}).cache is None


def test_file_address_becomes_a_path() -> None:
    request = build_request("file:///data/photos/", "file:///store/m:3", "file:///data/out", {})
    assert (request.source, request.destination) == ("/data/photos", "/data/out")
    assert (request.model, request.version) == ("/store/m", 3)


# Mistakes that are refused before anything is started or written.

UNIT = InputRange(path="a", part="b", identity="c", rows=1).unit("d").id


def request(source: Path | str, destination: Path | str) -> ScoreRequest:
    return ScoreRequest(source=str(source), model="/store/m", destination=str(destination))


def test_separate_places_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    check_places(request(tmp_path / "photos", tmp_path / "photos-scored"))
    check_places(request("s3://bucket/photos", "s3://bucket/photos-scored"))
    check_places(request("postgresql://host/shop", "postgresql://host/shop"))


@pytest.mark.parametrize(
    ("source", "destination", "words"),
    [
        ("photos", "photos", "both source and destination"),
        ("photos", "link", "both source and destination"),
        ("photos", "photos/answers", "is inside the source"),
        ("out/photos", "out", "is inside the destination"),
    ],
)
def test_overlapping_folders_are_refused(tmp_path: Path, source: str, destination: str, words: str) -> None:
    (tmp_path / source).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    with pytest.raises(ScoringError, match=words):
        check_places(request(tmp_path / source, tmp_path / destination))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("s3://bucket/a", "s3://bucket/a/"),
        ("s3://bucket/a", "s3://bucket/a/b"),
        ("s3://HOST:9000/bucket/a", "s3://http://host:9000/bucket/a/b"),
    ],
)
def test_overlapping_objects_are_refused(source: str, destination: str) -> None:
    with pytest.raises(ScoringError):
        check_places(request(source, destination))


def test_inaccessible_places_are_reported(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ScoringError, match="cannot access"):
        check_source(request(loop, tmp_path / "out"))
    check_places(request(loop, tmp_path / "out"))
    with pytest.raises(ScoringError, match="File name too long"):
        check_places(request(tmp_path / "in", tmp_path / ("a" * 300)))


def test_files_of_an_earlier_run_are_accepted(tmp_path: Path) -> None:
    for name in (f"{UNIT}.parquet", "_plan.parquet", "_run.json", ".unfinished-abc"):
        (tmp_path / name).write_bytes(b"")
    check_places(request("/photos", tmp_path))


def test_destination_with_foreign_files_is_refused(tmp_path: Path) -> None:
    for name in ("thesis.docx", "a.parquet", "b", "c"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ScoringError, match=r"a\.parquet, b, c, \.\.\."):
        check_places(request("/photos", tmp_path))


def test_files_of_a_delta_table_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "part-00000.parquet").write_bytes(b"")
    check_places(request("/photos", tmp_path))


def test_file_as_destination_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.parquet").write_bytes(b"")
    with pytest.raises(ScoringError, match="is a file"):
        check_places(request("/photos", tmp_path / "out.parquet"))


def test_source_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt.bak").write_text("no image")
    with pytest.raises(ScoringError, match="can be scored"):
        check_source(request(tmp_path, "/out"))
    (tmp_path / "a.png").write_bytes(b"is not looked into")
    check_source(request(tmp_path, "/out"))


def test_source_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("\n\n")
    with pytest.raises(ScoringError, match=r"list\.txt has no rows"):
        check_source(request(tmp_path / "list.txt", "/out"))


def test_missing_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,price\na.png,3\n")
    with pytest.raises(ScoringError, match="no column 'prise'"):
        check_source(replace(request(tmp_path / "list.csv", "/out"), image_column="path", keep_columns=("prise",)))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("data/**/*.parquet", "data/answers"),
        ("data/*/*", "data/answers"),
        ("s3://bucket/data/**", "s3://bucket/data/answers/"),
        ("s3://[::1]:9000/bucket/*/*.parquet", "s3://[::1]:9000/bucket/answers"),
    ],
)
def test_pattern_that_matches_results_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, destination: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScoringError, match="the next run"):
        check_places(request(source, destination))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("data/**/*.jpg", "data/answers"),
        ("data/*", "data/answers"),
        ("data/[ab]/*.parquet", "data/answers"),
        ("s3://[::1]:9000/bucket/photos", "s3://[::1]:9000/bucket/answers"),
        ("s3://bucket/**", "s3://other/answers"),
    ],
)
def test_pattern_that_matches_no_results_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, destination: str
) -> None:
    monkeypatch.chdir(tmp_path)
    check_places(request(source, destination))
