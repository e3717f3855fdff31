"""`graphkiln infer`: tensors from files, standard input and JSON; outputs on the terminal and in files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import FakeClient, RunVerb

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ServerError

SAMPLE = np.arange(4, dtype=np.float32).reshape(1, 2, 2)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "a=b.npy"
    np.save(path, SAMPLE)
    return path


@pytest.fixture
def feed(run: RunVerb, client: FakeClient) -> Any:
    """Send one `--input` to a model with an input `x` of a type and shape; return the tensor or the error."""

    def send(text: str, dtype: DType = DType.FP32, *shape: int) -> Any:
        client.fake_model.inputs = [{"name": "x", "datatype": dtype.value, "shape": list(shape)}]
        finished = run("infer", "--model", "m", "--input", text)
        assert finished.code in (0, 2), finished.err
        return finished.err if finished.code else client.fake_model.fed[-1]["x"]

    return send


class TestFiles:
    def test_arrays_and_standard_input(
        self, run: RunVerb, client: FakeClient, sample: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = io.BytesIO()
        np.save(file, np.array([b"ab", b"c"]))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.getvalue())))
        assert run("infer", "--model", "m", "--input", f"X={sample}", "--input", "T=-").code == 0
        (feeds,) = client.fake_model.fed
        np.testing.assert_array_equal(feeds["X"], SAMPLE)
        assert feeds["T"].tolist() == [b"ab", b"c"]

    def test_archive_has_all_inputs(self, run: RunVerb, client: FakeClient, tmp_path: Path) -> None:
        archive = tmp_path / "x.npz"
        np.savez(archive, a=np.zeros(1), b=np.ones(2))
        assert run("infer", "--model", "m", "--input", archive).code == 0
        assert {name: len(array) for name, array in client.fake_model.fed[0].items()} == {"a": 1, "b": 2}
        assert "gives 'b' twice" in run("infer", "--model", "m", "--input", archive, "--input", "b=[1]").err
        refused = run("infer", "--model", "m", "--input", f"X={archive}").err
        assert "holds several arrays" in refused
        assert "one .npy file for each input" in refused

    @pytest.mark.usefixtures("client")
    def test_pickled_objects_are_refused(self, run: RunVerb, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
        finished = run("infer", "--model", "m", "--input", f"X={tmp_path / 'x.npy'}")
        assert (finished.code, "is not an .npy file of numbers or strings" in finished.err) == (2, True)

    def test_existing_file_precedes_json(self, feed: Any, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(sample.parent)
        sample.rename("3")
        assert feed("x=3").shape == SAMPLE.shape


class TestJson:
    @pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype not in (DType.BYTES, DType.BOOL)])
    def test_numbers_get_the_declared_type(self, feed: Any, dtype: DType) -> None:
        array = feed("x=[[1,2,3]]", dtype, -1, 3)
        assert array.dtype == dtype.numpy
        assert array.tolist() == [[1, 2, 3]]

    @pytest.mark.parametrize(
        ("text", "dtype", "values"),
        [
            ('["a=b", "\u00e4"]', DType.BYTES, [b"a=b", "\u00e4".encode()]),
            ("[true, false]", DType.BOOL, [True, False]),
            ("[Infinity, -1.5e3]", DType.BF16, [float("inf"), -1504.0]),
        ],
    )
    def test_strings_booleans_and_infinity(self, feed: Any, text: str, dtype: DType, values: list[Any]) -> None:
        assert feed(f"x={text}", dtype, -1).tolist() == values

    @pytest.mark.parametrize(
        ("text", "declared", "shape"),
        [
            ("3", (-1, 1), (1, 1)),
            ("3", (), ()),
            ("[1, 2, 3]", (-1, 3), (1, 3)),
            ("[[1, 2], [3, 4]]", (1, 1, 2, 2), (1, 1, 2, 2)),
            ("[[], []]", (-1, -1), (2, 0)),
        ],
    )
    def test_leading_dimensions_may_be_omitted(self, feed: Any, text: str, declared: Any, shape: Any) -> None:
        assert feed(f"x={text}", DType.INT32, *declared).shape == shape

    @pytest.mark.parametrize(("text", "declared"), [("3", (2,)), ("[[1, 2, 3]]", (3,)), ("[]", (-1, 2))])
    def test_wrong_shape(self, feed: Any, text: str, declared: Any) -> None:
        refused = feed(f"x={text}", DType.INT32, *declared)
        assert f"but the model expects {list(declared)} (-1: any size)" in refused

    @pytest.mark.parametrize(
        ("text", "dtype", "message"),
        [
            ("1.5", DType.INT32, "expected integers, got 1.5"),
            ("true", DType.INT32, "expected integers, got true"),
            ('"1"', DType.FP32, 'expected numbers, got "1"'),
            ("[null]", DType.FP32, "expected numbers, got null"),
            ("1", DType.BOOL, "expected true or false, got 1"),
            ("{}", DType.BYTES, "expected strings in quotes"),
            ("256", DType.UINT8, "out of range"),
            ("-1", DType.UINT64, "out of range"),
            ("1" + "0" * 400, DType.FP64, "out of range"),
            ("1e300", DType.FP32, "out of range"),
            ("1e39", DType.BF16, "out of range"),
            ("[[1], [1, 2]]", DType.INT32, "same length"),
            ("[1, [2]]", DType.INT32, "same length"),
            ("[" * 100_000, DType.INT32, "nested too deeply"),
            ("[" * 40 + "1" + "]" * 40, DType.FP32, "more than 32 dimensions"),
        ],
    )
    def test_wrong_values(self, feed: Any, text: str, dtype: DType, message: str) -> None:
        assert message in feed(f"x={text}", dtype, -1)

    def test_unknown_input(self, feed: Any) -> None:
        refused = feed("y=1", DType.FP32, -1)
        assert "no input 'y'" in refused
        assert "known: x" in refused

    @pytest.mark.parametrize(
        ("text", "name", "value"),
        [
            ("a=b=[1]", "a=b", 1),
            ("a=[2]", "a", 2),
            ("a = b=[3]", "a = b", 3),
            ("=c==4", "=c=", 4),
        ],
    )
    def test_names_with_equals_signs(
        self, run: RunVerb, client: FakeClient, text: str, name: str, value: float
    ) -> None:
        client.fake_model.inputs = [
            {"name": known, "datatype": "FP32", "shape": [-1]} for known in ("a", "a=b", "a = b", "=c=")
        ]
        assert run("infer", "--model", "m", "--input", text).code == 0
        assert {given: array.tolist() for given, array in client.fake_model.fed[-1].items()} == {name: [value]}

    def test_values_with_equals_signs(self, feed: Any) -> None:
        assert feed('x="a=b=c"', DType.BYTES, -1).tolist() == [b"a=b=c"]


class TestOutputs:
    def test_values_are_printed(self, run: RunVerb, client: FakeClient, sample: Path) -> None:
        options = ("--model", "m", "--version", "3", "--output", "Y", "--output", "Z", "--timeout", "7")
        finished = run("infer", *options, "--input", f"X={sample}")
        assert (finished.code, finished.out) == (0, "Y: float32[1, 2]\n[[ 1.5 -2. ]]\n")
        assert client.models_opened == [("m", "3")]
        assert client.fake_model.requested == [("Y", "Z")]
        assert client.connected[0].timeout == 7

    @pytest.mark.parametrize(
        ("array", "data"),
        [
            (np.array(b"one", np.object_), "one"),
            (np.array([[b"\xff"]], np.object_), [["\ufffd"]]),
            (np.array([b"ab", b"c"]), ["ab", "c"]),
            (np.zeros((0, 2), np.object_), []),
            (np.array([[True]]), [[True]]),
        ],
    )
    def test_json(self, run: RunVerb, client: FakeClient, sample: Path, array: AnyArray, data: object) -> None:
        client.fake_model.outputs = {"Y": array}
        document = json.loads(run("infer", "--model", "m", "--input", f"X={sample}", "--json").out)
        assert document["Y"] == {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}

    def test_files(self, run: RunVerb, client: FakeClient, sample: Path, tmp_path: Path) -> None:
        client.fake_model.outputs = {"a/b": np.ones((1, 2), np.float16), "text": np.array([b"yes"], np.object_)}
        folder = tmp_path / "deep" / "out"
        finished = run("infer", "--model", "m", "--input", f"X={sample}", "--output-dir", folder, "--json")
        first, second, document = finished.out.split("\n", 2)
        assert (first, second) == (str(folder / "a_b.npy"), str(folder / "text.npy"))
        assert json.loads(document)["text"]["data"] == ["yes"]
        np.testing.assert_array_equal(np.load(folder / "a_b.npy"), np.ones((1, 2), np.float16))
        assert np.load(folder / "text.npy", allow_pickle=False).tolist() == [b"yes"]

    def test_similar_names_get_files_of_their_own(
        self, run: RunVerb, client: FakeClient, sample: Path, tmp_path: Path
    ) -> None:
        client.fake_model.outputs = {name: np.array([i]) for i, name in enumerate(("a/b", "a_b", "a/b_"))}
        shown = run("infer", "--model", "m", "--input", f"X={sample}", "--output-dir", tmp_path / "out").out
        assert [np.load(path).tolist() for path in shown.split()] == [[0], [1], [2]]

    @pytest.mark.usefixtures("client")
    def test_output_folder_is_a_file(self, run: RunVerb, sample: Path) -> None:
        finished = run("infer", "--model", "m", "--input", f"X={sample}", "--output-dir", sample)
        assert (finished.code, f"cannot write to {sample}: File exists" in finished.err) == (2, True)


def test_errors_of_the_server(run: RunVerb, client: FakeClient, sample: Path) -> None:
    client.fake_model.error = ServerError("X: expected [-1,1,2,2]")
    finished = run("infer", "--model", "m", "--input", f"X={sample}")
    assert (finished.code, finished.err) == (1, "graphkiln: X: expected [-1,1,2,2]\n")
    client.fake_model.error = InvalidInput("unexpected inference input 'Z'")
    finished = run("infer", "--model", "digits", "--input", f"Z={sample}")
    assert finished.code == 2
    assert "takes X FP32[-1, 2, 2] and returns Y FP32[1, 2]" in finished.err
    assert client.open == 0
