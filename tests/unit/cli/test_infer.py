"""`graphkiln infer`: tensors from files, outputs onto the screen or into files."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import FakeClient, RunVerb

from graphkiln.cli.infer import read_tensor
from graphkiln_backend.graph.errors import InvalidInput, ServerError


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.npy"
    np.save(path, np.arange(4, dtype=np.float32).reshape(1, 2, 2))
    return path


class TestReadTensor:
    def test_name_and_array(self, sample: Path) -> None:
        name, array = read_tensor(f"X={sample}")
        assert name == "X"
        np.testing.assert_array_equal(array, np.arange(4, dtype=np.float32).reshape(1, 2, 2))

    def test_a_path_may_hold_an_equals_sign(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a=b.npy", np.zeros(2))
        assert read_tensor(f"X={tmp_path / 'a=b.npy'}")[0] == "X"

    def test_a_dash_is_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        file = io.BytesIO()
        np.save(file, np.array([b"ab", b"c"]))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.getvalue())))
        assert read_tensor("X=-")[1].tolist() == [b"ab", b"c"]

    @pytest.mark.parametrize("text", ["", "X", "X=", "=file.npy", "="])
    def test_what_is_not_name_and_file_says_how_it_is_written(self, text: str) -> None:
        with pytest.raises(InvalidInput, match=r"expected NAME=FILE.*for example --input INPUT_0=image\.npy"):
            read_tensor(text)

    def test_a_missing_file_and_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="No such file"):
            read_tensor(f"X={tmp_path / 'none.npy'}")
        with pytest.raises(InvalidInput, match="Is a directory"):
            read_tensor(f"X={tmp_path}")

    @pytest.mark.parametrize("content", [b"", b"nonsense", b"\x93NUMPY\x01\x00v\x00"])
    def test_a_damaged_file_is_no_npy_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.npy").write_bytes(content)
        with pytest.raises(InvalidInput, match=r"is not an \.npy file of numbers or texts.*numpy\.save"):
            read_tensor(f"X={tmp_path / 'x.npy'}")

    def test_a_file_that_is_cut_short(self, sample: Path) -> None:
        sample.write_bytes(sample.read_bytes()[:-3])
        with pytest.raises(InvalidInput, match=r"is not an \.npy file"):
            read_tensor(f"X={sample}")

    def test_pickled_objects_are_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
        with pytest.raises(InvalidInput, match=r"is not an \.npy file of numbers or texts"):
            read_tensor(f"X={tmp_path / 'x.npy'}")

    def test_an_archive_of_several_arrays(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", a=np.zeros(1))
        with pytest.raises(InvalidInput, match=r"holds several arrays.*one \.npy file for each input"):
            read_tensor(f"X={tmp_path / 'x.npz'}")


class TestOutputs:
    def test_are_printed_with_type_and_shape(self, run: RunVerb, client: FakeClient, sample: Path) -> None:
        finished = run("infer", "--model", "digits", "--input", f"X={sample}")
        assert (finished.code, finished.out) == (0, "Y: float32[1, 2]\n[[ 1.5 -2. ]]\n")
        (feeds,) = client.fake_model.fed
        assert feeds["X"].shape == (1, 2, 2)

    def test_of_the_requested_version_and_names(self, run: RunVerb, client: FakeClient, sample: Path) -> None:
        words = ("--model", "m", "--version", "3", "--output", "Y", "--output", "Z", "--timeout", "7")
        run("infer", *words, "--input", f"X={sample}")
        assert client.models_opened == [("m", "3")]
        assert client.fake_model.requested == [("Y", "Z")]
        assert client.connected[0].timeout == 7

    def test_as_json(self, run: RunVerb, client: FakeClient, sample: Path) -> None:
        client.fake_model.outputs = {"Y": np.array([[1, 2]], np.int8), "T": np.array([b"a", "ü".encode()], np.object_)}
        document = json.loads(run("infer", "--model", "m", "--input", f"X={sample}", "--json").out)
        assert document["Y"] == {"dtype": "int8", "shape": [1, 2], "data": [[1, 2]]}
        assert document["T"] == {"dtype": "object", "shape": [2], "data": ["a", "ü"]}

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
    def test_as_json_of_any_shape_and_bytes(
        self, run: RunVerb, client: FakeClient, sample: Path, array: np.ndarray, data: object
    ) -> None:
        client.fake_model.outputs = {"Y": array}
        document = json.loads(run("infer", "--model", "m", "--input", f"X={sample}", "--json").out)
        assert document["Y"]["data"] == data
        assert document["Y"]["shape"] == list(array.shape)

    def test_into_files(self, run: RunVerb, client: FakeClient, sample: Path, tmp_path: Path) -> None:
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
    def test_into_files_and_as_json(self, run: RunVerb, sample: Path, tmp_path: Path) -> None:
        finished = run("infer", "--model", "m", "--input", f"X={sample}", "--json", "--output-dir", tmp_path / "out")
        path, _, document = finished.out.partition("\n")
        assert path.endswith("Y.npy")
        assert json.loads(document)["Y"]["data"] == [[1.5, -2.0]]

    @pytest.mark.usefixtures("client")
    def test_into_a_folder_that_is_a_file(self, run: RunVerb, sample: Path) -> None:
        finished = run("infer", "--model", "m", "--input", f"X={sample}", "--output-dir", sample)
        assert finished.code == 2
        assert f"cannot write to {sample}: File exists" in finished.err


def test_a_mistake_is_found_before_the_server_is_asked(run: RunVerb, client: FakeClient) -> None:
    finished = run("infer", "--model", "m", "--input", "X=none.npy")
    assert finished.code == 2
    assert finished.err == "graphkiln: cannot read none.npy: No such file or directory\n"
    assert client.connected == []


def test_an_error_of_the_server_is_one_line(run: RunVerb, client: FakeClient, sample: Path) -> None:
    client.fake_model.error = ServerError("X: expected [-1,1,2,2]")
    finished = run("infer", "--model", "m", "--input", f"X={sample}")
    assert finished.code == 1
    assert finished.err == "graphkiln: X: expected [-1,1,2,2]\n"
    assert client.open == 0
