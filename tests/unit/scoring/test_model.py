"""Models as users have them: converted, dropped in, with and without batches; and those that cannot be scored."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zoo
from onnx import TensorProto, helper
from scored_images import gray, row

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.model import ScoringModel, read_model
from graphkiln_backend.scoring.request import ScoreRequest

SPEC = Preprocess(crop=(4, 4), color="L")
RAW = f'parameters {{ key: "preprocess" value {{ string_value: {json.dumps(SPEC.to_json())} }} }}\n'


def request(model: Path, **wanted: Any) -> ScoreRequest:
    return ScoreRequest(
        source="in", model=model, destination="out", backends=frozenset({"graphkiln", "onnxruntime"}), **wanted
    )


def sums(*shape: int | str, dtype: int = TensorProto.FLOAT) -> Any:
    """Four scores of an image: the sums of its columns."""
    axes = {"axes": np.asarray([-3, -2], np.int64)}
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["wide", "axes"], ["y"], keepdims=0),
    ]
    inputs = [zoo.value("x", shape, dtype)]
    return zoo.model(nodes, inputs, [zoo.value("y", (*shape[:-3], shape[-1]))], axes)


def score(model: ScoringModel, wanted: ScoreRequest, cache: ArtifactCache, values: list[int]) -> pa.Table:
    proven = model.build(cache)
    try:
        with model.scorer(proven, wanted, 1, cache) as scorer:
            return scorer.answer([row(str(value), gray(value)) for value in values]).table
    finally:
        proven.session.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


class TestConverted:
    def test_scores_as_the_version_says(self, digits: Path, cache: ArtifactCache) -> None:
        wanted = request(digits)
        model = read_model(wanted, cache, 1)
        table = score(model, wanted, cache, [0, 128, 255])
        assert table.schema.names == ["id", "indices", "labels", "scores", "model", "version", "error"]
        assert table.column("model").to_pylist() == ["digits"] * 3
        assert table.column("version").to_pylist() == [1] * 3
        assert table.column("error").null_count == 3

    def test_idle_threads_sleep_and_one_session_has_all_cores(self, digits: Path, cache: ArtifactCache) -> None:
        for config in read_model(request(digits), cache, 3).deployment.plan.configs:
            assert (config.spin, config.threads) == (False, 3)

    @pytest.mark.parametrize("numbers", ["data=2", "pipeline=2", "tensor=99"])
    def test_a_worker_computes_the_whole_graph_however_it_is_served(
        self, digits: Path, store: Path, cache: ArtifactCache, numbers: str
    ) -> None:
        """Workers share a machine: all of them would take the cores of the first stage for theirs."""
        shutil.copytree(digits, store / "digits")
        with (store / "digits" / "config.pbtxt").open("a") as file:
            file.write(f'parameters {{ key: "parallel" value {{ string_value: "{numbers}" }} }}\n')
            file.write("instance_group [ { count: 2 kind: KIND_CPU } ]\n")
        wanted = request(store / "digits")
        model = read_model(wanted, cache, 1)
        assert [(config.parallel, config.places) for config in model.deployment.plan.configs] == [(None, ())]
        assert model.configuration(wanted) == read_model(request(digits), cache, 1).configuration(wanted)

    def test_whatever_changes_an_answer_changes_the_configuration(
        self, digits: Path, store: Path, cache: ArtifactCache
    ) -> None:
        shutil.copytree(digits, store / "digits")
        wanted = request(store / "digits")
        first = read_model(wanted, cache, 1).configuration(wanted)
        assert read_model(wanted, cache, 2).configuration(wanted) == first
        assert read_model(request(digits), cache, 1).configuration(wanted) == first
        others = [
            replace(wanted, top_k=3),
            replace(wanted, softmax=True),
            replace(wanted, overrides=(Override("engine", "openvino", "--set"),)),
        ]
        digests = {read_model(other, cache, 1).configuration(other) for other in others}
        with (store / "digits" / "config.pbtxt").open("a") as file:
            file.write('parameters { key: "precision" value { string_value: "bf16" } }')
        digests.add(read_model(wanted, cache, 1).configuration(wanted))
        assert len(digests - {first}) == 4


class TestDroppedIn:
    def test_what_config_pbtxt_says(self, store: Path, cache: ArtifactCache) -> None:
        config = RAW + 'max_batch_size: 4 output { name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "l.txt" }'
        zoo.add(store, "sums", sums("batch", 1, 4, 4), config)
        (store / "sums" / "l.txt").write_text("a\nb\n")
        wanted = request(store / "sums", top_k=3)
        table = score(read_model(wanted, cache, 1), wanted, cache, [255, 0])
        assert table.column("labels").to_pylist() == [["a", "b", ""]] * 2
        assert table.column("scores").to_pylist() == [[4.0] * 3, [0.0] * 3]

    @pytest.mark.parametrize("shape", [(1, 4, 4), (1, 1, 4, 4)])
    def test_without_batches(self, shape: tuple[int, ...], store: Path, cache: ArtifactCache) -> None:
        zoo.add(store, "sums", sums(*shape), f"{RAW}max_batch_size: 0")
        wanted = request(store / "sums", outputs=("y",))
        model = read_model(wanted, cache, 1)
        assert model.image_input.most_rows == 1
        table = score(model, wanted, cache, [51, 255])
        expected = [load_sample(gray(value), SPEC).sum(axis=(0, 1)).tolist() for value in (51, 255)]
        assert table.column("y").to_pylist() == expected

    def test_rows_that_the_graph_mixes_are_computed_one_by_one(self, store: Path, cache: ArtifactCache) -> None:
        axes = {"axes": np.asarray([0], np.int64), "inner": np.asarray([1, 2], np.int64)}
        nodes = [
            helper.make_node("ReduceSum", ["x", "inner"], ["rows"], keepdims=0),
            helper.make_node("ReduceMean", ["rows", "axes"], ["mean"], keepdims=1),
            helper.make_node("Add", ["rows", "mean"], ["y"]),
        ]
        graph = zoo.model(nodes, [zoo.value("x", ("batch", 1, 4, 4))], [zoo.value("y", ("batch", 4))], axes)
        zoo.add(store, "mixed", graph, f"{RAW}max_batch_size: 4")
        wanted = request(store / "mixed", outputs=("y",))
        table = score(read_model(wanted, cache, 1), wanted, cache, [0, 255])
        assert table.column("y").to_pylist() == [[0.0] * 4, [8.0] * 4]

    def test_weights_belong_to_the_configuration(self, store: Path, cache: ArtifactCache) -> None:
        digests = set()
        for number in range(2):
            graph = sums("batch", 1, 4, 4)
            graph.graph.doc_string = str(number)
            zoo.add(store, "sums", graph, f"{RAW}max_batch_size: 4")
            wanted = request(store / "sums")
            digests.add(read_model(wanted, cache, 1).configuration(wanted))
            shutil.rmtree(store / "sums")
        assert len(digests) == 2


class TestRefusals:
    def test_a_spread_model_on_the_command_line(self, digits: Path, cache: ArtifactCache) -> None:
        wanted = request(digits, overrides=(Override("parallel", "pipeline=2", "--set"),))
        with pytest.raises(ScoringError, match=r"each worker of a run computes the whole graph.*--workers"):
            read_model(wanted, cache, 2)

    def test_nobody_knows_how_an_image_becomes_its_input(self, store: Path, cache: ArtifactCache) -> None:
        zoo.add(store, "sums", sums("batch", 1, 4, 4), "max_batch_size: 4")
        with pytest.raises(ScoringError, match="does not say how an image becomes its input") as raised:
            read_model(request(store / "sums"), cache, 1)
        assert "graphkiln convert --preprocess JSON" in raised.value.hint

    def test_answers_that_depend_on_earlier_requests(self, store: Path, cache: ArtifactCache) -> None:
        config = f"{RAW}max_batch_size: 4 sequence_batching {{ }}"
        zoo.add(store, "sums", sums("batch", 1, 4, 4), config)
        with pytest.raises(ScoringError, match="depend on earlier requests"):
            read_model(request(store / "sums"), cache, 1)

    def test_an_input_that_images_do_not_become(self, store: Path, cache: ArtifactCache) -> None:
        zoo.add(store, "sums", sums("batch", 1, 4, 4, dtype=TensorProto.UINT8), f"{RAW}max_batch_size: 4")
        with pytest.raises(ScoringError, match="they are FP32, it is x UINT8"):
            read_model(request(store / "sums"), cache, 1)
