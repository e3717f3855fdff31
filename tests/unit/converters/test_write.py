"""Writing versions: atomic, and without replacing existing files."""

from __future__ import annotations

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import draw, graph

from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.manifest import Conversion, Manifest, sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.version import read_version
from graphkiln_converters import write as writer
from graphkiln_converters.prove import ReferenceSamples, prove_graph
from graphkiln_converters.write import (
    NewVersion,
    SourceInfo,
    prove_and_write,
    write_version,
)

W = draw(4, 3)
RGB, BGR = Preprocess(resize=8), Preprocess(resize=8, color="BGR")
INFO = SourceInfo(
    description="a text", command="graphkiln convert text", libraries=("numpy", "onnx"), metrics={"accuracy": 0.5},
    preprocess=None, labels=("a", "b", "c"),
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "export").mkdir()
    text = "(float[batch,4] x) => (float[batch,3] y) { y = MatMul(x, w) }"
    onnx_ir.save(graph(text, w=W), tmp_path / "export" / "graph.onnx")
    return tmp_path / "export" / "graph.onnx"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store" / "m"


def samples() -> ReferenceSamples:
    x = draw(6, 4, seed=1)
    return ReferenceSamples(feeds={"x": x}, outputs={"y": x @ W})


@pytest.fixture
def version(path: Path) -> NewVersion:
    proof = prove_graph(path, [samples()], EXPORT)
    return NewVersion(
        graph=path, source=INFO, signature=proof.signature, verification=proof.verification, golden=proof.golden
    )


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class TestWriting:
    def test_a_version_has_all_files_for_serving(self, version: NewVersion, folder: Path) -> None:
        assert write_version(version, folder, 3) == folder / "3"
        assert listed(folder) == ["3/golden.npz", "3/labels.txt", "3/manifest.json", "3/model.onnx", "config.pbtxt"]
        assert (folder / "3" / "labels.txt").read_text() == "a\nb\nc\n"
        manifest = Manifest.read(folder / "3" / "manifest.json")
        assert manifest.sha256 == sha256_of(version.graph)
        assert manifest.provenance.metrics == {"accuracy": 0.5}
        assert set(manifest.provenance.versions) == {"numpy", "onnx", "python"}
        read = read_version(folder / "3")
        assert read.golden is not None
        np.testing.assert_array_equal(read.golden.inputs["x"], samples().feeds["x"][:4])

    def test_the_configuration_has_preprocess_and_ranking(self, version: NewVersion, folder: Path) -> None:
        info = replace(INFO, preprocess=Preprocess(resize=8), ranking=Ranking(scores="y", indices="i"))
        write_version(replace(version, source=info, max_batch_size=7), folder, 1)
        config = read_config(folder / "config.pbtxt")
        assert config.max_batch_size == 7
        assert config.output[0].label_filename == ""  # the labels are the version's own
        assert {"preprocess", "ranking"} <= set(config.parameters)

    def test_the_configuration_has_the_engine(self, version: NewVersion, folder: Path) -> None:
        write_version(replace(version, engine="auto"), folder, 1)
        assert read_config(folder / "config.pbtxt").parameters["engine"].string_value == "auto"

    def test_existing_files_are_not_replaced(self, version: NewVersion, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.pbtxt").write_text("# mine\n")
        (folder / "labels.txt").write_text("mine\n")
        write_version(version, folder, 1)
        assert (folder / "config.pbtxt").read_text() == "# mine\n"
        assert (folder / "labels.txt").read_text() == "mine\n"

    @pytest.mark.parametrize("mine", ["", "# mine\n"])
    def test_a_configuration_without_hard_links(
        self, version: NewVersion, folder: Path, monkeypatch: pytest.MonkeyPatch, mine: str
    ) -> None:
        def refuse(path: Path, _: Path) -> None:
            if mine:
                path.write_text(mine)
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
        write_version(version, folder, 1)
        assert (folder / "config.pbtxt").read_text().startswith(mine or 'name: "m"')
        assert sorted(path.name for path in folder.iterdir()) == ["1", "config.pbtxt"]


class TestWholeOrNotAtAll:
    @pytest.mark.parametrize("at", ["copyfile", "golden", "manifest", "config"])
    def test_a_full_disk_leaves_nothing(
        self, version: NewVersion, folder: Path, monkeypatch: pytest.MonkeyPatch, at: str
    ) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        target = {
            "copyfile": "shutil.copyfile",
            "golden": "graphkiln_backend.graph.golden.GoldenSamples.write",
            "manifest": "graphkiln_backend.graph.manifest.Manifest.write",
            "config": "graphkiln_converters.write._link_new",
        }[at]
        monkeypatch.setattr(target, full)
        with pytest.raises(ConversionError, match=r"cannot write .*: No space left on device") as caught:
            write_version(version, folder, 1)
        assert "nothing was left half written" in caught.value.hint
        assert not folder.parent.exists()

    def test_an_interruption_leaves_nothing(
        self, version: NewVersion, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(writer, "_provenance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_version(version, folder, 1)
        assert not folder.exists()

    def test_a_version_of_another_process_is_not_replaced(
        self, version: NewVersion, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill = writer._fill

        def slow(*arguments: Any) -> Manifest:
            manifest = fill(*arguments)
            (folder / "1").mkdir()
            (folder / "1" / "model.onnx").write_text("of another process")
            return manifest

        monkeypatch.setattr(writer, "_fill", slow)
        with pytest.raises(ConversionError, match="already exists"):
            write_version(version, folder, 1)
        assert listed(folder) == ["1/model.onnx"]
        assert (folder / "1" / "model.onnx").read_text() == "of another process"

    def test_a_new_configuration_stays_if_the_number_is_taken(
        self, version: NewVersion, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def come_first(*_: object, **__: object) -> None:
            (folder / "1").mkdir()
            (folder / "1" / "model.onnx").touch()

        monkeypatch.setattr(writer, "check_fits", come_first)
        with pytest.raises(ConversionError, match="already exists"):
            write_version(version, folder, 1)
        assert listed(folder) == ["1/model.onnx", "config.pbtxt"], "another conversion may rely on it by then"


class TestProvingAndWriting:
    def test_a_proven_graph_is_written(self, path: Path, folder: Path) -> None:
        manifest = prove_and_write(path, INFO, samples(), folder, 1)
        assert manifest.verification[0].step == "export"
        assert json.loads((folder / "1" / "manifest.json").read_text())["conversion"] is None

    def test_an_unproven_graph_is_not_written(self, path: Path, folder: Path) -> None:
        wrong = replace(samples(), outputs={"y": samples().outputs["y"] + 1})
        with pytest.raises(VerificationError):
            prove_and_write(path, INFO, wrong, folder, 1)
        assert not folder.exists()


class TestOneAfterAnother:
    def test_each_version_has_its_own_labels_and_preprocess(self, version: NewVersion, folder: Path) -> None:
        first = write_version(replace(version, source=replace(INFO, preprocess=RGB)), folder)
        other = replace(INFO, preprocess=BGR, labels=("x", "y", "z"))
        second = write_version(replace(version, source=other), folder)
        assert [first, second] == [folder / "1", folder / "2"]
        contracts = [read_version(path).contract for path in (first, second)]
        assert [contract.labels for contract in contracts] == [("a", "b", "c"), ("x", "y", "z")]
        assert [contract.preprocess for contract in contracts] == [RGB, BGR]

    def test_a_signature_that_contradicts_the_configuration_is_refused(self, version: NewVersion, folder: Path) -> None:
        write_version(version, folder, 1)
        (spec,) = version.signature.outputs
        wider = replace(version.signature, outputs=(replace(spec, shape=("batch", 5)),))
        source = replace(INFO, labels=())
        with pytest.raises(ConversionError, match=r"config\.pbtxt does not fit the new version") as caught:
            write_version(replace(version, signature=wider, source=source), folder, 2)
        assert "choose another --name" in caught.value.hint
        assert not (folder / "2").exists()

    def test_a_signature_that_contradicts_the_newest_version_is_refused(
        self, version: NewVersion, folder: Path
    ) -> None:
        write_version(version, folder, 1)
        (folder / "config.pbtxt").unlink()
        (spec,) = version.signature.outputs
        wider = replace(version.signature, outputs=(replace(spec, shape=("batch", 5)),))
        with pytest.raises(ConversionError, match=r"version 1 of '.*' has another signature") as caught:
            write_version(replace(version, signature=wider, source=replace(INFO, labels=())), folder, 2)
        assert "choose another --name" in caught.value.hint
        assert not (folder / "config.pbtxt").exists()

    def test_the_recipe_has_the_claimed_number(self, version: NewVersion, folder: Path) -> None:
        conversion = Conversion(
            recipe={"source": "x", "version": None},
            precision=Precision.FP32,
            passes=(),
            output_errors={},
            graph_bytes=1,
            seconds=1.0,
        )
        for number in (1, 2):
            path = write_version(replace(version, conversion=conversion), folder)
            made = Manifest.read(path / "manifest.json").conversion
            assert made is not None
            assert made.recipe == {"source": "x", "version": number}


class TestAtOnce:
    @pytest.mark.parametrize("labels", ["same", "own"])
    def test_concurrent_conversions_get_different_versions(
        self, version: NewVersion, folder: Path, labels: str
    ) -> None:
        def write(index: int) -> Path:
            own = tuple(f"{name}{index}" for name in "abc") if labels == "own" else ("a", "b", "c")
            source = replace(INFO, labels=own, description=f"source {index}")
            return write_version(replace(version, source=source), folder)

        with ThreadPoolExecutor(8) as pool:
            written = list(pool.map(write, range(8)))
        assert sorted(int(path.name) for path in written) == list(range(1, 9))
        for index, path in enumerate(written):
            read = read_version(path)
            assert read.manifest is not None
            assert read.manifest.provenance.source == f"source {index}"
            assert read.contract.labels[0] == ("a" if labels == "same" else f"a{index}")
        assert sorted(path.name for path in folder.iterdir()) == [*"12345678", "config.pbtxt"]
        read_config(folder / "config.pbtxt")


class TestRefused:
    @pytest.mark.parametrize("name", ["..", "a b", "a\n"])
    def test_invalid_names_are_refused(self, version: NewVersion, tmp_path: Path, name: str) -> None:
        store = tmp_path / "store"
        with pytest.raises(ConversionError) as caught:
            write_version(version, store / name, 1)
        assert caught.value.hint == "choose another --name"
        assert not store.exists()

    @pytest.mark.parametrize(
        ("labels", "words"),
        [(("a", "b"), "2 labels"), (("a", "b\nc", "d"), "control character")],
    )
    def test_labels_that_do_not_match_are_refused(
        self, version: NewVersion, folder: Path, labels: tuple[str, ...], words: str
    ) -> None:
        with pytest.raises(ConversionError, match=words):
            write_version(replace(version, source=replace(INFO, labels=labels)), folder, 1)
        assert listed(folder) == []
