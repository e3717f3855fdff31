"""Functions of batches: the answers of a worker, in columns and tables of Arrow, NumPy, pandas, Polars and Daft."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from scoring_runs import REPOSITORY, make_images, make_request, results

from graphkiln.scoring import ScoringFunction, udf
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError
from graphkiln_backend.scoring import loaded_model
from graphkiln_backend.scoring.errors import ScoringError, WorkerUnfit
from graphkiln_backend.scoring.loaded_model import LoadedModel, Prover, shared_models
from graphkiln_backend.scoring.messages import Attempt
from graphkiln_backend.scoring.worker import Worker

ROWS, BAD = 12, 4
MODEL = REPOSITORY / "model_repository" / "digits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("source") / "images", ROWS, {BAD: b"no image"})


@pytest.fixture(scope="module")
def images(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache, so that all sessions compute batches of the same size."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def classify(cache: Path) -> Iterator[ScoringFunction]:
    with udf(MODEL, cache=cache, cores_per_worker=1) as function:
        yield function


@pytest.fixture(scope="module")
def scored(folder: Path, cache: Path) -> list[dict[str, Any]]:
    """What a worker of `graphkiln score` writes."""
    out = folder.parent / "out"
    out.mkdir()
    with Worker(make_request(folder, out, rows_per_unit=100, cache=cache)) as worker:
        (unit,) = [each.unit("configuration") for each in worker._source.ranges(100)]
        worker.commit(worker.compute(Attempt(number=1, unit=unit)))
    return results(out).drop_columns("id").to_pylist()


def as_arrow(images: list[bytes]) -> Any:
    return pa.chunked_array([pa.array(images[:5]), pa.array(images[5:], pa.binary())])


def as_objects(images: list[bytes]) -> Any:
    return np.array(images, dtype=object)


def as_pandas(images: list[bytes]) -> Any:
    import pandas as pd

    return pd.Series(images)


def as_structs(images: list[bytes]) -> Any:
    return pa.array([{"bytes": image, "path": None} for image in images])


@pytest.mark.parametrize("make", [as_arrow, as_objects, as_pandas, as_structs, list], ids=lambda make: make.__name__)
def test_answers_are_those_of_a_worker(
    make: Callable[[list[bytes]], Any], classify: ScoringFunction, images: list[bytes], scored: list[dict[str, Any]]
) -> None:
    answers = classify(make(images))
    assert answers.type == classify.type
    assert answers.to_pylist() == scored
    assert [row["error"] is None for row in scored] == [row != BAD for row in range(ROWS)]
    assert answers[BAD].as_py()["indices"] is None


def test_paths_are_read(classify: ScoringFunction, folder: Path, scored: list[dict[str, Any]]) -> None:
    paths = [str(path) for path in sorted(folder.iterdir())]
    assert classify(pa.array([*paths, str(folder / "none.png")])).to_pylist()[:-1] == scored
    assert "none.png" in classify(pa.array([str(folder / "none.png")]))[0].as_py()["error"]


def pixels_of(images: list[bytes]) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(Image.open(io.BytesIO(image))) for image in images])


def as_tensor(pixels: np.ndarray[Any, Any]) -> Any:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)


def as_lists(pixels: np.ndarray[Any, Any]) -> Any:
    import polars

    return polars.Series("pixels", pixels)


def as_array(pixels: np.ndarray[Any, Any]) -> Any:
    return pixels


def as_daft(pixels: np.ndarray[Any, Any]) -> Any:
    import daft

    return daft.Series.from_pylist(list(pixels))


@pytest.mark.parametrize("make", [as_array, list, as_tensor, as_lists, as_daft], ids=lambda make: make.__name__)
def test_pixels_are_as_good_as_encoded_images(
    make: Callable[[Any], Any], classify: ScoringFunction, images: list[bytes]
) -> None:
    good = [image for row, image in enumerate(images) if row != BAD]
    answers = classify(make(pixels_of(good)))
    rows = answers.to_list() if hasattr(answers, "to_list") else answers.to_pylist()
    assert rows == classify(good).to_pylist()


@pytest.mark.parametrize("image_column", ["", "photo"])
def test_tables_keep_their_columns(
    image_column: str, cache: Path, images: list[bytes], scored: list[dict[str, Any]]
) -> None:
    function = udf(MODEL, cache=cache, cores_per_worker=1, image_column=image_column)
    table = pa.table({"sku": range(ROWS), "photo": images})
    for batch in (table, table.to_batches()[0]):
        found = function(batch)
        assert type(found) is type(batch)
        assert found.schema.names == ["sku", "photo", *function.schema.names]
        assert found.select(function.schema.names).to_pylist() == scored
    arrays = function({"sku": np.arange(ROWS), "photo": as_objects(images)})
    assert arrays["sku"].tolist() == list(range(ROWS))
    assert arrays["error"].tolist() == [row["error"] for row in scored]
    assert arrays["scores"][0].tolist() == scored[0]["scores"]
    assert arrays["scores"][BAD] is None
    function.close()


def test_column_of_a_struct(cache: Path, images: list[bytes], scored: list[dict[str, Any]]) -> None:
    with udf(MODEL, cache=cache, cores_per_worker=1, image_column="data.jpeg") as function:
        table = function(pa.table({"data": [{"jpeg": image} for image in images]}))
    assert table.select(function.schema.names).to_pylist() == scored


def test_empty_batches_need_no_session(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "LoadedModel", None)
    function = udf(MODEL, cache=cache)
    assert function([]).type == function.type
    assert function(pa.table({"i": pa.array([], pa.binary())})).schema.names == ["i", *function.schema.names]
    batch = pa.RecordBatch.from_pydict({"i": pa.array([], pa.binary())})
    assert function(batch).schema.names == ["i", *function.schema.names]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1.5]), "images of double"),
        (pa.array([[1, 2]]), r"images of list<.*int64>"),
        (pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), "images of fixed_size_list"),
        (np.zeros((2, 8, 8, 3), np.float32), r"images of float32\[2, 8, 8, 3\].* uint8 pixels"),
        (np.zeros((2, 8), np.uint8), r"images of uint8\[2, 8\]"),
        ([np.zeros((8, 8), np.int16)], r"images of int16\[8, 8\]"),
        (np.array([b"\xff\xd8\x00"]), r"S3, from which NumPy removes zeros.*dtype=object"),
        ([7], "images of int"),
        (pa.table({"a": [b"x"], "b": [b"y"]}), "2 columns of image bytes"),
        (pa.table({"a": [1]}), "no column of image bytes"),
        (pa.table({"a": [b"x"], "labels": [1]}), "both have a column 'labels'"),
        ({"a": np.arange(3)}, "no array of images.*image_column"),
    ],
)
def test_batches_without_images_are_refused(column: Any, message: str, classify: ScoringFunction) -> None:
    with pytest.raises(ScoringError, match=message):
        classify(column)


@pytest.mark.parametrize(
    ("value", "reason"), [(None, "has no image"), (float("nan"), "has no image"), (np.zeros((2, 2, 7), np.uint8), "7")]
)
def test_single_wrong_values_are_errors_of_their_rows(
    value: Any, reason: str, classify: ScoringFunction, images: list[bytes]
) -> None:
    first, second = classify([images[0], value]).to_pylist()
    assert first["error"] is None
    assert reason in second["error"]
    assert second["scores"] is None


def test_missing_column_is_named(cache: Path) -> None:
    function = udf(MODEL, cache=cache, image_column="foto")
    for batch in (pa.table({"photo": [b"x"]}), {"photo": as_objects([b"x"])}):
        with pytest.raises(ScoringError, match="foto"):
            function(batch)


def test_error_is_raised_if_requested(cache: Path, images: list[bytes]) -> None:
    with udf(MODEL, cache=cache, cores_per_worker=1, on_error="raise") as function:
        assert len(function(images[:BAD])) == BAD
        with pytest.raises(ScoringError, match=f"row {BAD} of a batch of {ROWS} .*not an image in a known format"):
            function(images)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"on_error": "ignore"}, ScoringError, "'null' or 'raise'"),
        ({"top_k": 0}, ScoringError, "top-k 0"),
        ({"outputs": "none"}, ScoringError, "no output 'none'"),
        ({"scores": True, "top_k": 2}, ScoringError, "contradict"),
        ({"workers": 2}, TypeError, "'workers'"),
    ],
)
def test_invalid_options_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        udf(MODEL, **options)


def test_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphkilnError, match="none"):
        udf(tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "names"), [({"softmax": True, "top_k": 2}, "scores"), ({"outputs": "OUTPUT_0"}, "OUTPUT_0")]
)
def test_options_have_the_meaning_of_score(options: Any, names: str, cache: Path, folder: Path, tmp_path: Path) -> None:
    with udf(MODEL, cache=cache, cores_per_worker=1, **options) as function:
        answers = function(list(map(str, sorted(folder.iterdir()))))
    renamed = {name: (value,) if name == "outputs" else value for name, value in options.items()}
    with Worker(make_request(folder, tmp_path, rows_per_unit=100, cache=cache, **renamed)) as worker:
        (unit,) = [each.unit("configuration") for each in worker._source.ranges(100)]
        table = worker.compute(Attempt(number=1, unit=unit)).scored.table
    assert answers.to_pylist() == table.drop_columns("id").to_pylist()
    assert len(answers[0].as_py()[names]) == (2 if "top_k" in options else 10)


class TestPolarsAndDaft:
    def test_expression_of_polars(
        self, classify: ScoringFunction, images: list[bytes], scored: list[dict[str, Any]]
    ) -> None:
        import polars

        frame = polars.DataFrame({"image": [*images, None]}).with_columns(answer=classify.polars("image"))
        assert frame["answer"].to_list()[:-1] == scored
        assert frame["answer"].to_list()[-1]["error"] == "the row has no image"
        column = polars.col("image")
        lazy = polars.LazyFrame({"image": images}).select(classify.polars(column).alias("a")).unnest("a")
        assert lazy.collect_schema().names() == classify.schema.names
        assert lazy.collect(engine="streaming").to_dicts() == scored

    def test_column_of_daft(self, classify: ScoringFunction, images: list[bytes], scored: list[dict[str, Any]]) -> None:
        import daft

        frame = daft.from_pydict({"image": images})
        answers = frame.select(classify.daft(frame["image"], batch_size=5).alias("answer"))
        assert answers.to_pydict()["answer"] == scored

    def test_wrong_column_names_its_type(self, classify: ScoringFunction) -> None:
        import polars

        with pytest.raises(ScoringError, match="images of int64"):
            polars.DataFrame({"image": [1]}).select(classify.polars("image"))


class TestSessions:
    def test_pickled_function_holds_no_session(
        self, classify: ScoringFunction, images: list[bytes], scored: list[dict[str, Any]]
    ) -> None:
        classify(images)
        content = pickle.dumps(classify)
        assert len(content) < 2000
        assert copied(classify)(images).to_pylist() == scored

    def test_threads_share_one_session(
        self, cache: Path, images: list[bytes], scored: list[dict[str, Any]], loads: list[LoadedModel]
    ) -> None:
        function = udf(MODEL, cache=cache, cores_per_worker=1)
        assert loads == []
        with ThreadPoolExecutor(4) as pool:
            copies = [copied(function) for _ in range(8)]
            found = list(pool.map(lambda copy: copy(images).to_pylist(), copies))
        assert found == [scored] * 8
        assert len(loads) == 1
        function.close()
        assert not loads[0]._held._exit_callbacks, "closed"  # type: ignore[attr-defined]
        assert len(copies[0](images)) == ROWS, "loaded again"
        assert len(loads) == 2
        function.close()

    def test_session_is_closed_after_its_last_call(
        self, cache: Path, images: list[bytes], loads: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        function = udf(MODEL, cache=cache, cores_per_worker=1)
        function(images)
        (model,) = loads
        inside, go_on = threading.Event(), threading.Event()
        answer = model.scorer.answer

        def slow(*arguments: Any) -> Any:
            inside.set()
            go_on.wait(60)
            return answer(*arguments)

        monkeypatch.setattr(model.scorer, "answer", slow)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(function, images)
            assert inside.wait(60)
            function.close()
            go_on.set()
            assert len(running.result()) == ROWS
        assert model.scorer._reader._decoding._shutdown

    def test_golden_samples_are_replayed(
        self, cache: Path, images: list[bytes], loads: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After every hundred rows; a session that no longer computes them is built anew."""
        proven: list[int] = []

        def prove(_: Prover, __: float, rows: int) -> None:
            proven.append(rows)
            if len(proven) == 2:
                raise WorkerUnfit("it no longer computes the golden samples")

        monkeypatch.setattr(Prover, "prove", prove)
        function = udf(MODEL, cache=cache, cores_per_worker=1)
        for _ in range(9):
            function(images)
        assert proven == [9 * ROWS]
        with pytest.raises(WorkerUnfit):
            function(images * 9)
        assert len(function(images)) == ROWS
        assert len(loads) == 2
        function.close()

    def test_wrong_session_answers_nothing(
        self, cache: Path, images: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise ExecutionError("wrong numbers")

        monkeypatch.setattr(loaded_model, "Prover", fail)
        function = udf(MODEL, cache=cache, cores_per_worker=1)
        with pytest.raises(ExecutionError, match="wrong numbers"):
            function(images)

    def test_another_model_is_refused(self, classify: ScoringFunction, images: list[bytes]) -> None:
        function = replace(classify, configuration="made from another version")
        with pytest.raises(ScoringError, match="differs from the model of the driver"):
            function(images)
        assert len(_models()) <= 1

    def test_forked_process_loads_its_own(self, classify: ScoringFunction, images: list[bytes]) -> None:
        expected = classify(images).to_pylist()
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)
        child = context.Process(target=lambda: sending.send((classify(images).to_pylist(), len(_models()))))
        child.start()
        assert receiving.poll(120)
        assert receiving.recv() == (expected, 1)
        child.join(60)
        assert child.exitcode == 0
        assert classify(images).to_pylist() == expected


def copied(function: ScoringFunction) -> ScoringFunction:
    copy: ScoringFunction = pickle.loads(pickle.dumps(function))  # noqa: S301 - our own
    return copy


def _models() -> Any:
    return shared_models()._models


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoadedModel]]:
    """Models that were loaded during the test."""
    found: list[LoadedModel] = []

    class Seen(LoadedModel):
        def __init__(self, request: Any) -> None:
            super().__init__(request)
            found.append(self)

    shared_models().close()
    monkeypatch.setattr(loaded_model, "LoadedModel", Seen)
    yield found
    shared_models().close()


def test_end_of_the_process_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    program = (
        "from graphkiln.scoring import udf; import sys; "
        f"udf({str(MODEL)!r}, cores_per_worker=1)([{str(folder / '00000.png')!r}]); "
        "print(*sorted({'ray', 'polars', 'daft', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr) == ([], "")
    assert list(tmp_path.iterdir()) == []
