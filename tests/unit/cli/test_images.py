"""`graphkiln classify`, `detect` and `segment`: images, tables, JSON, CSV, drawings and failed images."""

from __future__ import annotations

import csv
import io
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import FakeClient, RunVerb, table_rows
from PIL import Image

from graphkiln.cli.images import save_drawing
from graphkiln_backend.graph.errors import InvalidInput, ServerError
from graphkiln_client import Box, Classification, Detection, SegmentedImage

FOUND = (
    Detection(box=Box(8, 4, 24, 16), label="[red]cat[/]", index=3, score=0.75),
    Detection(box=Box(0, 0, 32, 20), label="", index=5, score=0.5),
)


@pytest.fixture
def images(tmp_path: Path, client: FakeClient) -> Path:
    """A folder of two images; the model finds two things in one of them."""
    for name in ("a.png", "b.png"):
        Image.new("RGB", (32, 20)).save(tmp_path / name)
    client.fake_model.answers = {"a.png": FOUND, "b.png": ()}
    return tmp_path


def csv_rows(out: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(out)))


def sources(out: str) -> list[str]:
    return [Path(row["source"]).name for row in json.loads(out)]


class TestArguments:
    @pytest.mark.usefixtures("client")
    def test_folders_are_expanded_in_order(self, run: RunVerb, tmp_path: Path) -> None:
        for name in ("b.png", "a.jpg", "c.JPEG", "-", "notes.txt", "._e.heic", "d.HEIC"):
            (tmp_path / name).touch()
        finished = run("classify", tmp_path / "c.JPEG", tmp_path, "--model", "digits", "--json")
        assert finished.code == 0
        assert sources(finished.out) == ["c.JPEG", "a.jpg", "b.png", "c.JPEG"]
        assert f"{tmp_path}: left out 1 file, such as {tmp_path / 'd.HEIC'}, of other formats" in finished.err
        assert run("classify", tmp_path / "a.jpg", "--model", "digits").err == ""

    def test_folder_of_other_formats_is_refused(self, run: RunVerb, client: FakeClient, tmp_path: Path) -> None:
        (tmp_path / "d.avif").touch()
        finished = run("classify", tmp_path, "--model", "m")
        assert finished.code == 2
        assert "holds 1 file, such as" in finished.err
        assert not client.connected

    @pytest.mark.parametrize("name", ["-", "https.png"])
    @pytest.mark.usefixtures("client")
    def test_existing_file_with_an_unusual_name(
        self, run: RunVerb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path(name).touch()
        assert run("classify", name, "--model", "m").code == 0

    def test_options_of_classify(
        self, run: RunVerb, client: FakeClient, images: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = {}
        classify_many = client.fake_model.classify_many

        def spy(paths: list[Path], **options: object) -> object:
            seen.update(options)
            return classify_many(paths, **options)

        monkeypatch.setattr(client.fake_model, "classify_many", spy)
        options = ("--top-k", "2", "--softmax", "--batch-size", "4", "--concurrency", "3", "--version", "9")
        run("classify", images, "--model", "digits", *options)
        assert client.models_opened == [("digits", "9")]
        assert seen == {
            "top_k": 2, "softmax": True, "batch_size": 4, "concurrency": 3, "on_error": "return", "progress": None,
        }  # fmt: skip

    def test_options_of_detect(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        run("detect", images, "--model", "m", "--version", "9", "--threshold", "0.25", "--batch-size", "3")
        assert client.models_opened == [("m", "9")]
        assert (client.fake_model.options["score_threshold"], client.fake_model.options["batch_size"]) == (0.25, 3)

    @pytest.mark.parametrize("verb", ["classify", "detect", "segment", "embed"])
    @pytest.mark.parametrize(("flags", "form"), [((), "auto"), (("--encoded",), "encoded"), (("--tensor",), "tensor")])
    def test_form_of_images(
        self, run: RunVerb, client: FakeClient, images: Path, *, verb: str, flags: tuple[str, ...], form: str
    ) -> None:
        client.fake_model.answers, client.fake_model.error = {}, InvalidInput("not answered here")
        run(verb, images / "a.png", "--model", "digits", *flags)
        assert client.image_form == form


class TestClassify:
    def test_table_has_labels_best_first(self, run: RunVerb, images: Path) -> None:
        out = run("classify", images / "a.png", "--model", "digits", "--top-k", "2").out
        assert table_rows(out) == [["a.png", "class 0", "0", "0.9000", "1.2 ms"], ["", "class 1", "1", "0.4500", ""]]

    def test_latency_of_a_request_is_shown_once(self, run: RunVerb, images: Path) -> None:
        """It is that of all its images, which the fake client has in one request."""
        rows = table_rows(run("classify", images, "--model", "digits", "--top-k", "1").out)
        assert [(row[0], row[-1]) for row in rows] == [("a.png", "1.2 ms for 2 images"), ("b.png", "")]

    def test_outputs_and_positions(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        client.fake_model.result_outputs = {
            "kind": (Classification(index=0, label="", score=1.0),),
            "map": tuple(
                Classification(index=index, label="road, wet", score=0.5, position=position)
                for position in ((2, 3), (2, 4))
                for index in (7, 8)
            ),
        }
        table = run("classify", images / "a.png", "--model", "digits").out
        assert [row[1:5] for row in table_rows(table)][:2] == [
            ["kind", "()", "-", "0"],
            ["map", "(2, 3)", "road, wet", "7"],
        ]
        rows = csv_rows(run("classify", images / "a.png", "--model", "digits", "--csv").out)
        ranks = [("", "1"), ("2/3", "1"), ("2/3", "2"), ("2/4", "1"), ("2/4", "2")]
        assert [(row["position"], row["rank"]) for row in rows] == ranks
        assert rows[1]["label"] == "road, wet"

    def test_names_are_not_markup(self, run: RunVerb, client: FakeClient, tmp_path: Path) -> None:
        client.fake_model.result_outputs = {"Y": (Classification(index=0, label="[red]cat[/]", score=1.0),)}
        (tmp_path / "[bold].png").touch()
        out = run("classify", tmp_path / "[bold].png", "--model", "digits").out
        assert "[red]cat[/]" in out
        assert "[bold].png" in out

    @pytest.mark.usefixtures("client")
    def test_table_fits_80_columns(self, run: RunVerb, tmp_path: Path) -> None:
        path = tmp_path / f"{'long' * 30}.png"
        path.touch()
        assert max(map(len, run("classify", path, "--model", "digits").out.splitlines())) <= 80

    def test_json_and_csv(self, run: RunVerb, images: Path) -> None:
        (row, *_) = json.loads(run("classify", images, "--model", "digits", "--top-k", "1", "--json").out)
        assert row["model"] == "digits"
        assert row["classifications"] == [{"index": 0, "label": "class 0", "score": 0.9}]
        rows = csv_rows(run("classify", images, "--model", "digits", "--top-k", "2", "--csv").out)
        assert [row["rank"] for row in rows] == ["1", "2"] * 2
        assert rows[1] == {
            "source": str(images / "a.png"), "model": "digits", "version": "1", "output": "OUTPUT_0", "position": "",
            "rank": "2", "index": "1", "label": "class 1", "score": "0.45",
        }  # fmt: skip


class TestFailures:
    def test_one_failed_image_is_named_once(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        client.fake_model.failing = ("b.png",)
        path = images / "b.png"
        for message, line in (
            ("cannot be \x1b[2J", f"{path}: cannot be \\x1b[2J"),
            (f"{path} cannot be", f"{path} cannot be"),
        ):
            client.fake_model.error = InvalidInput(message)
            finished = run("classify", images, "--model", "digits", "--json")
            assert (finished.code, sources(finished.out)) == (1, ["a.png"])
            assert finished.err == f"graphkiln: {line}\n"

    def test_same_error_for_all_images_is_printed_once(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        client.fake_model.error = ServerError("out of memory")
        finished = run("classify", images, "--model", "digits")
        assert (finished.code, finished.out, finished.err) == (1, "", "graphkiln: out of memory\n")

    def test_one_failed_detection(self, run: RunVerb, client: FakeClient, images: Path) -> None:
        del client.fake_model.answers["b.png"]
        client.fake_model.error = InvalidInput("damaged")
        finished = run("detect", images, "--model", "m", "--json")
        assert (finished.code, len(json.loads(finished.out))) == (1, 1)
        assert "b.png: damaged" in finished.err


class TestDetect:
    def test_table_json_and_csv(self, run: RunVerb, images: Path) -> None:
        rows = table_rows(run("detect", images, "--model", "m").out)
        assert rows[0] == ["a.png", "[red]cat[/]", "0.7500", "8.0", "4.0", "24.0", "16.0"]
        assert (rows[1][:2], rows[2][:2]) == (["", "5"], ["b.png", "nothing found"])
        first, second = json.loads(run("detect", images, "--model", "m", "--json").out)
        assert first["detections"][0] == {"label": "[red]cat[/]", "index": 3, "score": 0.75, "box": [8, 4, 24, 16]}
        assert (Path(second["source"]).name, second["detections"]) == ("b.png", [])
        lines = csv_rows(run("detect", images, "--model", "m", "--csv").out)
        assert [(row["rank"], row["index"], row["x2"]) for row in lines] == [("1", "3", "24"), ("2", "5", "32")]

    def test_undecodable_file_name_in_csv(self, run: RunVerb, images: Path, client: FakeClient) -> None:
        odd = images / os.fsdecode(b"odd-\xff,\n.png")
        (images / "a.png").rename(odd)
        client.fake_model.answers[odd.name] = FOUND
        rows = csv_rows(run("detect", odd, "--model", "m", "--csv").out)
        assert [row["label"] for row in rows] == ["[red]cat[/]", ""]
        assert rows[0]["source"].endswith("odd-\\udcff,\n.png")


class TestSegment:
    @pytest.fixture
    def image(self, images: Path, client: FakeClient) -> Path:
        classes = np.zeros((20, 32), np.uint8)
        classes[:, 24:] = 1
        client.fake_model.answers = {"a.png": SegmentedImage(classes=classes, labels=("background", "sky"), unseen=255)}
        return images / "a.png"

    def test_table_json_and_csv(self, run: RunVerb, image: Path) -> None:
        rows = [["a.png", "background", "0", "75.0 %"], ["", "sky", "1", "25.0 %"]]
        assert table_rows(run("segment", image, "--model", "m").out) == rows
        (document,) = json.loads(run("segment", image, "--model", "m", "--json").out)
        assert (document["height"], document["width"]) == (20, 32)
        mask = {"size": [20, 32], "counts": [480, 160]}
        assert document["segments"][1] == {"label": "sky", "index": 1, "share": 0.25, "mask": mask}
        lines = csv_rows(run("segment", image, "--model", "m", "--csv").out)
        assert [(row["label"], row["share"]) for row in lines] == [("background", "0.75"), ("sky", "0.25")]

    def test_drawing(self, run: RunVerb, image: Path) -> None:
        assert run("segment", image, "--model", "m", "--draw", image.parent / "x.png").code == 0
        drawn = np.asarray(Image.open(image.parent / "x.png"))
        assert drawn[18, 30].any()
        assert not drawn[18, 5].any()  # the background is not tinted

    def test_class_maps_are_not_accumulated(
        self, run: RunVerb, image: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[weakref.ref[Any]] = []

        def segment_many(images: list[Path], **_: Any) -> Iterator[SegmentedImage]:
            for _image in images:
                classes = np.zeros((20, 32), np.uint8)
                assert sum(each() is not None for each in made) < 2
                made.append(weakref.ref(classes))
                yield SegmentedImage(classes=classes, labels=("background",), unseen=255)

        monkeypatch.setattr(client.fake_model, "segment_many", segment_many)
        for name in ("c.png", "d.png"):
            Image.new("RGB", (32, 20)).save(image.parent / name)
        assert len(json.loads(run("segment", image.parent, "--model", "m", "--json").out)) == len(made) == 4


class TestDrawings:
    def test_several_images_are_drawn_into_a_folder(self, run: RunVerb, images: Path) -> None:
        (images / "out.d").mkdir()  # a folder, although its name has a suffix
        assert run("detect", images, "--model", "m", "--draw", images / "out.d").code == 0
        drawn = np.asarray(Image.open(images / "out.d" / "a.png"))
        assert drawn.shape == (20, 32, 3)
        assert drawn[15, 23].any()  # the corner of the box
        assert not np.asarray(Image.open(images / "out.d" / "b.png")).any()

    def test_one_image_is_drawn_into_a_file(self, run: RunVerb, images: Path) -> None:
        assert run("detect", images / "a.png", "--model", "m", "--draw", images / "x.jpg").code == 0
        assert (images / "x.jpg").read_bytes().startswith(b"\xff\xd8")

    def test_images_with_the_same_name_keep_their_folders(self, run: RunVerb, images: Path) -> None:
        (images / "more").mkdir()
        Image.new("RGB", (32, 20)).save(images / "more" / "a.png")
        parent = images / "more" / ".." / "b.png"
        assert (
            run("detect", images / "a.png", images / "more", parent, "--model", "m", "--draw", images / "o").code == 0
        )
        drawn = sorted(str(path.relative_to(images / "o")) for path in (images / "o").rglob("*.png"))
        assert drawn == ["a.png.png", "b.png.png", "more/a.png.png"]

    def test_images_are_not_overwritten(self, run: RunVerb, images: Path) -> None:
        before = (images / "a.png").read_bytes()
        finished = run("detect", images, "--model", "m", "--draw", images)
        assert (finished.code, "would overwrite" in finished.err) == (2, True)
        assert (images / "a.png").read_bytes() == before

    @pytest.mark.parametrize(("name", "size"), [("x.webp", (16384, 1)), ("x.jpg", (1, 65501)), ("x.gif", (65536, 1))])
    def test_drawing_too_large_for_its_format(self, tmp_path: Path, name: str, size: tuple[int, int]) -> None:
        with pytest.raises(InvalidInput, match=rf"{name}: {size[0]}x{size[1]} pixels"):
            save_drawing(Image.new("RGB", size), tmp_path / name)

    def test_error_of_the_file_system(self, run: RunVerb, images: Path) -> None:
        (images / "o" / "a.png").mkdir(parents=True)
        finished = run("detect", images / "a.png", "--model", "m", "--draw", images / "o")
        assert (finished.code, "Is a directory" in finished.err) == (1, True)
