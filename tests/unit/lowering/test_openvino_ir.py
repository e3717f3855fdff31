"""Versions in OpenVINO IR: planned for OpenVINO only, proven like others, lowered by OpenVINO itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from ir_files import graph, parameter, product, save_ir
from lowered import bf16_only, cpu
from openvino import opset13

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import open_reference, probe
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError, RepositoryError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Adoption, Golden, Manifest, Provenance, sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.output_subsets import SubsetSession
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.openvino_ir import read_ir
from graphkiln_backend.repository.version import find_graph, read_version

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
Y = X @ np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return save_ir(product(), tmp_path / "m" / "1" / "model.xml").parent


def deploy(version: Path, resources: Resources | None = None, **settings: str) -> Deployment:
    overrides = [Override(key, value, "--set") for key, value in settings.items()]
    config = ModelConfig(name="m", max_batch_size=4)
    return Deployment.read(version, config, resources or cpu(), overrides)


def build(version: Path, cache: ArtifactCache, **settings: Any) -> ProvenSession:
    return deploy(version, **settings).build(cache)


def adopt(version: Path, outputs: AnyArray, adoption: Adoption | None = None) -> None:
    """Add golden samples and a manifest to a version."""
    graph_path = find_graph(version)
    weights, samples = graph_path.with_suffix(".bin"), version / "golden.npz"
    GoldenSamples(inputs={"x": X}, source_outputs={"y": outputs}, graph_outputs={"y": outputs}).write(samples)
    manifest = Manifest(
        format_version=2,
        graph_file=graph_path.name,
        sha256=sha256_of(graph_path),
        weights={weights.name: sha256_of(weights)},
        signature=read_ir(graph_path).signature,
        preprocess=None,
        labels=None,
        provenance=Provenance(source="test", command="test"),
        verification=(),
        golden=Golden(file=samples.name, sha256=sha256_of(samples), samples=len(X)),
        adoption=adoption or Adoption(reference="numpy", precision=Precision.FP32),
    )
    manifest.write(version / "manifest.json")


class TestBareGraph:
    def test_serves_and_says_that_nothing_was_compared(self, version: Path, cache: ArtifactCache) -> None:
        proven = build(version, cache)
        with proven.session:
            np.testing.assert_allclose(proven.session.run({"x": X})["y"], Y, rtol=1e-5)
            assert proven.replay
            proven.replay.judge([proven.replay.run(0, ["y"])])
        assert (proven.config.engine, proven.self_test, proven.separate) == ("openvino", None, False)
        assert any("its outputs were compared with nothing" in note for note in proven.notes)

    def test_weights_stored_in_fp16_are_computed_in_fp32(self, tmp_path: Path, cache: ArtifactCache) -> None:
        version = save_ir(product(), tmp_path / "m" / "1" / "net.xml", compress=True).parent
        proven = build(version, cache)
        with proven.session:
            assert proven.placement
            assert proven.placement.products == {Precision.FP32: 1}

    def test_graph_without_unused_outputs_is_not_made(self, tmp_path: Path, cache: ArtifactCache) -> None:
        x = parameter("x", [-1, 3])
        model = graph({"y": opset13.relu(x).output(0), "z": opset13.abs(x).output(0)}, [x])
        proven = build(save_ir(model, tmp_path / "m" / "1" / "model.xml").parent, cache)
        with proven.session:
            assert list(proven.session.run({"x": X}, ["z"])) == ["z"]
            assert not isinstance(proven.session, SubsetSession)  # whose pass rewrites ONNX graphs

    def test_graph_that_mixes_rows_computes_requests_one_by_one(self, tmp_path: Path, cache: ArtifactCache) -> None:
        x = parameter("x", [-1, 3])
        model = graph({"y": opset13.subtract(x, opset13.reduce_mean(x, 0, keep_dims=True)).output(0)}, [x])
        proven = build(save_ir(model, tmp_path / "m" / "1" / "model.xml").parent, cache)
        with proven.session:
            assert proven.separate

    def test_random_numbers_are_no_fault(self, tmp_path: Path, cache: ArtifactCache) -> None:
        x = parameter("x", [-1, 3])
        drawn = opset13.random_uniform(opset13.shape_of(x), np.float32(0), np.float32(1), "f32")
        model = graph({"y": opset13.add(x, drawn).output(0)}, [x])
        with build(save_ir(model, tmp_path / "m" / "1" / "model.xml").parent, cache).session as session:
            assert session.run({"x": X})["y"].shape == X.shape

    def test_compressed_weights_do_not_quantize_values(self, tmp_path: Path, cache: ArtifactCache) -> None:
        """OpenVINO's default quantizes the values beside them: an error of 0.7%."""
        random = np.random.default_rng(0)
        weights, values = random.integers(-128, 128, (512, 512)), random.standard_normal((8, 512), np.float32)
        x = parameter("x", [-1, 512])
        w = opset13.convert(opset13.constant(weights.astype(np.int8)), "f32")
        w = opset13.multiply(w, opset13.constant(np.full((1, 512), 0.01, np.float32)))
        model = graph({"y": opset13.matmul(x, w, transpose_a=False, transpose_b=False).output(0)}, [x])
        version = save_ir(model, tmp_path / "m" / "1" / "model.xml").parent
        with build(version, cache).session as session:
            found = session.run({"x": values})["y"]
        np.testing.assert_allclose(found, values @ (weights * np.float32(0.01)), rtol=1e-3, atol=1e-3)


class TestPrecision:
    @bf16_only
    def test_openvino_lowers_it_itself(self, version: Path, cache: ArtifactCache) -> None:
        proven = build(version, cache, precision="bf16")
        with proven.session:
            assert proven.placement
            assert proven.placement.products == {Precision.BF16: 1}
        assert "in bf16" in str(proven.config)

    @bf16_only
    def test_compiled_graphs_of_both_precisions_are_kept(self, version: Path, tmp_path: Path) -> None:
        with ArtifactCache(tmp_path / "lasting") as lasting:
            for precision in ("bf16", "fp32", "bf16", "fp32"):
                proven = build(version, lasting, precision=precision)
                with proven.session:
                    assert proven.placement
                    assert proven.placement.products == {Precision(precision): 1}

    @bf16_only
    def test_auto_measures_it_beside_fp32(self, version: Path) -> None:
        plan = deploy(version, engine="auto", precision="bf16").plan
        assert [str(each) for each in plan.configs] == ["openvino on cpu in bf16", "openvino on cpu in fp32"]

    def test_reference_is_computed_in_fp32(self, version: Path) -> None:
        with open_reference(version / "model.xml") as reference:
            np.testing.assert_allclose(reference.run({"x": X})["y"], Y, rtol=1e-5)


class TestPlan:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"engine": "onnxruntime"}, "onnxruntime cannot serve this graph; it does not read OpenVINO IR"),
            ({"engine": "tensorrt"}, "tensorrt cannot serve this graph; it does not read OpenVINO IR"),
            ({"fallback": "onnxruntime"}, "onnxruntime cannot serve this graph; it does not read OpenVINO IR"),
            ({"parallel": "data=2"}, "only ONNX graphs are spread over devices"),
            ({"precision": "int8"}, "int8 needs samples"),
        ],
    )
    def test_refused_settings(self, version: Path, settings: dict[str, str], message: str) -> None:
        with pytest.raises(LoweringError, match=message):
            deploy(version, **settings)

    def test_gpu(self, version: Path) -> None:
        with pytest.raises(LoweringError, match="onnxruntime: it does not read OpenVINO IR"):
            deploy(version, Resources(device=Device.gpu(), cores=2, probe=probe))

    def test_explanation_names_the_format(self, version: Path) -> None:
        assert "rejected: onnxruntime: it does not read OpenVINO IR" in deploy(version).plan.explain()


class TestAdopted:
    def test_golden_samples_are_replayed(self, version: Path, cache: ArtifactCache) -> None:
        adopt(version, Y)
        proven = build(version, cache)
        with proven.session:
            assert proven.self_test
            assert proven.replay
        assert not proven.notes

    def test_wrong_outputs_are_refused(self, version: Path, cache: ArtifactCache) -> None:
        adopt(version, Y * np.float32(1.01))
        with pytest.raises(LoweringError, match="the outputs changed"):
            build(version, cache)

    def test_limits_are_those_of_the_adopted_precision(self, version: Path, cache: ArtifactCache) -> None:
        near = Y * np.float32(1.005)
        adopt(version, near, Adoption(reference="torch", precision=Precision.FP16))
        with build(version, cache).session:
            pass
        adopt(version, near, Adoption(reference="itself", precision=Precision.FP32, recorded=True))
        with pytest.raises(LoweringError, match="the outputs changed"):
            build(version, cache)

    def test_changed_weights_are_refused(self, version: Path) -> None:
        adopt(version, Y)
        weights = version / "model.bin"
        weights.write_bytes(bytes(weights.stat().st_size))
        with pytest.raises(RepositoryError, match=r"model\.bin does not match"):
            read_version(version)


class TestFaults:
    def test_state_between_requests(self, tmp_path: Path, cache: ArtifactCache) -> None:
        x = parameter("x", [1, 3])
        before = opset13.read_value(opset13.constant(np.zeros((1, 3), np.float32)), "sum")
        total = opset13.add(x, before)
        total.output(0).set_names({"y"})
        model = openvino.Model([opset13.result(total)], [opset13.assign(total, "sum")], [x], "states")
        path = save_ir(model, tmp_path / "m" / "1" / "model.xml")
        with pytest.raises(LoweringError, match="keeps a state between requests"):
            build(path.parent, cache)

    def test_weights_cut_short(self, version: Path, cache: ArtifactCache) -> None:
        deployment = deploy(version)
        os.truncate(version / "model.bin", 8)
        with pytest.raises(LoweringError, match=r"is cut short: model\.xml needs 48 bytes, it has 8"):
            deployment.build(cache)

    def test_replaced_weights_are_noticed(self, version: Path) -> None:
        found = read_version(version)
        before = found.stamp()
        save_ir(product(scale=2), version / "new.xml")
        (version / "new.bin").replace(version / "model.bin")
        assert found.stamp() != before

    def test_hint_is_not_an_engine_that_cannot_read_it(self, tmp_path: Path, cache: ArtifactCache) -> None:
        x = parameter("x", [-1, 3], openvino.Type.f64)
        path = save_ir(graph({"y": opset13.relu(x).output(0)}, [x]), tmp_path / "m" / "1" / "model.xml")
        with pytest.raises(LoweringError, match=r"computes FP64 in FP32; .* serve the ONNX file") as caught:
            build(path.parent, cache)
        assert "engine: onnxruntime" not in str(caught.value)

    def test_integers_that_openvino_would_cut_off_are_refused(self, tmp_path: Path, cache: ArtifactCache) -> None:
        x = parameter("x", [-1, 3], np.int64)
        model = graph({"y": opset13.add(x, opset13.constant(np.int64(1) << 40)).output(0)}, [x])
        with pytest.raises(LoweringError, match="OpenVINO computes integers in 32 bits"):
            build(save_ir(model, tmp_path / "m" / "1" / "model.xml").parent, cache)


def test_boxes_are_suppressed_as_in_openvino(tmp_path: Path) -> None:
    """The limit of ONNX graphs is corrected, that of OpenVINO IR is as it should be."""
    boxes, scores = parameter("boxes", [1, 2, 4]), parameter("scores", [1, 1, 2])
    limit = opset13.constant(np.float32(0.5))
    kept = opset13.non_max_suppression(boxes, scores, np.int64(9), limit, np.float32(0))
    path = save_ir(graph({"kept": kept.output(0)}, [boxes, scores]), tmp_path / "m.xml")
    feeds = {
        "boxes": np.array([[[0, 0, 2, 2], [0, 0, 1, 2]]], np.float32),  # overlap by exactly a half
        "scores": np.array([[[0.9, 0.8]]], np.float32),
    }
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    with open_reference(path) as session:
        np.testing.assert_array_equal(session.run(feeds)["kept"], compiled(feeds)[0])


class TestFindGraph:
    def make(self, folder: Path, *names: str) -> Path:
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).touch()
        return folder

    @pytest.mark.parametrize(
        ("names", "found"),
        [
            (("model.onnx", "model.xml", "model.bin"), "model.onnx"),
            (("model.xml", "model.bin", "other.xml", "other.bin"), "model.xml"),
            (("net.xml", "net.bin", "notes.xml"), "net.xml"),
            (("net.xml",), "net.xml"),
        ],
    )
    def test_choice(self, tmp_path: Path, names: tuple[str, ...], found: str) -> None:
        assert find_graph(self.make(tmp_path / "1", *names)).name == found

    def test_named_by_the_configuration(self, tmp_path: Path) -> None:
        folder = self.make(tmp_path / "1", "a.xml", "a.bin", "b.xml", "b.bin")
        assert find_graph(folder, "b.xml").name == "b.xml"
        with pytest.raises(RepositoryError, match=r"several graphs: a\.xml, b\.xml"):
            find_graph(folder)

    def test_none(self, tmp_path: Path) -> None:
        with pytest.raises(GraphkilnError, match=r"there is no model\.onnx"):
            find_graph(self.make(tmp_path / "1", "notes.txt"))
