"""Encoders by task and options; their columns agree with the answers of the client."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from task_outputs import DETECTION, SEGMENTATION, decode_rle, detector_outputs, segmenter_outputs

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.signature import ANY_RANK, Signature, TensorSpec
from graphkiln_backend.graph.task import Detection, Embedding, Ranking, Segmentation, softmax
from graphkiln_backend.images import masks as sampling
from graphkiln_backend.images.answers import read_detections, read_segmentation, read_vector
from graphkiln_backend.images.frame import frame_of
from graphkiln_backend.scoring.encoders import (
    SHAPE,
    Encoder,
    Size,
    all_scores,
    arrow_type,
    best_classes,
    choose_encoder,
    class_maps,
    detections,
    elements,
    graph_ranking,
    raw_outputs,
    vectors,
)
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_client.tasks import rank_scores, read_ranking

LABELS = ("cat", "dog", "cow")


def spec(name: str, *shape: int | str, dtype: DType = DType.FP32) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def scores(dtype: DType = DType.FP32, classes: int | str = 3) -> TensorSpec:
    return spec("y", "batch", classes, dtype=dtype)


def table(encoder: Encoder, outputs: dict[str, AnyArray], sizes: Sequence[Size] = ()) -> pa.Table:
    given = {name: outputs[name] for name in encoder.outputs}
    return pa.table(encoder.encode(given, sizes), schema=encoder.schema)


def rows(encoder: Encoder, outputs: dict[str, AnyArray], sizes: Sequence[Size] = ()) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = table(encoder, outputs, sizes).to_pylist()
    return read


class TestChoice:
    """Columns by task and options."""

    @staticmethod
    def choose(contract: Contract, specs: Sequence[TensorSpec] = (), **wanted: Any) -> Encoder:
        graph = specs or [spec("scores", "batch", 3), spec("vector", "batch", 8), spec("map", "batch", 2, 4, 4)]
        request = ScoreRequest(source="in", model=Path("m"), destination="out", **wanted)
        return choose_encoder(Signature(inputs=(), outputs=tuple(graph)), contract, request)

    RANKING = Contract(ranking=Ranking(scores="scores", indices="vector"))
    MAP = Contract(task=Segmentation(scores="map"), preprocess=Preprocess())

    @pytest.mark.parametrize(
        ("contract", "wanted", "outputs", "columns"),
        [
            (Contract(), {}, ["scores"], ["indices", "scores"]),
            (Contract(labels=("a",) * 8, output="vector"), {}, ["vector"], ["indices", "labels", "scores"]),
            (Contract(), {"scores": True}, ["scores"], ["scores"]),
            (Contract(), {"outputs": ("map", "scores", "map")}, ["map", "scores"], ["map", "scores"]),
            (Contract(task=Embedding(vectors="vector")), {}, ["vector"], ["vector"]),
            (MAP, {}, ["map"], ["height", "width", "segments"]),
            (MAP, {"outputs": ("vector",)}, ["vector"], ["vector"]),
            (RANKING, {"top_k": 2}, ["scores", "vector"], ["indices", "scores"]),
        ],
    )
    def test_columns(self, contract: Contract, wanted: dict[str, Any], outputs: list[str], columns: list[str]) -> None:
        encoder = self.choose(contract, **wanted)
        assert list(encoder.outputs) == outputs
        assert encoder.schema.names == columns

    def test_detections(self) -> None:
        task = Detection(boxes="b", scores="scores", classes="c", counts="n")
        encoder = self.choose(Contract(task=task, preprocess=Preprocess()))
        assert encoder.schema.names == ["boxes", "indices", "scores"]

    @pytest.mark.parametrize(
        ("contract", "wanted", "message"),
        [
            (MAP, {"softmax": True}, r"segmentation, which has no scores of classes \(leave out --scores"),
            (MAP, {"scores": True}, "no scores of classes"),
            (MAP, {"top_k": 3}, "no scores of classes"),
            (Contract(task=Segmentation(scores="map")), {}, "preprocessing"),
            (RANKING, {"softmax": True}, "best classes only"),
            (RANKING, {"scores": True}, "best classes only"),
            (RANKING, {"top_k": 10}, r"returns its best 3 classes only, not 10 \(--top-k 3"),
            (Contract(), {"outputs": ("scores",), "softmax": True}, r"with --softmax \(--scores --softmax"),
            (Contract(), {"outputs": ("vectr",)}, "no output 'vectr'.*vector"),
            (Contract(), {"top_k": 0}, "at least 1"),
        ],
    )
    def test_options_that_do_not_fit_are_refused(
        self, contract: Contract, wanted: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ScoringError, match=message):
            self.choose(contract, **wanted)

    def test_outputs_without_scores_are_refused(self) -> None:
        with pytest.raises(ScoringError, match=r"no scores of classes.*--output"):
            self.choose(Contract(), [spec("map", "batch", 2, 4, 4)])
        with pytest.raises(ScoringError, match="number of classes"):
            self.choose(Contract(), [spec("y", "batch", "classes")], scores=True)


class TestClasses:
    """Best classes and scores of classes."""

    @pytest.mark.parametrize("probabilities", [False, True])
    @pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16, DType.FP64, DType.INT8])
    def test_agrees_with_the_client(self, dtype: DType, probabilities: bool) -> None:
        values = (np.random.default_rng(0).standard_normal((4, 3)) * 9).astype(dtype.numpy)
        values[1, :2] = values[1, 2]  # a tie
        encoder = best_classes(scores(dtype), 2, LABELS, softmax=probabilities)
        for row, found in zip(values, rows(encoder, {"y": values}), strict=True):
            expected = rank_scores(row, 2, LABELS, softmax=probabilities)
            assert found["indices"] == [one.index for one in expected]
            assert found["labels"] == [one.label for one in expected]
            assert found["scores"] == [one.score for one in expected]

    def test_odd_scores_and_missing_labels(self) -> None:
        encoder = best_classes(scores(), 3, ["only"])
        assert rows(encoder, {"y": np.asarray([[np.nan, -np.inf, 1]], np.float32)})[0]["indices"] == [2, 1, 0]
        assert rows(encoder, {"y": np.asarray([[1, 3, 2]], np.float32)})[0]["labels"] == ["", "", "only"]
        one = rows(best_classes(spec("y", "batch"), 5), {"y": np.asarray([0.5, 2], np.float32)})
        assert one == [{"indices": [0], "scores": [0.5]}, {"indices": [0], "scores": [2]}]

    def test_scores_of_another_rank_are_an_error(self) -> None:
        with pytest.raises(ExecutionError, match=r"expected \[rows, classes\].*--output y"):
            rows(best_classes(scores(), 1), {"y": np.zeros((1, 2, 3), np.float32)})

    def test_top_k_of_the_graph_agrees_with_the_client(self) -> None:
        ranking = Ranking(scores="best", indices="which", labels=LABELS)
        outputs: dict[str, AnyArray] = {
            "best": np.asarray([[3, 2, 1], [9, 8, 7]], np.float32),
            "which": np.asarray([[2, 0, 1], [1, 2, 0]]),
        }
        for index, row in enumerate(rows(graph_ranking(ranking, DType.FP32, 2), outputs)):
            expected = read_ranking(outputs["best"][index], outputs["which"][index], 2, LABELS)
            assert row["labels"] == [one.label for one in expected]
            assert row["indices"] == [one.index for one in expected]
            assert row["scores"] == [one.score for one in expected]

    @pytest.mark.parametrize("which", [np.asarray([[-1]]), np.asarray([[0.0]]), np.asarray([[0, 1]])])
    def test_invalid_indices_are_an_error(self, which: AnyArray) -> None:
        encoder = graph_ranking(Ranking(scores="best", indices="which"), DType.FP32, 2)
        with pytest.raises(ExecutionError, match="not class indices"):
            rows(encoder, {"best": np.ones((1, 1), np.float32), "which": which})

    @pytest.mark.parametrize(
        ("dtype", "probabilities", "written"),
        [(DType.FP32, False, pa.float32()), (DType.FP32, True, pa.float64()), (DType.FP16, False, pa.float32())],
    )
    def test_all_scores(self, dtype: DType, probabilities: bool, written: pa.DataType) -> None:
        values = np.asarray([[1, 2, 3], [0, -1, 5]], dtype.numpy)
        found = table(all_scores(scores(dtype), softmax=probabilities), {"y": values}).column("scores")
        assert found.type == pa.list_(written)
        assert found.to_pylist() == (softmax(values) if probabilities else values).tolist()
        with pytest.raises(ExecutionError, match="has 3 scores, expected 4"):
            rows(all_scores(scores(dtype, 4)), {"y": values})


class TestVectors:
    VALUES = np.random.default_rng(4).standard_normal((3, 4)).astype(np.float32)
    NORMALIZED = Embedding(vectors="v", normalize=True)

    @pytest.mark.parametrize("task", [NORMALIZED, Embedding(vectors="v")])
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
    @pytest.mark.parametrize("features", [4, "features"])
    def test_agrees_with_the_client(self, task: Embedding, dtype: Any, features: int | str) -> None:
        values = self.VALUES.astype(dtype)
        found = table(vectors(task, spec("v", "batch", features)), {"v": values}).column("vector")
        assert found.type == pa.list_(pa.float32())
        assert found.to_pylist() == [read_vector(task, {"v": row}).tolist() for row in values]

    def test_invalid_vector_is_an_error(self) -> None:
        with pytest.raises(ExecutionError, match="is not a vector"):
            rows(vectors(self.NORMALIZED, spec("v", "batch", 4)), {"v": self.VALUES[np.newaxis]})
        with pytest.raises(ExecutionError, match="4 features, expected 5"):
            rows(vectors(self.NORMALIZED, spec("v", "batch", 5)), {"v": self.VALUES})


class TestDetections:
    """Detections are written as the client returns them, and read back from Parquet as they were."""

    SPEC = Preprocess(letterbox=Letterbox(size=(224, 224)))
    SIZES = ((60, 224), (448, 100), (31, 77))

    @pytest.fixture
    def found(self) -> dict[str, Any]:
        """Outputs for three images with four, two and no detections."""
        outputs = detector_outputs()
        outputs["counts"][:] = 4, 2, 0
        outputs["keypoints"] = np.random.default_rng(5).uniform(0, 224, (3, 6, 2, 3)).astype(np.float32)
        return outputs

    def test_agrees_with_the_client(self, found: dict[str, Any], tmp_path: Path) -> None:
        rich = replace(DETECTION, keypoints="keypoints")
        pq.write_table(table(detections(rich, LABELS, self.SPEC), found, self.SIZES), tmp_path / "rows.parquet")
        written = pq.read_table(tmp_path / "rows.parquet").to_pylist()
        assert [len(row["boxes"]) for row in written] == [4, 2, 0]
        for index, (row, size) in enumerate(zip(written, self.SIZES, strict=True)):
            sample = {name: values[index] for name, values in found.items()}
            expected = [one.to_dict() for one in read_detections(rich, sample, frame_of(self.SPEC, size), LABELS)]
            keys = {"boxes": "box", "indices": "index", "labels": "label", "scores": "score", "masks": "mask"}
            for column, key in {**keys, "keypoints": "keypoints"}.items():
                assert row[column] == [one[key] for one in expected]

    def test_empty_and_invalid_detections(self, found: dict[str, Any]) -> None:
        encoder = detections(DETECTION, (), self.SPEC)
        found["counts"][:] = 0
        assert table(encoder, found, self.SIZES).column("boxes").to_pylist() == [[], [], []]
        found["counts"][1] = 9
        with pytest.raises(ExecutionError, match="hold no detections"):
            rows(encoder, found, self.SIZES)


class TestClassMaps:
    """Class maps are written as the client returns them, and read back from Parquet as they were."""

    SPEC = Preprocess(resize=40, crop=(32, 32))
    SIZES = ((50, 100), (91, 33))

    @pytest.mark.parametrize("task", [SEGMENTATION, Segmentation(classes="classes")])
    def test_agrees_with_the_client(self, task: Segmentation, tmp_path: Path) -> None:
        outputs = segmenter_outputs()
        outputs["classes"] = outputs["maps"].argmax(axis=1).astype(np.int64)
        labels = ("ground", "box")
        pq.write_table(table(class_maps(task, labels, self.SPEC), outputs, self.SIZES), tmp_path / "rows.parquet")
        written = pq.read_table(tmp_path / "rows.parquet").to_pylist()
        for index, (row, size) in enumerate(zip(written, self.SIZES, strict=True)):
            sample = {name: values[index] for name, values in outputs.items()}
            expected = read_segmentation(task, sample, frame_of(self.SPEC, size), labels)
            assert row == expected.to_dict()
            assert [segment["label"] for segment in row["segments"]] == ["ground", "box", ""]
            for segment in row["segments"]:
                np.testing.assert_array_equal(decode_rle(segment["mask"]), expected.classes == segment["index"])

    def test_memory_holds_the_pixels_of_one_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sampling, "_MOST_VALUES", 1 << 14)  # scores on their way to classes would hide it
        encoder, side = class_maps(SEGMENTATION, (), Preprocess(resize=(32, 32))), 256
        outputs = {"maps": np.repeat(segmenter_outputs()["maps"], 8, axis=0)}

        def peak(count: int) -> int:
            tracemalloc.start()
            encoder.encode({"maps": outputs["maps"][:count]}, [(side, side)] * count)
            found = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return found

        assert peak(16) < 1.5 * peak(1)

    def test_invalid_class_map_is_an_error(self) -> None:
        with pytest.raises(ExecutionError, match="is not a score of each pixel"):
            rows(class_maps(SEGMENTATION, (), self.SPEC), {"maps": np.zeros((2, 3, 4), np.float32)}, self.SIZES)


class TestRawOutputs:
    """Outputs are written unchanged."""

    def test_fixed_shapes(self) -> None:
        values = np.arange(12, dtype=np.float16).reshape(1, 2, 3, 2)
        specs = [spec("map", "batch", 2, 3, 2, dtype=DType.FP16), spec("age", "batch", dtype=DType.INT64)]
        found = table(raw_outputs(specs), {"map": values, "age": np.asarray([7])})
        shape = json.loads(found.schema.field("map").metadata[SHAPE])
        assert found.schema.field("map").type == pa.list_(pa.float16())
        assert np.asarray(found.column("map")[0].as_py()).reshape(shape).tolist() == values[0].tolist()
        assert found.column("age").to_pylist() == [7]

    @pytest.mark.parametrize("shape", [("batch", "?boxes", 4), (ANY_RANK,), ("batch", 0, 4)])
    def test_dynamic_shapes_have_a_shape_column(self, shape: tuple[Any, ...]) -> None:
        encoder = raw_outputs([spec("boxes", *shape)])
        values = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
        found = pa.concat_tables([table(encoder, {"boxes": each}) for each in (values, values[:, :0])])
        assert found.column("boxes_shape").to_pylist() == [[2, 4], [0, 4]]
        assert found.column("boxes").to_pylist() == [values.reshape(-1).tolist(), []]

    def test_output_with_a_reserved_name_is_prefixed(self) -> None:
        assert raw_outputs([spec("id", "batch")], ["id"]).schema.names == ["output:id"]

    @pytest.mark.parametrize("shape", [(4,), ()])
    def test_shape_that_contradicts_the_graph_is_an_error(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ExecutionError, match=r"expected \[4?\] for each row"):
            rows(raw_outputs([spec("vector", "batch", *shape)]), {"vector": np.zeros((2, 5), np.float32)})

    @pytest.mark.parametrize("dtype", [each for each in DType if each not in (DType.BYTES, DType.BF16)])
    def test_numbers_keep_their_type(self, dtype: DType) -> None:
        values = np.asarray([[0, 1], [1, 0], [1, 1]]).astype(dtype.numpy)
        assert elements(values).type == arrow_type(dtype)
        assert elements(values.T).to_pylist() == values.T.reshape(-1).tolist()

    def test_bf16_and_strings(self) -> None:
        values = np.asarray([1.0, 0.1, -3.5], ml_dtypes.bfloat16)
        assert elements(values).to_pylist() == [float(value) for value in values]
        assert elements(np.asarray([["a", b"\xc3\xa9"]], object)).to_pylist() == ["a", "é"]
        with pytest.raises(ExecutionError, match="not UTF-8"):
            elements(np.asarray([b"\xff"], object))
