"""Proofs of graphs: batch sizes, gradients, detections, undecided samples."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph
from task_outputs import detector_outputs

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeSession
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, UndecidedError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.task import Detection
from graphkiln_backend.proof.policy import BY_PRECISION, EXPORT
from graphkiln_converters.prove import ReferenceSamples, other_batch_sizes, prove_graph, prove_served
from graphkiln_converters.sources import base
from graphkiln_converters.sources.base import run_in_batches

TEXT = "(float[batch,4] x) => (float[batch,3] y, float[batch,4] slope) { y = MatMul(x, w) slope = Mul(x, two) }"
W = draw(4, 3, seed=7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx_ir.save(graph(TEXT, w=W, two=np.float32(2)), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def samples(rows: int = 6, seed: int = 0) -> ReferenceSamples:
    x = draw(rows, 4, seed=seed)
    return ReferenceSamples(feeds={"x": x}, outputs={"y": x @ W, "slope": 2 * x})


def test_long_proofs_report_their_progress(path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PROGRESS_S", 0.0)
    prove_graph(path, [samples(), samples(seed=1)], EXPORT, batch_sizes=(1, 3))
    assert "proving the outputs, at each size: 3 of 4" in logged
    assert "6 samples in batches of 3: 1 of 2" in logged


class TestBatchSizes:
    @pytest.mark.parametrize("saved", [1, 2, 3, 7])
    def test_batch_sizes_differ_from_the_saved_one(self, saved: int) -> None:
        sizes = other_batch_sizes(saved)
        assert len(set(sizes)) == len(sizes) >= 2
        assert saved not in sizes


class TestSamplesThatDecide:
    def test_equal_answers_prove_nothing(self, path: Path) -> None:
        """A graph that ignores its inputs would pass."""
        x = np.repeat(draw(1, 4), 6, axis=0)
        with pytest.raises(UndecidedError, match=r"all 6 have the same outputs.*--samples"):
            prove_graph(path, [ReferenceSamples(feeds={"x": x}, outputs={"y": x @ W, "slope": 2 * x})], EXPORT)

    @pytest.mark.parametrize("whole", [False, True])
    def test_samples_of_several_groups_are_compared(self, path: Path, whole: bool) -> None:
        """Rows of other sizes and whole samples are groups of their own, and one answer decides nothing."""

        def group_of(seed: int) -> ReferenceSamples:
            return replace(samples(rows=1, seed=seed), whole=whole)

        prove_graph(path, [group_of(0), group_of(1)], EXPORT)
        prove_graph(path, [group_of(0)], EXPORT)
        with pytest.raises(UndecidedError, match="all 3 have the same outputs"):
            prove_graph(path, [group_of(0)] * 3, EXPORT)

    def test_equal_rows_of_one_group_do_not_hide_the_others(self, path: Path) -> None:
        x = np.repeat(draw(1, 4), 6, axis=0)
        equal = ReferenceSamples(feeds={"x": x}, outputs={"y": x @ W, "slope": 2 * x})
        prove_graph(path, [equal, samples()], EXPORT)

    def test_outputs_of_other_shapes_are_different(self, tmp_path: Path) -> None:
        text = "(float[n,k] x) => (float[n,k] y) { y = Add(x, one) }"
        onnx_ir.save(graph(text, one=np.float32(1)), tmp_path / "model.onnx")
        sizes = [np.zeros((2, size), np.float32) for size in (3, 5)]
        groups = [ReferenceSamples(feeds={"x": x}, outputs={"y": x + 1}, whole=True) for x in sizes]
        prove_graph(tmp_path / "model.onnx", groups, EXPORT)

    def test_a_graph_without_inputs_has_one_answer(self, tmp_path: Path) -> None:
        text = "() => (float[2] y) { y = Identity(one) }"
        onnx_ir.save(graph(text, one=np.ones(2, np.float32)), tmp_path / "model.onnx")
        group = ReferenceSamples(feeds={}, outputs={"y": np.ones(2, np.float32)}, whole=True)
        prove_graph(tmp_path / "model.onnx", [group, group], EXPORT)

    def test_golden_samples_differ_where_the_first_do_not(self, path: Path) -> None:
        x = np.concatenate([np.repeat(draw(1, 4), 6, axis=0), draw(3, 4, seed=1)])
        golden = prove_graph(
            path, [ReferenceSamples(feeds={"x": x}, outputs={"y": x @ W, "slope": 2 * x})], EXPORT
        ).golden
        assert len(np.unique(golden.graph_outputs["y"], axis=0)) == 4


class TestServed:
    """A proven graph is also replayed on the session that serves it."""

    @pytest.mark.parametrize(("precision", "served"), [(Precision.FP32, False), (Precision.INT8, True)])
    def test_the_limits_are_those_of_the_self_test(self, path: Path, precision: Precision, served: bool) -> None:
        golden = prove_graph(path, [samples()], EXPORT).golden
        golden = replace(golden, graph_outputs={**golden.graph_outputs, "slope": golden.inputs["x"] * np.float32(2.05)})
        row = BY_PRECISION[precision]
        refused = nullcontext() if served else pytest.raises(VerificationError, match=r"not as .* served.*--other way")
        with refused:
            prove_served(path, golden, precision, row, reading=None, largest_batch=8, way_out="--other way")

    def test_every_batch_size_is_replayed(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ran = set()
        run = OnnxRuntimeSession.run

        def recorded(self: OnnxRuntimeSession, feeds: Any, outputs: Any = None) -> Any:
            ran.add(len(feeds["x"]))
            return run(self, feeds, outputs)

        golden = prove_graph(path, [samples()], EXPORT).golden
        monkeypatch.setattr(OnnxRuntimeSession, "run", recorded)
        prove_served(path, golden, Precision.FP32, EXPORT, reading=None, largest_batch=8)
        assert ran >= {1, 2, 5, 8}

    def test_a_graph_that_does_not_load_is_refused(self, path: Path) -> None:
        golden = prove_graph(path, [samples()], EXPORT).golden
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(VerificationError, match="not as it would be served: ONNX Runtime cannot load"):
            prove_served(path, golden, Precision.FP32, EXPORT, reading=None, largest_batch=8)


class TestProof:
    def test_a_proof_records_errors_and_batch_sizes(self, path: Path) -> None:
        proof = prove_graph(path, [samples()], EXPORT)
        (verdict,) = proof.verification
        assert (verdict.step, verdict.samples, verdict.batch_sizes) == ("export", 6, (1, 3))
        assert set(proof.errors) == {"y", "slope"}
        assert proof.errors["slope"] == 0
        assert [spec.name for spec in proof.signature.inputs] == ["x"]
        assert 0 <= proof.largest_difference < 1e-5

    def test_the_worst_error_of_all_samples_counts(self, path: Path) -> None:
        off = samples(seed=1)
        off = replace(off, outputs={**off.outputs, "slope": off.outputs["slope"] * np.float32(1 + 5e-6)})
        assert prove_graph(path, [off, samples()], EXPORT).errors["slope"] == pytest.approx(5e-6, rel=0.1)
        proof = prove_graph(path, [samples(), off], EXPORT)
        assert proof.errors["slope"] == pytest.approx(5e-6, rel=0.1)
        assert proof.verification[0].relative_l2 == pytest.approx(5e-6, rel=0.1)
        assert proof.largest_difference == pytest.approx(np.abs(off.outputs["slope"]).max() * 5e-6, rel=0.2)

    @pytest.mark.parametrize("at", [0, 1])
    def test_changed_outputs_are_refused(self, path: Path, at: int) -> None:
        off = [samples(), samples(seed=1)]
        off[at] = replace(off[at], outputs={**off[at].outputs, "y": off[at].outputs["y"] * np.float32(1.001)})
        with pytest.raises(VerificationError, match="the outputs changed"):
            prove_graph(path, off, EXPORT)

    def test_a_fixed_batch_is_detected(self, tmp_path: Path) -> None:
        text = "(float[batch,4] x) => (float[batch,4] y) { r = Reshape(x, s) y = Reshape(r, t) }"
        onnx_ir.save(graph(text, s=np.array([2, 4]), t=np.array([-1, 4])), tmp_path / "model.onnx")
        x = draw(6, 4)
        with pytest.raises(VerificationError, match=r"the graph does not run with x \[1, 4\]"):
            prove_graph(tmp_path / "model.onnx", [ReferenceSamples(feeds={"x": x}, outputs={"y": x})], EXPORT)

    def test_dependent_rows_are_detected(self, tmp_path: Path) -> None:
        text = "(float[batch,4] x) => (float[batch,4] y) { m = ReduceMean<keepdims=1>(x, zero) y = Sub(x, m) }"
        onnx_ir.save(graph(text, zero=np.array([0])), tmp_path / "model.onnx")
        x = draw(6, 4)
        expected = compute(graph(text, zero=np.array([0])), x=x)["y"]
        with pytest.raises(VerificationError):
            prove_graph(tmp_path / "model.onnx", [ReferenceSamples(feeds={"x": x}, outputs={"y": expected})], EXPORT)

    @pytest.mark.parametrize("declared", ["[batch,2]", "[batch,k]", "[k,batch]"])
    def test_outputs_of_other_shapes_than_declared_are_refused(self, tmp_path: Path, declared: str) -> None:
        """Clients read the shapes in the metadata; `k` is a size of the input, and the output has another."""
        path = tmp_path / "m.onnx"
        made = graph(f"(float[batch,k] x) => (float{declared} y) {{ c = Concat<axis=1>(x, x) y = Relu(c) }}")
        onnx_ir.save(made, path)
        x = draw(6, 3)
        sample = ReferenceSamples(feeds={"x": x}, outputs={"y": np.maximum(np.concatenate([x, x], axis=1), 0)})
        with pytest.raises(VerificationError, match="the outputs changed") as caught:
            prove_graph(path, [sample], EXPORT)
        assert "of output 'y'" in caught.value.report

    def test_infinite_outputs_are_left_out_of_the_largest_difference(self, tmp_path: Path) -> None:
        text = "(float[batch,2] x) => (float[batch,2] y, float[batch,2] z) { y = Log(x) z = Mul(x, two) }"
        onnx_ir.save(graph(text, two=np.float32(2)), tmp_path / "model.onnx")
        x = np.array([[0, 1], [1, 0]], np.float32)
        y = np.array([[-np.inf, 0], [0, -np.inf]], np.float32)
        off = ReferenceSamples(feeds={"x": x}, outputs={"y": y, "z": 2 * x * np.float32(1 + 5e-6)})
        assert prove_graph(tmp_path / "model.onnx", [off], EXPORT).largest_difference == pytest.approx(1e-5, rel=0.1)


class TestGradients:
    def off(self, factor: float, noise: float = 0.0) -> ReferenceSamples:
        made = samples()
        outputs = {**made.outputs, "slope": made.outputs["slope"] * np.float32(factor)}
        return replace(made, outputs=outputs, gradients=frozenset({"slope"}), gradient_noise=noise)

    def test_gradients_have_their_own_verdict(self, path: Path) -> None:
        proof = prove_graph(path, [self.off(1 + 3e-5)], EXPORT)
        assert [verdict.step for verdict in proof.verification] == ["export", "export gradient"]
        assert proof.verification[1].relative_l2 == pytest.approx(3e-5, rel=0.1)

    def test_gradients_beyond_their_limit_are_refused(self, path: Path) -> None:
        with pytest.raises(VerificationError):
            prove_graph(path, [self.off(1 + 1e-4)], EXPORT)

    def test_the_limit_of_gradients_is_at_least_their_noise(self, path: Path) -> None:
        proof = prove_graph(path, [self.off(1 + 1e-4, noise=1e-4)], EXPORT)
        assert "noise of fp32" in proof.verification[1].step


DETECTOR = """(float[batch,rows,4] b, float[batch,rows] s, int64[batch,rows] k, int32[batch] n) =>
    (float[batch,rows,4] boxes, float[batch,rows] scores, int64[batch,rows] classes, int32[batch] counts) {
    boxes = Add(b, shift) scores = Identity(s) classes = Identity(k) counts = Identity(n)
}"""


class TestDetections:
    """A graph that returns its inputs, with moved boxes."""

    OUTPUTS = ("boxes", "scores", "classes", "counts")
    TASK = Detection(boxes="boxes", scores="scores", classes="classes", counts="counts")

    def prove(self, folder: Path, source: dict[str, AnyArray], found: dict[str, AnyArray], shift: float = 0.0) -> str:
        onnx_ir.save(graph(DETECTOR, shift=np.float32(shift)), folder / "model.onnx")
        feeds = dict(zip("bskn", (found[name] for name in self.OUTPUTS), strict=True))
        outputs = {name: source[name] for name in self.OUTPUTS}
        sample = ReferenceSamples(feeds=feeds, outputs=outputs, task=self.TASK)
        proof = prove_graph(folder / "model.onnx", [sample], EXPORT)
        assert max(proof.errors.values()) == proof.largest_difference == 0
        return proof.verification[0].verdict

    def tied(self) -> dict[str, AnyArray]:
        outputs = detector_outputs(objects=6)
        return {**outputs, "scores": np.full_like(outputs["scores"], 0.01)}

    def test_tied_detections_in_another_order_are_proven(self, tmp_path: Path) -> None:
        source = detector_outputs()
        source["scores"][:, :2] = 0.9
        swapped = {name: array.copy() for name, array in source.items()}
        swapped["boxes"][:, [0, 1]] = source["boxes"][:, [1, 0]]
        swapped["classes"][:, [0, 1]] = source["classes"][:, [1, 0]]
        assert "detections matched at IoU 0.99: 12/12" in self.prove(tmp_path, source, swapped)

    def test_moved_detections_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(VerificationError, match="the outputs changed"):
            self.prove(tmp_path, detector_outputs(), detector_outputs(), shift=1.0)

    def test_tied_detections_that_differ_are_undecided(self, tmp_path: Path) -> None:
        with pytest.raises(UndecidedError, match=r"nearly the same score.*--weights"):
            self.prove(tmp_path, self.tied(), self.tied(), shift=100.0)

    def test_tied_detections_that_are_equal_are_proven(self, tmp_path: Path) -> None:
        assert "18/18" in self.prove(tmp_path, self.tied(), self.tied())

    def test_no_detections_are_undecided(self, tmp_path: Path) -> None:
        none = {name: np.zeros_like(array) for name, array in detector_outputs().items()}
        with pytest.raises(UndecidedError, match="nothing is detected"):
            self.prove(tmp_path, none, none)


# Samples in batches of any size.


class TestBatches:
    @pytest.mark.parametrize("size", [1, 4, 9])
    def test_batches_of_any_size_give_the_outputs_of_one_run(self, size: int) -> None:
        seen: list[int] = []

        def run(feeds: Any) -> dict[str, AnyArray]:
            seen.append(len(feeds["x"]))
            return {"y": feeds["x"] * 2, "z": feeds["x"].sum(axis=1)}

        x = draw(6, 4)
        found = run_in_batches(run, {"x": x}, size)
        np.testing.assert_array_equal(found["y"], x * 2)
        assert found["z"].shape == (6,)
        assert max(seen) == min(size, 6)
        assert sum(seen) == 6

    @pytest.mark.parametrize("output", [np.zeros((2, 3)), np.zeros(()), np.zeros((1, 6))])
    def test_an_output_with_other_rows_is_refused(self, output: AnyArray) -> None:
        with pytest.raises(ConversionError, match=r"output 'y' has the shape \[.*\] for a batch of 3") as caught:
            run_in_batches(lambda _: {"y": output}, {"x": draw(6, 4)}, 3)
        assert "mixes rows" in caught.value.hint

    def test_an_output_of_varying_shape_is_refused(self) -> None:
        def run(feeds: Any) -> dict[str, AnyArray]:
            return {"y": np.zeros((1, int(feeds["x"][0])))}

        with pytest.raises(ConversionError, match=r"output 'y' depends on the values: \[0\] and \[3\]"):
            run_in_batches(run, {"x": np.array([3, 0])}, 1)
