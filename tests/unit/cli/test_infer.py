"""`graphkiln infer`: inputs, and outputs on the terminal or in files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import FakeClient, RunVerb

from graphkiln_backend.graph.errors import InvalidInput, ServerError


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.npy"
    np.save(path, np.arange(4, dtype=np.float32).reshape(1, 2, 2))
    return path


class TestOutputs:
    def test_printed_outputs(self, run: RunVerb, client: FakeClient, sample: Path) -> None:
        finished = run("infer", "--model", "digits", "--input", f"X={sample}")
        assert (finished.code, finished.out) == (0, "Y: float32[1, 2]\n[[ 1.5 -2. ]]\n")
        (feeds,) = client.fake_model.fed
        assert feeds["X"].shape == (1, 2, 2)

    def test_version_and_names_of_outputs(self, run: RunVerb, client: FakeClient, sample: Path) -> None:
        words = ("--model", "m", "--version", "3", "--output", "Y", "--output", "Z", "--timeout", "7")
        run("infer", *words, "--input", f"X={sample}")
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
            (np.array([[1, 2]], np.int8), [[1, 2]]),
        ],
    )
    def test_json(self, run: RunVerb, client: FakeClient, sample: Path, array: np.ndarray, data: object) -> None:
        client.fake_model.outputs = {"Y": array}
        document = json.loads(run("infer", "--model", "m", "--input", f"X={sample}", "--json").out)
        assert document["Y"] == {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}

    def test_files(self, run: RunVerb, client: FakeClient, sample: Path, tmp_path: Path) -> None:
        client.fake_model.outputs = {
            "a/b": np.ones((1, 2), np.float16),
            "text": np.array([b"yes", b"no"], np.object_),
        }
        folder = tmp_path / "deep" / "out"
        finished = run("infer", "--model", "m", "--input", f"X={sample}", "--output-dir", folder)
        assert finished.out.splitlines() == [str(folder / "a_b.npy"), str(folder / "text.npy")]
        np.testing.assert_array_equal(np.load(folder / "a_b.npy"), np.ones((1, 2), np.float16))
        assert np.load(folder / "text.npy", allow_pickle=False).tolist() == [b"yes", b"no"]

    @pytest.mark.usefixtures("client")
    def test_files_and_json(self, run: RunVerb, sample: Path, tmp_path: Path) -> None:
        finished = run("infer", "--model", "m", "--input", f"X={sample}", "--json", "--output-dir", tmp_path / "out")
        path, _, document = finished.out.partition("\n")
        assert path.endswith("Y.npy")
        assert json.loads(document)["Y"]["data"] == [[1.5, -2.0]]

    @pytest.mark.usefixtures("client")
    def test_output_folder_is_a_file(self, run: RunVerb, sample: Path) -> None:
        finished = run("infer", "--model", "m", "--input", f"X={sample}", "--output-dir", sample)
        assert finished.code == 2
        assert f"cannot write to {sample}: File exists" in finished.err


def test_error_of_the_server_is_one_line(run: RunVerb, client: FakeClient, sample: Path) -> None:
    client.fake_model.error = ServerError("X: expected [-1,1,2,2]")
    finished = run("infer", "--model", "m", "--input", f"X={sample}")
    assert finished.code == 1
    assert finished.err == "graphkiln: X: expected [-1,1,2,2]\n"
    assert client.open == 0


def test_literals_get_the_declared_type(run: RunVerb, client: FakeClient) -> None:
    assert run("infer", "--model", "m", "--input", "X=[[1, 2], [3, 4.5]]").code == 0
    (feeds,) = client.fake_model.fed
    assert (feeds["X"].dtype, feeds["X"].tolist()) == (np.float32, [[[1.0, 2.0], [3.0, 4.5]]])
    finished = run("infer", "--model", "m", "--input", "X=[[1, 2]]")
    assert finished.code == 2
    assert "input 'X' has shape [1, 2], but the model expects [-1, 2, 2]" in finished.err
    assert len(client.fake_model.fed) == 1


def test_refused_request_lists_inputs_and_outputs(run: RunVerb, client: FakeClient, sample: Path) -> None:
    client.fake_model.error = InvalidInput("unexpected inference input 'Z'")
    finished = run("infer", "--model", "digits", "--input", f"Z={sample}")
    assert finished.code == 2
    assert "takes X FP32[-1, 2, 2] and returns Y FP32[1, 2]" in finished.err
