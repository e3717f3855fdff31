"""`graphkiln classify`: table, JSON, CSV and failed images."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from commands import FakeClient, RunVerb

from graphkiln_backend.graph.errors import InvalidInput, ServerError
from graphkiln_client import Classification


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of three image files and a text file."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("b.png", "a.jpg", "c.JPEG", "notes.txt"):
        (folder / name).write_bytes(b"")
    return folder


def sources(out: str) -> list[str]:
    return [Path(row["source"]).name for row in json.loads(out)]


class TestImages:
    def test_files_and_folders_in_order(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        finished = run("classify", images / "c.JPEG", images, "--model", "digits", "--json")
        assert finished.code == 0
        assert sources(finished.out) == ["c.JPEG", "a.jpg", "b.png", "c.JPEG"]
        assert client.open == 0

    def test_options(self, run: RunVerb, client: FakeClient, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = {}
        classify_many = client.fake_model.classify_many

        def spy(paths: list[Path], **options: object) -> object:
            seen.update(options)
            return classify_many(paths, **options)

        monkeypatch.setattr(client.fake_model, "classify_many", spy)
        words = ("--top-k", "2", "--softmax", "--batch-size", "4", "--concurrency", "3", "--version", "9")
        run("classify", images, "--model", "digits", *words)
        assert client.models_opened == [("digits", "9")]
        assert {key: seen[key] for key in ("top_k", "softmax", "batch_size", "concurrency", "on_error")} == {
            "top_k": 2, "softmax": True, "batch_size": 4, "concurrency": 3, "on_error": "return",
        }  # fmt: skip
        assert seen["progress"] is None  # stderr is not a terminal


@pytest.mark.parametrize("verb", ["classify", "detect", "segment", "embed"])
@pytest.mark.parametrize(("flags", "form"), [((), "auto"), (("--encoded",), "encoded"), (("--tensor",), "tensor")])
def test_form_of_images(
    run: RunVerb, client: FakeClient, images: Path, *, verb: str, flags: tuple[str, ...], form: str
) -> None:
    client.fake_model.error = InvalidInput("not answered here")
    run(verb, images / "a.jpg", "--model", "digits", *flags)
    assert client.image_form == form


class TestTable:
    @pytest.mark.usefixtures("client")
    def test_labels_best_first(self, run: RunVerb, images: Path) -> None:
        out = run("classify", images / "a.jpg", "--model", "digits", "--top-k", "2").out
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
        assert rows == [["a.jpg", "class 0", "0", "0.9000", "1.2 ms"], ["", "class 1", "1", "0.4500", ""]]

    def test_several_outputs_and_positions(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        client.fake_model.result_outputs = {
            "kind": (Classification(index=0, label="", score=1.0),),
            "map": (Classification(index=7, label="road", score=0.5, position=(2, 3)),),
        }
        out = run("classify", images / "a.jpg", "--model", "digits").out
        assert "output" in out
        assert "position" in out
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
        assert rows[0][1:5] == ["kind", "()", "-", "0"]
        assert rows[1][1:5] == ["map", "(2, 3)", "road", "7"]

    def test_names_are_not_markup(self, run: RunVerb, client: FakeClient, tmp_path: Path) -> None:
        client.fake_model.result_outputs = {"Y": (Classification(index=0, label="[red]cat[/]", score=1.0),)}
        (tmp_path / "[bold].png").write_bytes(b"")
        out = run("classify", tmp_path / "[bold].png", "--model", "digits").out
        assert "[red]cat[/]" in out
        assert "[bold].png" in out

    @pytest.mark.usefixtures("client")
    def test_fits_80_columns(self, run: RunVerb, tmp_path: Path) -> None:
        path = tmp_path / f"{'long' * 30}.png"
        path.write_bytes(b"")
        assert max(map(len, run("classify", path, "--model", "digits").out.splitlines())) <= 80


class TestJson:
    @pytest.mark.usefixtures("client")
    def test_json_has_one_object_per_image(self, run: RunVerb, images: Path) -> None:
        (row, *_) = json.loads(run("classify", images, "--model", "digits", "--top-k", "1", "--json").out)
        assert row["model"] == "digits"
        assert row["classifications"] == [{"index": 0, "label": "class 0", "score": 0.9}]


class TestCsv:
    def rows(self, out: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(out)))

    @pytest.mark.usefixtures("client")
    def test_csv_has_one_row_per_label(self, run: RunVerb, images: Path) -> None:
        rows = self.rows(run("classify", images, "--model", "digits", "--top-k", "2", "--csv").out)
        assert len(rows) == 6
        assert [row["rank"] for row in rows] == ["1", "2"] * 3
        assert rows[1] == {
            "source": str(images / "a.jpg"), "model": "digits", "version": "1", "output": "OUTPUT_0", "position": "",
            "rank": "2", "index": "1", "label": "class 1", "score": "0.45",
        }  # fmt: skip

    def test_ranks_per_position(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        client.fake_model.result_outputs = {
            "map": tuple(
                Classification(index=index, label="a,b", score=1.0, position=position)
                for position in ((0, 0), (0, 1))
                for index in range(2)
            )
        }
        rows = self.rows(run("classify", images / "a.jpg", "--model", "digits", "--csv").out)
        assert [(row["position"], row["rank"]) for row in rows] == [
            ("0/0", "1"),
            ("0/0", "2"),
            ("0/1", "1"),
            ("0/1", "2"),
        ]
        assert rows[0]["label"] == "a,b"


class TestFailures:
    def test_one_failed_image(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        client.fake_model.error, client.fake_model.failing = InvalidInput("cannot be decoded"), ("b.png",)
        finished = run("classify", images, "--model", "digits", "--json")
        assert finished.code == 1
        assert sources(finished.out) == ["a.jpg", "c.JPEG"]
        assert finished.err == f"graphkiln: {images / 'b.png'}: cannot be decoded\n"

    def test_same_error_for_all_images(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        client.fake_model.error = ServerError("out of memory")
        finished = run("classify", images, "--model", "digits")
        assert (finished.code, finished.out, finished.err) == (1, "", "graphkiln: out of memory\n")
