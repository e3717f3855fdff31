"""Models as the server would lower them, and their documents."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import zoo

from graphkiln.cli.lower import (
    open_artifact_cache,
    read_deployment,
)
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import RepositoryError, ServerSetupError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering import deployment
from graphkiln_backend.server import installation

CONFIG = SessionConfig(
    engine="openvino", device=CPU, threads=2, spin=False, reason="requested", precision=Precision.BF16
)
SESSION: Any = None


# A model of a store, planned on this machine as the server plans it.

GPU = hardware.Gpu(name="NVIDIA H200", compute_capability="9.0", driver="570.0")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores and no GPU."""
    monkeypatch.setattr(deployment, "usable_cores", lambda: 4)
    monkeypatch.setattr(hardware, "gpus", tuple)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A bare graph of two versions: rows of 3, then rows of 5."""
    for version, size in ((1, 3), (2, 5)):
        zoo.add(tmp_path / "store", "m", zoo.scale(("batch", size)), version=version)
    return tmp_path / "store" / "m"


def with_config(model: Path, text: str) -> Path:
    (model / "config.pbtxt").write_text(text)
    return model


class TestVersion:
    def test_a_model_means_its_newest_version(
        self, model: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(model)
        for path, version in ((model, "2"), (model / "1", "1"), (Path(), "2"), (Path("1"), "1")):
            assert read_deployment(path, None, cache).version.graph_path == model / version / "model.onnx"

    def test_a_graph_of_oneflow_is_converted_once(
        self, model: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphkiln_converters.importers.oneflow import OneFlowImporter

        converted: list[Path] = []

        def convert(_: OneFlowImporter, saved: Path, target: Path) -> None:
            converted.append(saved)
            (target / "model.onnx").write_bytes(zoo.scale(("batch", 7)).SerializeToString())

        monkeypatch.setattr(OneFlowImporter, "convert", convert)
        (model / "3" / "model").mkdir(parents=True)
        (model / "3" / "model" / "model.mlir").write_text("module {}")
        for _ in range(2):
            graph = read_deployment(model, None, cache).version.graph_path
        assert graph.is_relative_to(cache.folder)
        assert converted == [model / "3" / "model"]
        assert not (model / "3" / "model.onnx").exists()


class TestMachine:
    @pytest.mark.parametrize(
        ("group", "expected"),
        [
            ("", (CPU, 2)),  # two instances of the drop-in backend share four cores
            ("instance_group { count: 4 }", (CPU, 1)),
            ("instance_group { kind: KIND_GPU gpus: [1] }", (Device.gpu(1), 4)),
        ],
    )
    def test_instances_run_where_triton_puts_them(
        self, model: Path, cache: ArtifactCache, group: str, expected: tuple[Device, int]
    ) -> None:
        (config,) = read_deployment(with_config(model, group), None, cache).plan.configs
        assert (config.device, config.threads) == expected

    @pytest.mark.parametrize(
        ("group", "expected"),
        [("", (Device.gpu(0), 4)), ("instance_group { kind: KIND_CPU }", (CPU, 2))],
    )
    def test_also_on_a_machine_with_a_gpu(
        self,
        model: Path,
        cache: ArtifactCache,
        group: str,
        *,
        expected: tuple[Device, int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(hardware, "gpus", lambda: (GPU,))
        (config,) = read_deployment(with_config(model, group), None, cache).plan.configs
        assert (config.device, config.threads) == expected


class TestBackend:
    def test_another_backend_is_told_apart(self, model: Path, cache: ArtifactCache) -> None:
        with pytest.raises(RepositoryError, match="model 'm' uses the backend 'tensorflow'"):
            read_deployment(with_config(model, 'backend: "tensorflow"'), None, cache)

    def test_an_installed_backend_of_the_name_keeps_its_models(
        self, model: Path, cache: ArtifactCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
        found = installation.Installation(
            binary=tmp_path, backends=tmp_path / "backends", caches=tmp_path, stub=tmp_path, libraries=()
        )
        monkeypatch.setattr(installation, "find_installation", lambda: found)
        with pytest.raises(RepositoryError, match="uses the backend 'onnxruntime'"):
            read_deployment(with_config(model, 'backend: "onnxruntime"'), None, cache)
        assert read_deployment(with_config(model, ""), None, cache).plan.configs[0].threads == 4  # ours: one instance

    def test_no_triton_is_needed(self, model: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> installation.Installation:
            raise ServerSetupError("there is no tritonserver")

        monkeypatch.setattr(installation, "find_installation", fail)
        assert read_deployment(with_config(model, 'backend: "onnxruntime"'), None, cache).plan.configs


class TestSettings:
    def test_of_the_flag_go_before_the_file(self, model: Path, cache: ArtifactCache) -> None:
        with_config(model, 'parameters { key: "threads" value { string_value: "1" } }')
        deployment = read_deployment(model, ["threads=3", "engine=openvino"], cache)
        assert (deployment.settings.threads, deployment.settings.engine) == (3, "openvino")
        assert deployment.settings.origins == {"threads": "--set", "engine": "--set"}


class TestCache:
    def test_off_means_a_temporary_one(self) -> None:
        with ExitStack() as stack:
            cache = stack.enter_context(open_artifact_cache("off"))
            assert not cache.lasting
            assert cache.folder.is_dir()
            stack.enter_context(suppress(RepositoryError))
            raise RepositoryError("also when the command fails")
        assert not cache.folder.exists()

    def test_no_entry_is_evicted_by_a_command(self, tmp_path: Path) -> None:
        def build(folder: Path) -> None:
            (folder / "large").write_bytes(bytes(1 << 20))

        for name in ("a", "b"):
            with open_artifact_cache(str(tmp_path / "kept")) as cache:
                cache.get("test", name, {"name": name}, build)
                entries = len(cache.entries())
        assert entries == 2


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, "model 'm' has no version folder"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"PK"), r"m/2/model\.onnx .* damaged or cut short"),
        (lambda folder: (folder / "model.onnx").unlink(), r"there is no model\.onnx in .*m/2"),
    ],
)
def test_a_version_that_cannot_be_read_is_named(
    model: Path, cache: ArtifactCache, spoil: Callable[[Path], None], words: str
) -> None:
    for version in ("1", "2"):
        spoil(model / version)
    with pytest.raises(RepositoryError, match=words):
        read_deployment(model, None, cache)
