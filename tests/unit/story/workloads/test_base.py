"""Predictions as they are kept and joined, and images as they become inputs."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from graphkiln.story.workloads.base import (
    Predictions,
    flatten_gradients,
    load_batch,
    parameter_gradients_of,
)
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess

SPEC = Preprocess(resize=2, crop=(2, 2))


def jpeg(gray: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4), gray).save(file, "JPEG", quality=95)
    return file.getvalue()


class TestPredictions:
    def test_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        generator = np.random.default_rng(0)
        written = Predictions(
            scores=generator.normal(size=(3, 10)).astype(np.float32),
            gradients=generator.normal(size=(3, 3, 2, 2)).astype(np.float32),
            noise=1.5e-7,
        )
        written.write(tmp_path / "reference.npz")
        read = Predictions.read(tmp_path / "reference.npz")
        np.testing.assert_array_equal(read.scores, written.scores)
        assert read.scores.dtype == np.float32
        assert read.gradients is not None
        np.testing.assert_array_equal(read.gradients, written.gradients)
        assert (read.noise, read.indices) == (1.5e-7, None)

    def test_without_gradients_stay_without(self, tmp_path: Path) -> None:
        Predictions(scores=np.zeros((1, 2))).write(tmp_path / "reference.npz")
        assert Predictions.read(tmp_path / "reference.npz").gradients is None

    def test_of_several_runs_are_joined_in_order(self) -> None:
        runs = [
            {"OUTPUT_0": np.full((rows, 2), value), "OUTPUT_1": np.full((rows, 3), -value), "other": np.zeros(rows)}
            for rows, value in ((1, 1.0), (2, 2.0))
        ]
        joined = Predictions.concatenate(runs)
        assert joined.scores.tolist() == [[1, 1], [2, 2], [2, 2]]
        assert joined.gradients is not None
        assert joined.gradients.shape == (3, 3)
        assert joined.indices is None

    def test_of_a_ranking_have_indices(self) -> None:
        runs = [{"OUTPUT_0": np.array([[0.9, 0.1]]), "INDEX_0": np.array([[7, 3]])}] * 2
        joined = Predictions.concatenate(runs)
        assert joined.indices is not None
        assert joined.indices.tolist() == [[7, 3], [7, 3]]
        assert joined.gradients is None

    def test_without_scores_are_an_error(self) -> None:
        with pytest.raises(KeyError, match="OUTPUT_0"):
            Predictions.concatenate([{"scores": np.zeros((1, 2))}])


class TestLoadBatch:
    def test_one_image_and_several_are_the_same(self) -> None:
        jpegs = [jpeg(0), jpeg(128), jpeg(255)]
        several = load_batch(jpegs, SPEC)
        assert (several.shape, several.dtype) == ((3, 3, 2, 2), np.float32)
        for row, one in enumerate(jpegs):
            np.testing.assert_array_equal(load_batch([one], SPEC)[0], several[row])
        assert several[:, 0, 0, 0] == pytest.approx([0, 128 / 255, 1], abs=0.01)

    def test_no_image_is_an_error(self) -> None:
        with pytest.raises(InvalidInput):
            load_batch([b"not a JPEG"], SPEC)


class TestGradients:
    def test_stand_in_the_order_of_their_names(self) -> None:
        gradients = {"b": np.array([[3.0, 4.0]]), "a": np.array([1.0, 2.0])}
        assert flatten_gradients(gradients).tolist() == [1, 2, 3, 4]

    def test_of_a_saved_step_are_those_of_the_same_parameters(self) -> None:
        """By name, not by the order of the graph's outputs: `b.weight` and `b` sort otherwise with their suffix."""
        eager = {"b": np.array([1.0]), "b.weight": np.array([2.0]), "a": np.array([0.0])}
        outputs = {f"{name}_gradient": array for name, array in reversed(eager.items())}
        saved = parameter_gradients_of({"OUTPUT_0": np.zeros((1, 2)), **outputs})
        np.testing.assert_array_equal(saved, flatten_gradients(eager))
        np.testing.assert_array_equal(saved, [0, 1, 2])
