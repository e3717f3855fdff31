"""Options as people give them, and the request that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphkiln.scoring.options import ScoreOptions, absolute, build_request, parse_model
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError


def test_paths_mean_the_same_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_model_and_its_version(text: str, model: str, version: int | None) -> None:
    assert parse_model(text) == (model, version)


@pytest.mark.parametrize("text", ["/store/m:newest", "/store/m:", "/store/m:01"])
def test_what_follows_the_colon_must_be_a_version(text: str) -> None:
    with pytest.raises(RepositoryError, match="no version"):
        parse_model(text)


def test_settings_are_taken_as_the_command_takes_them_and_as_a_mapping() -> None:
    by_command = build_request("a", "/s/m", "b", {"settings": ["precision=bf16", "threads=2"]})
    by_python = build_request("a", "/s/m", "b", {"settings": {"precision": "bf16", "threads": "2"}})
    assert by_command == by_python
    assert [(each.key, each.value) for each in by_python.overrides] == [("precision", "bf16"), ("threads", "2")]


def test_every_option_of_the_request_is_one_that_people_can_give() -> None:
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
        ({"scores": True, "top_k": 3}, "--top-k and --scores both say"),
        ({"scores": True, "outputs": ["Y"]}, "--scores and --output both say"),
        ({"rows_per_unit": 0}, "--rows-per-unit 0: expected at least 1"),
        ({"top_k": 0}, "--top-k 0"),
        ({"workers": -1}, "--workers -1"),
        ({"cores_per_worker": -1}, "--cores-per-worker -1"),
        ({"settings": ["precison=bf16"]}, "did you mean 'precision'"),
        ({"settings": ["precision"]}, "a value is missing"),
    ],
)
def test_mistakes(options: Any, words: str) -> None:
    with pytest.raises(GraphkilnError) as caught:
        build_request("a", "/s/m", "b", options)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_one_text_is_no_list_of_its_letters() -> None:
    """Python takes a text for a sequence of texts; the command has no lists."""
    options: ScoreOptions = {"keep_columns": "price, shop,price", "outputs": "logits", "settings": "precision=bf16"}
    request = build_request("a", "/s/m", "b", options)
    assert (request.keep_columns, request.outputs) == (("price", "shop"), ("logits",))
    assert [(each.key, each.value) for each in request.overrides] == [("precision", "bf16")]


def test_a_cache_is_a_folder_that_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, expected in (("c", tmp_path / "c"), ("~/c", Path("/home/somebody/c")), (Path("/c"), Path("/c"))):
        assert build_request("a", "/s/m", "b", {"cache": given}).cache == expected
    assert build_request("a", "/s/m", "b", {}).cache is None


def test_an_address_of_this_machine_is_a_path() -> None:
    request = build_request("file:///data/photos/", "file:///store/m:3", "file:///data/out", {})
    assert (request.source, request.destination) == ("/data/photos", "/data/out")
    assert (request.model, request.version) == ("/store/m", 3)
