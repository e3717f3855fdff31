"""From a version folder and its configuration to a session that serves; libraries of custom operators."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import zoo
from lowered import cpu

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph import files, manifest
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.deployment import Deployment, find_library
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.repository import onnx_file as onnx_reading
from graphkiln_backend.repository.model_config import InstanceGroup, ModelConfig

ONE = ModelConfig(name="digits", backend="graphkiln")


@pytest.fixture
def folder(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits / "1", tmp_path / "store" / "digits" / "1")


def configured(**fields: Any) -> ModelConfig:
    return dataclasses.replace(ONE, **fields)


class TestReading:
    def test_example(self, folder: Path) -> None:
        deployment = Deployment.read(folder, ONE, cpu(4))
        assert deployment.version.graph_path == folder / "model.onnx"
        assert deployment.saved is Precision.FP32
        assert deployment.warmup_batch_sizes == (1,)
        (config,) = deployment.plan.configs
        assert (str(config), config.threads, config.spin) == ("onnxruntime on cpu", 4, True)

    @pytest.mark.parametrize(
        ("largest", "preferred", "sizes"),
        [(0, None, (1,)), (16, None, (1, 16)), (16, (), (1, 2, 4, 8, 16)), (16, (12,), (1, 2, 4, 8, 12, 16))],
    )
    def test_warmup_batch_sizes(
        self, folder: Path, largest: int, preferred: tuple[int, ...] | None, sizes: tuple[int, ...]
    ) -> None:
        config = configured(max_batch_size=largest, preferred_batch_sizes=preferred)
        deployment = Deployment.read(folder, config, cpu())
        assert deployment.warmup_batch_sizes == sizes
        assert deployment.plan.configs[0].largest_batch == sizes[-1]

    def test_instances_of_the_configuration_share_the_cores(self, folder: Path) -> None:
        groups = (InstanceGroup(count=1, device=CPU), InstanceGroup(count=3, device=CPU))
        (config,) = Deployment.read(folder, configured(instance_groups=groups), cpu(8, instances=1)).plan.configs
        assert (config.threads, config.spin) == (2, False)
        assert config.reason == "the default, 8 cores shared by 4 instances"

    def test_device_is_that_of_the_instance(self, folder: Path) -> None:
        resources = Resources(device=Device.gpu(1), cores=2, probe=probe)
        parameters = {"layout": "nhwc"}
        (config,) = Deployment.read(folder, configured(parameters=parameters), resources).plan.configs
        assert (config.device, config.layout) == (Device.gpu(1), "nhwc")
        with pytest.raises(RepositoryError, match=r"parameters\.layout nhwc is for GPUs"):
            Deployment.read(folder, configured(parameters=parameters), cpu())

    def test_saved_precision_selects_the_engine(self, folder: Path) -> None:
        (folder / "manifest.json").unlink()
        (folder / "golden.npz").unlink()
        graph = zoo.identity(("batch", 3), zoo.TensorProto.BFLOAT16)
        graph.graph.initializer.append(zoo.helper.make_tensor("w", zoo.TensorProto.BFLOAT16, [3], [0.0, 1.0, 2.0]))
        (folder / "model.onnx").write_bytes(graph.SerializeToString())
        deployment = Deployment.read(folder, ONE, cpu())
        assert deployment.saved is Precision.BF16
        assert [str(config) for config in deployment.plan.configs] == ["openvino on cpu"]  # ONNX Runtime cannot


class TestRefusals:
    def test_decoupled_responses_are_refused(self, folder: Path) -> None:
        with pytest.raises(RepositoryError, match="a graph gives one response to each request"):
            Deployment.read(folder, configured(decoupled=True), cpu())


class TestBuilding:
    def test_example_is_proven_and_serves(self, folder: Path, cache: ArtifactCache) -> None:
        config = configured(max_batch_size=4, preferred_batch_sizes=())
        proven = Deployment.read(folder, config, cpu()).build(cache)
        with proven.session as session:
            assert proven.self_test
            assert proven.self_test.verdict.endswith("PASS")
            assert proven.self_test.batch_sizes == (1, 4)
            outputs = session.run({"INPUT_0": np.zeros((4, 1, 32, 32), np.float32)})
        assert outputs["OUTPUT_0"].shape == (4, 10)
        assert proven.warmup_s > 0
        assert not proven.notes


class TestFilledCache:
    def test_start_with_a_filled_cache_reads_each_file_once(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (folder / "manifest.json").unlink()
        (folder / "golden.npz").unlink()
        opened: Counter[str] = Counter()
        built: list[str] = []
        open_regular, session = files.open_regular, onnxruntime.InferenceSession

        def opening(path: Any, *limit: Any) -> Any:
            opened[Path(path).name] += 1
            return open_regular(path, *limit)

        def building(path: str, *arguments: Any, **options: Any) -> Any:
            built.append(Path(path).name)
            return session(path, *arguments, **options)

        for _ in range(2):  # each as a process of its own
            onnx_reading._read_once.cache_clear()
            opened.clear()
            built.clear()
            with monkeypatch.context() as patched, ArtifactCache(tmp_path / "cache") as cache:
                for module in (files, manifest):
                    patched.setattr(module, "open_regular", opening)
                patched.setattr(onnxruntime, "InferenceSession", building)
                Deployment.read(folder, configured(max_batch_size=4), cpu()).build(cache).session.close()
        assert built == ["optimised.onnx"]
        assert opened["model.onnx"] == 1
        assert opened["optimised.onnx"] == 1
        assert set(opened.values()) == {1}


def test_rarely_needed_modules_are_not_imported() -> None:
    """Each instance is a process, which pays for its imports at each start."""
    program = "import sys, graphkiln_backend.lowering.deployment; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    rare = ("onnx", "onnx_ir", "grpc", "openvino", "graphkiln_backend.lowering.parallel")
    assert not [name for name in loaded if name in rare]


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "model"


def test_library_in_the_working_directory_comes_first(model_folder: Path) -> None:
    (model_folder / "lib.so").touch()
    assert find_library("lib.so", model_folder) == str(model_folder / "lib.so")
    Path("lib.so").touch()
    assert find_library("lib.so", model_folder) == str(model_folder.parent / "here" / "lib.so")


def test_library_with_an_absolute_path(model_folder: Path) -> None:
    (model_folder / "lib.so").touch()
    assert find_library(str(model_folder / "lib.so"), model_folder.parent) == str(model_folder / "lib.so")


def test_bare_library_name_is_left_to_the_loader(model_folder: Path) -> None:
    assert find_library("libm.so.6", model_folder) == "libm.so.6"


@pytest.mark.parametrize("name", ["lib/missing.so", "/nowhere/missing.so", ""])
def test_missing_library_is_refused(model_folder: Path, name: str) -> None:
    with pytest.raises(RepositoryError, match="which is missing"):
        find_library(name, model_folder)
