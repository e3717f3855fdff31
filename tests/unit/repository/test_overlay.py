"""Mirrors of model stores: links, and complete configurations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zoo
from ir_files import product, save_ir

from graphkiln_backend.graph.errors import GraphkilnError, ManifestError, RepositoryError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND, read_config
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.overlay import OtherBackend, batch_footprints, complete_config, write_mirror
from graphkiln_backend.repository.version import check_label_files

LABELLED = 'name: "y" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt"'
ALL = frozenset({BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND})


def as_is(version: Path) -> Path:
    return version


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    zoo.add(store, "bare", zoo.scale(("batch", 3)))
    zoo.add(store, "written", zoo.scale(("batch", 3)), 'backend: "graphkiln" max_batch_size: 16')
    (store / "written" / "labels.txt").write_text("red\ngreen\nblue\n")
    return store


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def build(store: Path, mirror: Path) -> Path:
    """A mirror of a store with all models and versions, every configuration complete."""
    for model in sorted(store.iterdir()):
        write_mirror(model, mirror / model.name, {1, 2}, complete_config(model, ALL, as_is))
    return mirror


class TestOpenVinoIr:
    def test_configuration_is_completed(self, tmp_path: Path) -> None:
        save_ir(product(), tmp_path / "m" / "1" / "any.xml")
        config = complete_config(tmp_path / "m", ALL, as_is)
        assert (config.backend, config.max_batch_size) == (BACKEND, 4)
        assert [(each.name, list(each.dims)) for each in (*config.input, *config.output)] == [("x", [3]), ("y", [4])]

    def test_fixed_batch_is_not_batched(self, tmp_path: Path) -> None:
        save_ir(product((2, 3)), tmp_path / "m" / "1" / "model.xml")
        config = complete_config(tmp_path / "m", ALL, as_is)
        assert (config.max_batch_size, list(config.input[0].dims), list(config.output[0].dims)) == (0, [2, 3], [2, 4])

    def test_backend_of_another_name_is_left_alone(self, tmp_path: Path) -> None:
        version = save_ir(product(), tmp_path / "m" / "1" / "model.xml").parent
        (version.parent / "config.pbtxt").write_text('backend: "openvino"')
        with pytest.raises(OtherBackend):
            complete_config(version.parent, ALL, as_is)
        assert complete_config(version.parent, ALL | {"openvino"}, as_is).backend == "openvino"


class TestMirror:
    def test_users_config_is_linked(self, store: Path, tmp_path: Path) -> None:
        write_mirror(store / "written", tmp_path / "mirror", {1}, None)
        assert (tmp_path / "mirror" / "config.pbtxt").readlink() == store / "written" / "config.pbtxt"

    @pytest.mark.parametrize("place", ["labels.txt", "names/labels.txt", "1/labels.txt"])
    @pytest.mark.parametrize("completed", [True, False])
    def test_label_files_are_copied(self, store: Path, tmp_path: Path, place: str, *, completed: bool) -> None:
        """Triton since 26.02 refuses a label file whose real path leaves the model's folder."""
        model, mirror = store / "written", tmp_path / "mirror"
        (model / place).parent.mkdir(exist_ok=True)
        (model / place).write_text("red\ngreen\nblue\n")
        (model / "config.pbtxt").write_text(
            f'backend: "graphkiln" output [{{ name: "y" data_type: TYPE_FP32 dims: [3] label_filename: "{place}" }}]'
        )
        config = read_config(model / "config.pbtxt") if completed else None
        write_mirror(model, mirror, {1}, config)
        assert (mirror / place).resolve().is_relative_to(mirror.resolve())
        assert (mirror / place).read_text() == "red\ngreen\nblue\n"
        assert (mirror / "1" / "model.onnx").resolve() == (model / "1" / "model.onnx").resolve()

    @pytest.mark.parametrize(
        ("content", "triton_reads"),
        [
            (b"\xef\xbb\xbfred\r\n\r\nblue\r\n", b"red\n\nblue\n"),
            (b"red\ngreen\nblue", b"red\ngreen\nblue\n"),
            (b"red\n\n", b"red\n\n"),
            (b"", b""),
            ("größe\ta\n".encode(), "größe\ta\n".encode()),
        ],
    )
    def test_triton_reads_the_labels_that_clients_read(
        self, store: Path, tmp_path: Path, content: bytes, triton_reads: bytes
    ) -> None:
        model = store / "written"
        (model / "labels.txt").write_bytes(content)
        (model / "config.pbtxt").write_text(f'backend: "graphkiln" output [{{ {LABELLED} }}]')
        config = complete_config(model, ALL, as_is)
        write_mirror(model, tmp_path / "mirror", {1}, config)
        assert (tmp_path / "mirror" / "labels.txt").read_bytes() == triton_reads
        check_label_files(config, tmp_path / "mirror")
        if content not in (triton_reads, triton_reads.removesuffix(b"\n")):
            with pytest.raises(RepositoryError, match=r"labels\.txt has a byte order mark"):
                check_label_files(config, model)
        write_mirror(model, tmp_path / "of another backend", {1}, None)
        assert (tmp_path / "of another backend" / "labels.txt").read_bytes() == content

    def test_labels_that_cannot_be_read_are_refused(self, store: Path) -> None:
        model = store / "written"
        (model / "labels.txt").write_bytes("red\n".encode("utf-16"))
        (model / "config.pbtxt").write_text(f'backend: "graphkiln" output [{{ {LABELLED} }}]')
        with pytest.raises(ManifestError, match="they are not UTF-8"):
            complete_config(model, ALL, as_is)

    def test_labels_that_do_not_exist_are_refused(self, store: Path) -> None:
        model = store / "written"
        (model / "labels.txt").unlink()
        (model / "config.pbtxt").write_text(f'backend: "graphkiln" output [{{ {LABELLED} }}]')
        with pytest.raises(RepositoryError, match=r"names labels that do not exist: labels\.txt"):
            complete_config(model, ALL, as_is)

    def test_a_preprocess_spec_that_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        text = json.dumps(Preprocess(resize=64).to_json())
        config = f'parameters {{ key: "preprocess" value {{ string_value: {text} }} }}'
        zoo.add(tmp_path, "m", zoo.scale(("batch", 3, 48, 48)), config)
        with pytest.raises(RepositoryError, match=r"shorter side of 64, but input 'x' takes \[3, 48, 48\]"):
            complete_config(tmp_path / "m", ALL, as_is)

    @pytest.mark.parametrize("place", ["../other.txt", "missing.txt"])
    def test_invalid_label_files_are_skipped(self, store: Path, tmp_path: Path, place: str) -> None:
        (store / "other.txt").write_text("x\n")
        model = store / "written"
        (model / "config.pbtxt").write_text(f'output [{{ name: "y" label_filename: "{place}" }}]')
        write_mirror(model, tmp_path / "mirror", {1}, None)
        assert not (tmp_path / "mirror" / "missing.txt").exists()
        assert not (tmp_path / "other.txt").exists()

    def test_other_versions_are_hidden(self, store: Path, tmp_path: Path) -> None:
        for version in (2, 3):
            zoo.add(store, "bare", zoo.scale(("batch", 3)), version=version)
        write_mirror(store / "bare", tmp_path / "mirror", {2}, None)
        assert sorted(path.name for path in (tmp_path / "mirror").iterdir()) == ["2"]

    @pytest.mark.parametrize("name", ["7.old", "+7", "9223372036854775808"])
    def test_names_that_confuse_triton_are_hidden(self, store: Path, tmp_path: Path, name: str) -> None:
        for folder in (name, "drafts"):
            (store / "bare" / folder).mkdir()
        write_mirror(store / "bare", tmp_path / "mirror", {1}, None)
        shown = {path.name for path in (tmp_path / "mirror").iterdir()}
        assert name not in shown
        assert {"1", "drafts"} <= shown

    def test_users_store_is_not_changed(self, store: Path, tmp_path: Path) -> None:
        before = tree(store)
        build(store, tmp_path / "overlay")
        assert tree(store) == before

    def test_links_do_not_depend_on_the_working_folder(
        self, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(store.parent)
        mirror = build(Path(store.name), tmp_path / "overlay")
        monkeypatch.chdir("/")
        assert (mirror / "bare" / "1" / "model.onnx").is_file()


class TestCompleteConfig:
    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda model: (model / "config.pbtxt").write_text("{"), "is not a model configuration"),
            (lambda model: shutil.rmtree(model / "1"), "model 'bare' has no version folder"),
            (lambda model: (model / "1" / "model.onnx").write_bytes(b"PK"), "damaged or cut short"),
            (lambda model: (model / "1" / "model.onnx").unlink(), "there is no model.onnx in"),
            (lambda model: (model / "1" / "manifest.json").write_text("{"), "is not JSON"),
            (lambda model: (model / "config.pbtxt").write_text('input { name: "z" }'), "'z' is not in the graph"),
        ],
    )
    def test_models_that_cannot_be_completed(self, store: Path, spoil: Callable[[Path], None], words: str) -> None:
        spoil(store / "bare")
        with pytest.raises(GraphkilnError) as caught:
            complete_config(store / "bare", ALL, as_is)
        assert words in str(caught.value)
        assert isinstance(caught.value, (RepositoryError, ManifestError))

    @pytest.mark.parametrize(
        ("text", "backends", "expected"),
        [
            ("", ALL, DROP_IN_BACKEND),
            ("", {BACKEND}, BACKEND),  # a C++ backend holds the other name
            ('platform: "onnxruntime_onnx"', ALL, DROP_IN_BACKEND),
            ('backend: "graphkiln"', ALL, BACKEND),
            ('backend: "oneflow"', ALL, ONEFLOW_BACKEND),
        ],
    )
    def test_backend_names(self, store: Path, text: str, backends: set[str], expected: str) -> None:
        (store / "bare" / "config.pbtxt").write_text(text)
        assert complete_config(store / "bare", frozenset(backends), as_is).backend == expected

    @pytest.mark.parametrize(
        ("text", "backends", "named"),
        [
            ('backend: "tensorflow"', ALL, "tensorflow"),
            ('platform: "tensorrt_plan"', ALL, "tensorrt_plan"),
            ('backend: "onnxruntime"', {BACKEND}, "onnxruntime"),
        ],
    )
    def test_model_of_another_backend_is_not_converted(
        self, store: Path, text: str, backends: set[str], named: str
    ) -> None:
        def refuse(version: Path) -> Path:
            pytest.fail(f"{version} is converted")

        (store / "bare" / "config.pbtxt").write_text(text)
        with pytest.raises(OtherBackend, match=f"model 'bare' uses the backend '{named}'"):
            complete_config(store / "bare", frozenset(backends), refuse)

    def test_an_unknown_platform_is_refused(self, store: Path) -> None:
        (store / "bare" / "config.pbtxt").write_text('platform: "onnxruntime"')
        with pytest.raises(RepositoryError, match="'bare' has the unknown platform 'onnxruntime'") as caught:
            complete_config(store / "bare", ALL, as_is)
        assert not isinstance(caught.value, OtherBackend)
        assert caught.value.hint == "did you mean 'onnxruntime_onnx'?"

    def test_name_that_differs_from_the_folder(self, store: Path) -> None:
        (store / "bare" / "config.pbtxt").write_text('name: "bare"')
        assert complete_config(store / "bare", ALL, as_is).name == "bare"
        (store / "bare" / "config.pbtxt").write_text('name: "other"')
        with pytest.raises(RepositoryError, match=r"named 'bare', .* names the model 'other' \(rename the folder, or"):
            complete_config(store / "bare", ALL, as_is)

    def test_newest_version_is_used(self, store: Path) -> None:
        for version, size in ((2, 5), (10, 7)):
            zoo.add(store, "bare", zoo.scale(("batch", size)), version=version)
        assert list(complete_config(store / "bare", ALL, as_is).input[0].dims) == [7]

    def test_graph_in_another_folder(self, store: Path, tmp_path: Path) -> None:
        elsewhere = zoo.add(tmp_path / "cache", "converted", zoo.scale(("batch", 9)))
        requested: list[Path] = []

        def graph_folder(version: Path) -> Path:
            requested.append(version)
            return elsewhere

        assert list(complete_config(store / "bare", ALL, graph_folder).input[0].dims) == [9]
        assert requested == [store / "bare" / "1"]


class TestFootprints:
    def test_one_footprint_per_instance(self, store: Path, tmp_path: Path) -> None:
        text = 'backend: "graphkiln" max_batch_size: 2 instance_group [{ count: 1 }, { count: 2 }]'
        (store / "bare" / "config.pbtxt").write_text(text)
        mirrors = [build(store, tmp_path / "overlay")]
        row = 2 * 3 * 4  # x and y, three floats each
        assert batch_footprints(mirrors) == [2 * row] * 3 + [16 * row]

    def test_default_instance_count(self, store: Path, tmp_path: Path) -> None:
        for text in ("", "instance_group { kind: KIND_AUTO }"):
            (store / "bare" / "config.pbtxt").write_text(text)
            mirror = build(store, tmp_path / f"overlay {len(text)}")
            config = ModelConfig.read(mirror / "bare" / "config.pbtxt", has_gpu=False)
            assert batch_footprints([mirror]).count(config.batch_bytes) == config.instances == 2
