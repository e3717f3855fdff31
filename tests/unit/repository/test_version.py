"""Version folders: graph, manifest, golden samples and labels belong together."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import zoo

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.manifest import Labels, Manifest, sha256_of
from graphkiln_backend.repository.version import (
    contract_of,
    find_graph,
    find_served_graph,
    newest_version,
    read_manifest,
    read_version,
)


@pytest.fixture
def folder(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits, tmp_path / "digits") / "1"


class TestReading:
    def test_example_is_complete(self, digits: Path) -> None:
        version = read_version(digits / "1")
        assert version.manifest
        assert version.golden
        assert version.manifest.provenance.metrics["test_accuracy"] >= 0.98
        assert version.graph_path.stat().st_size < 300_000

    def test_bare_graph(self, folder: Path) -> None:
        (folder / "manifest.json").unlink()
        (folder / "golden.npz").unlink()
        version = read_version(folder)
        assert (version.manifest, version.golden) == (None, None)
        assert version.ranking is None

    @pytest.mark.parametrize("name", ["model.onnx", "golden.npz", "labels.txt"])
    def test_changed_file_is_refused(self, folder: Path, name: str) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
        with pytest.raises(RepositoryError, match=rf"{name} does not match .* expected SHA-256"):
            read_version(folder)

    @pytest.mark.parametrize("name", ["manifest.json", "model.onnx", "golden.npz", "labels.txt"])
    def test_missing_file(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        with pytest.raises(RepositoryError, match=rf"\bno {name}"):
            read_version(folder)

    def test_manifest_overrides_the_default_filename(self, folder: Path) -> None:
        (folder / "other.onnx").write_bytes(b"")
        assert read_version(folder, "other.onnx").graph_path == folder / "model.onnx"

    def test_invalid_manifest(self, folder: Path) -> None:
        (folder / "manifest.json").write_text('{"format_version": 99}')
        with pytest.raises(ManifestError):
            read_version(folder)
        with pytest.raises(ManifestError):
            read_manifest(folder)

    @pytest.mark.parametrize("name", ["manifest.json", "golden.npz", "model.onnx"])
    def test_pipe_does_not_block(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises((RepositoryError, ManifestError), match=rf"{name}.*regular file"):
            read_version(folder)


class TestContract:
    def test_contract_from_the_manifest(self, folder: Path) -> None:
        contract = read_version(folder).contract
        assert contract == contract_of(folder, Manifest.read(folder / "manifest.json"))
        assert (contract.labels[3], contract.output, contract.ranking) == ("three", "OUTPUT_0", None)
        assert contract.preprocess is not None

    def test_wrong_number_of_labels(self, folder: Path) -> None:
        """Also where manifest and file agree."""
        (folder / "labels.txt").write_text("a\nb\n")
        labels = Labels(file="labels.txt", sha256=sha256_of(folder / "labels.txt"), count=2)
        replace(Manifest.read(folder / "manifest.json"), labels=labels).write(folder / "manifest.json")
        with pytest.raises(ManifestError, match="has 2 labels, but output 'OUTPUT_0' has 10 classes"):
            read_version(folder)

    @pytest.mark.parametrize("golden", ["there", "removed"])
    def test_missing_golden_samples(self, folder: Path, golden: str) -> None:
        if golden == "removed":
            (folder / "golden.npz").unlink()
        replace(Manifest.read(folder / "manifest.json"), golden=None).write(folder / "manifest.json")
        with pytest.raises(ManifestError, match="names no golden samples"):
            read_version(folder)


class TestFirstFormat:
    """Manifests of earlier releases: labels in the model's folder, without a hash."""

    @pytest.fixture
    def old(self, folder: Path) -> Path:
        shutil.move(folder / "labels.txt", folder.parent / "labels.txt")
        manifest = replace(Manifest.read(folder / "manifest.json"), format_version=1, labels="labels.txt")
        manifest.write(folder / "manifest.json")
        return folder

    def test_first_format_is_read(self, old: Path) -> None:
        assert read_version(old).contract.labels[3] == "three"

    def test_missing_labels_of_the_first_format(self, old: Path) -> None:
        (old.parent / "labels.txt").unlink()
        with pytest.raises(RepositoryError, match=r"there is no labels\.txt"):
            read_version(old)


class TestFindGraph:
    @pytest.mark.parametrize(
        ("written", "name"), [("model.onnx", ""), ("net.onnx", "net.onnx"), ("a/b.onnx", "a/b.onnx")]
    )
    def test_graph_by_name(self, tmp_path: Path, written: str, name: str) -> None:
        (tmp_path / written).parent.mkdir(exist_ok=True)
        (tmp_path / written).write_bytes(b"")
        assert find_graph(tmp_path, name) == tmp_path / written

    @pytest.mark.parametrize("name", ["", "net"])
    def test_graph_in_a_folder(self, tmp_path: Path, name: str) -> None:
        folder = tmp_path / (name or "model.onnx")
        folder.mkdir()
        (folder / "model.onnx").write_bytes(b"")
        assert find_graph(tmp_path, name) == folder / "model.onnx"

    @pytest.mark.parametrize("name", ["../2/model.onnx", "a/../../model.onnx", ".."])
    def test_graph_outside_the_version(self, tmp_path: Path, name: str) -> None:
        for version in ("1", "2"):
            zoo.add(tmp_path, "m", zoo.scale(("batch", 3)), version=int(version))
        with pytest.raises(RepositoryError, match="outside the version folder"):
            find_graph(tmp_path / "m" / "1", name)


class TestServedGraph:
    """The file that any backend of Triton loads."""

    def found(self, folder: Path, *files: str, backend: str = "", platform: str = "", name: str = "") -> str:
        for file in files:
            (folder / file).write_bytes(b"")
        return find_served_graph(folder, backend=backend, platform=platform, default_filename=name).name

    @pytest.mark.parametrize(
        ("backend", "platform", "file"),
        [
            ("onnxruntime", "", "model.onnx"),
            ("", "onnxruntime_onnx", "model.onnx"),
            ("", "tensorrt_plan", "model.plan"),
            ("pytorch", "", "model.pt"),
            ("pytorch", "", "model.pt2"),
            ("openvino", "", "model.xml"),
            ("python", "", "model.py"),
            ("", "", "model.xml"),
            ("somebodys", "", "model.plan"),
        ],
    )
    def test_usual_file_of_a_backend(self, tmp_path: Path, backend: str, platform: str, file: str) -> None:
        assert self.found(tmp_path, file, "model.bin", backend=backend, platform=platform) == file

    def test_backend_decides_between_files(self, tmp_path: Path) -> None:
        files = ("model.onnx", "model.plan", "model.pt", "model.pt2", "net.plan")
        assert self.found(tmp_path, *files, backend="tensorrt") == "model.plan"
        assert self.found(tmp_path, *files, backend="pytorch") == "model.pt"
        assert self.found(tmp_path, *files, backend="tensorrt", name="net.plan") == "net.plan"
        with pytest.raises(RepositoryError, match=r"model\.onnx and model\.plan .* default_model_filename"):
            self.found(tmp_path)

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(RepositoryError, match=r"there is no model\.plan"):
            self.found(tmp_path, "model.onnx", backend="tensorrt")
        (tmp_path / "model.onnx").unlink()
        with pytest.raises(RepositoryError, match=r"none of model\.onnx, model\.plan"):
            self.found(tmp_path)


class TestNewestVersion:
    def test_other_entries_are_ignored(self, tmp_path: Path) -> None:
        for name in ("1", "drafts", "2.old", "-3"):
            (tmp_path / name).mkdir()
        (tmp_path / "4").write_text("a file")
        assert newest_version(tmp_path).name == "1"

    def test_hidden_folders_are_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "m" / ".graphkiln-abc" / "1").mkdir(parents=True)
        with pytest.raises(RepositoryError, match="has no version folder"):
            newest_version(tmp_path / "m")

    def test_model_without_versions(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        with pytest.raises(RepositoryError, match=r"model 'm' has no version folder \(make m/1/model\.onnx\)"):
            newest_version(tmp_path / "m")

    def test_graph_in_place_of_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "m.onnx").touch()
        with pytest.raises(RepositoryError, match=r"is a file, .*graphkiln convert .*m\.onnx"):
            newest_version(tmp_path / "m.onnx")
