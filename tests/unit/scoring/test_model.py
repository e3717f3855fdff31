"""Models of a run: converted, copied into a store, with and without batches, refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, RepositoryError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.lowering.artifacts import Measurement
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.scoring import model as model_fetch
from graphkiln_backend.scoring import model as module
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.model import (
    ScoringModel,
    choose_batch_size,
    measure_sizes,
    read_model,
    read_run_model,
    with_local_model,
    with_version,
)
from graphkiln_backend.storage.address import RemoteAddress

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
    proven = model.deployment.build(cache)
    try:
        with model.scorer(proven, wanted, 1, cache) as scorer:
            return scorer.answer([row(str(value), gray(value)) for value in values]).table
    finally:
        proven.session.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


class TestConverted:
    def test_scores_use_the_contract_of_the_version(self, digits: Path, cache: ArtifactCache) -> None:
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
    def test_worker_computes_the_whole_graph_of_a_spread_model(
        self, digits: Path, store: Path, cache: ArtifactCache, numbers: str
    ) -> None:
        shutil.copytree(digits, store / "digits")
        with (store / "digits" / "config.pbtxt").open("a") as file:
            file.write(f'parameters {{ key: "parallel" value {{ string_value: "{numbers}" }} }}\n')
            file.write("instance_group [ { count: 2 kind: KIND_CPU } ]\n")
        wanted = request(store / "digits")
        model = read_model(wanted, cache, 1)
        assert [(config.parallel, config.places) for config in model.deployment.plan.configs] == [(None, ())]
        assert model.configuration(wanted) == read_model(request(digits), cache, 1).configuration(wanted)

    def test_configuration_depends_on_everything_that_changes_an_answer(
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

    @pytest.mark.parametrize(
        ("options", "digest"),
        [
            ({}, "08f388366071d75a"),
            ({"top_k": 3}, "7ef3d186bfeac5ac"),
            ({"softmax": True}, "07c65df0afe8257e"),
            ({"outputs": ("OUTPUT_0",)}, "1802d2c285923e92"),
            (
                {"keep_columns": ("a", "b"), "image_column": "i", "id_column": "k"},
                "22fcaa67f55224b2",
            ),
            ({"overrides": (Override("engine", "openvino", "--set"),)}, "86a6beb5fa0e6a86"),
            ({"overrides": (Override("precision", "bf16", "--set"),)}, "67dce4ed45cc8888"),
        ],
    )
    def test_runs_of_earlier_releases_are_resumed(
        self, digits: Path, cache: ArtifactCache, options: dict[str, Any], digest: str
    ) -> None:
        """The digests are those of the commit df8567b4: with others, its unfinished runs would be refused."""
        wanted = request(digits, **options)
        assert read_model(wanted, cache, 1).configuration(wanted) == digest


class TestDroppedIn:
    def test_config_pbtxt_is_used(self, store: Path, cache: ArtifactCache) -> None:
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
        assert model.image_input.max_rows == 1
        table = score(model, wanted, cache, [51, 255])
        expected = [load_sample(gray(value), SPEC).sum(axis=(0, 1)).tolist() for value in (51, 255)]
        assert table.column("y").to_pylist() == expected

    def test_mixed_rows_are_computed_one_by_one(self, store: Path, cache: ArtifactCache) -> None:
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


class TestRefusals:
    def test_spread_model_is_refused_on_the_command_line(self, digits: Path, cache: ArtifactCache) -> None:
        wanted = request(digits, overrides=(Override("parallel", "pipeline=2", "--set"),))
        with pytest.raises(ScoringError, match=r"each worker of a run computes the whole graph.*--workers"):
            read_model(wanted, cache, 2)

    def test_unknown_preprocessing_is_refused(self, store: Path, cache: ArtifactCache) -> None:
        zoo.add(store, "sums", sums("batch", 1, 4, 4), "max_batch_size: 4")
        with pytest.raises(ScoringError, match="preprocessing") as raised:
            read_model(request(store / "sums"), cache, 1)
        assert "graphkiln convert --preprocess JSON" in raised.value.hint

    def test_sequence_model_is_refused(self, store: Path, cache: ArtifactCache) -> None:
        config = f"{RAW}max_batch_size: 4 sequence_batching {{ }}"
        zoo.add(store, "sums", sums("batch", 1, 4, 4), config)
        with pytest.raises(ScoringError, match="depend on earlier requests"):
            read_model(request(store / "sums"), cache, 1)

    def test_input_of_another_dtype_is_refused(self, store: Path, cache: ArtifactCache) -> None:
        zoo.add(store, "sums", sums("batch", 1, 4, 4, dtype=TensorProto.UINT8), f"{RAW}max_batch_size: 4")
        with pytest.raises(ScoringError, match="they are FP32, it is x UINT8"):
            read_model(request(store / "sums"), cache, 1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for version in ("2", "10"):
        (tmp_path / "store" / "m" / version).mkdir(parents=True)
    return tmp_path / "store" / "m"


@pytest.fixture
def fetched(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests to the remote store, which has the same model."""
    asked: list[str] = []

    def fetch(address: RemoteAddress, _: Path) -> Path:
        asked.append(f"{address} {address.root}")
        name = address.root.rpartition("/")[2]
        return model / name if name.isdigit() else model

    monkeypatch.setattr(model_fetch, "fetch_model", fetch)
    return asked


def request_of_model_fetch(model: Path | str, version: int | None = None) -> ScoreRequest:
    return ScoreRequest(source="photos", destination="answers", model=model, version=version)


def test_newest_version_is_pinned(model: Path, tmp_path: Path) -> None:
    found = with_local_model(request_of_model_fetch(model), tmp_path)
    assert (found.model, found.version) == (model, 10)
    assert with_local_model(request_of_model_fetch(model, 2), tmp_path).version == 2


def test_missing_version_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"model 'm' has no version 7 \(it has 2, 10\)"):
        with_local_model(request_of_model_fetch(model, 7), tmp_path)


def test_remote_model_is_fetched(
    fetched: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch.RemoteFiles, "list", lambda _: ["2/model.onnx", "10/model.onnx"])
    newest = with_local_model(request_of_model_fetch("s3://bucket/store/m"), tmp_path)
    named = with_local_model(request_of_model_fetch("s3://bucket/store/m", 2), tmp_path)
    assert fetched == [f"s3://bucket/store/m/{number} bucket/store/m/{number}" for number in (10, 2)]
    assert [(each.model, each.version) for each in (newest, named)] == [(model, 10), (model, 2)]


def test_with_version_only_lists_a_remote_store(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["config.pbtxt", "2/model.onnx", "10/model.onnx", "old/model.onnx"]
    monkeypatch.setattr(model_fetch.RemoteFiles, "list", lambda _: listed)
    assert with_version(request_of_model_fetch("s3://bucket/store/m")).version == 10
    listed[:] = ["config.pbtxt"]
    with pytest.raises(RepositoryError, match="no model at s3://bucket/store/m"):
        with_version(request_of_model_fetch("s3://bucket/store/m"))


CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="")


class Timed:
    """Session with a given duration per batch.

    Args:
        row_s: Seconds of a row by batch size.
        most: It fails at larger batches.
    """

    def __init__(self, row_s: dict[int, float], most: int = 100) -> None:
        self.row_s, self.most, self.now_s, self.runs = row_s, most, 0.0, 0
        self.signature = Signature(inputs=(TensorSpec(name="x", dtype=DType.FP32, shape=("batch", 1)),), outputs=())

    def run(self, feeds: Mapping[str, AnyArray], _: Sequence[str] | None = None) -> dict[str, AnyArray]:
        size = len(feeds["x"])
        if size > self.most:
            raise ExecutionError("too large")
        self.runs += 1
        self.now_s += size * self.row_s[size]
        return {}

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    session = Timed({1: 2.0, 2: 1.0, 4: 0.99, 8: 1.5})
    monkeypatch.setattr(module, "time", session)
    return session


def test_smallest_of_equally_fast_sizes_is_chosen(timed: Any) -> None:
    measured = measure_sizes(timed, [1, 2, 4, 8], SyntheticInputs())
    assert measured.chosen == "2"
    assert measured.rates == {"1": 0.5, "2": 1.0, "4": 1.01, "8": 0.6667}


def test_time_between_batches_counts(timed: Any) -> None:
    timed.row_s = dict.fromkeys((1, 2, 4, 8), 0.03)
    assert measure_sizes(timed, [1, 2, 4, 8], SyntheticInputs()).chosen == "4"


def test_only_short_runs_are_repeated(timed: Any) -> None:
    """Long ones take the time of many images, at each first start of a model."""
    measure_sizes(timed, [1, 2, 4, 8], SyntheticInputs())
    assert timed.runs == 4
    timed.runs, timed.row_s = 0, {1: 0.1, 2: 0.1, 4: 0.1, 8: 0.1}
    measure_sizes(timed, [1, 2, 4, 8], SyntheticInputs())
    assert timed.runs == 2 * 3 + 2


def test_failing_sizes_are_not_chosen(timed: Any) -> None:
    timed.most = 1
    assert measure_sizes(timed, [1, 2, 4], SyntheticInputs()).chosen == "1"
    timed.most = 0
    assert measure_sizes(timed, [1, 2, 4], SyntheticInputs()).rates == {}


class Memory:
    """Artifacts that store one choice."""

    value: Measurement | None = None
    conditions: Mapping[str, str]

    @contextmanager
    def recall_choice(self, _: object, conditions: Mapping[str, str]) -> Iterator[Memory]:
        self.conditions = conditions
        yield self

    def keep(self, value: Measurement) -> None:
        self.value = value


def test_measurement_is_stored(timed: Any) -> None:
    memory: Any = Memory()
    assert choose_batch_size(memory, timed, CONFIG, [1, 2, 4], SyntheticInputs()) == 2
    assert "threads" in memory.conditions
    runs = timed.runs
    assert choose_batch_size(memory, timed, CONFIG, [1, 2, 4], SyntheticInputs()) == 2
    assert timed.runs == runs


def request_of_run_model(model: Path) -> ScoreRequest:
    return ScoreRequest(source="a", destination="b", model=str(model), backends=frozenset({"graphkiln"}))


def test_driver_pins_the_version(digits: Path, tmp_path: Path) -> None:
    found, _ = read_run_model(request_of_run_model(digits), tmp_path)
    assert (found.version, found.model) == (1, str(digits))


@pytest.mark.parametrize(("columns", "name"), [({}, "labels"), ({"scores": True}, "scores")])
def test_driver_refuses_a_kept_column_named_like_an_output(
    digits: Path, tmp_path: Path, columns: dict[str, Any], name: str
) -> None:
    taken = replace(request_of_run_model(digits), keep_columns=("price", name), **columns)
    with pytest.raises(ScoringError, match=f"column '{name}'"):
        read_run_model(taken, tmp_path)
