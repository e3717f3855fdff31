"""What a graph is: dtypes, signature, preprocess spec, manifest, golden samples, strict decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ClientError, GraphkilnError, ManifestError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="image", dtype=DType.FP32, shape=("batch", 3, "side", "side")),
        TensorSpec(name="words", dtype=DType.BYTES, shape=("batch",)),
    ),
    outputs=(TensorSpec(name="scores", dtype=DType.FP32, shape=("batch", 10)),),
)


def feeds(batch: int = 2, side: int = 4) -> dict[str, Any]:
    return {"image": np.zeros((batch, 3, side, side), np.float32), "words": np.array([b"a"] * batch, np.object_)}


class TestSignature:
    @given(batch=st.integers(0, 5), side=st.integers(0, 9))
    def test_accepts_every_size_of_a_symbol(self, batch: int, side: int) -> None:
        SIGNATURE.check(feeds(batch, side))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"image": np.zeros((2, 3, 4, 4), np.float64)}, "wrong dtype of input 'image'"),
            ({"image": np.zeros((2, 3, 4), np.float32)}, "wrong rank of input 'image'"),
            ({"image": np.zeros((2, 4, 4, 4), np.float32)}, "wrong size in dimension 1 of input 'image'"),
            ({"image": np.zeros((2, 3, 4, 5), np.float32)}, "dimension 3 ('side' is 4 elsewhere)"),
            ({"words": np.array([b"a"], np.object_)}, "dimension 0 ('batch' is 2 elsewhere)"),
            ({"extra": np.zeros(1)}, "unknown input 'extra'"),
        ],
    )
    def test_says_what_does_not_fit(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(SignatureError) as caught:
            SIGNATURE.check({**feeds(), **change})
        assert message in str(caught.value)
        assert caught.value.triton_code == "INVALID_ARG"

    def test_names_what_was_expected_and_what_came(self) -> None:
        with pytest.raises(SignatureError, match=r"expected image FP32\[batch,3,side,side\], got FP64\[2,3,4,4\]"):
            SIGNATURE.check({**feeds(), "image": np.zeros((2, 3, 4, 4))})

    def test_a_missing_input(self) -> None:
        with pytest.raises(SignatureError, match="missing input 'words'"):
            SIGNATURE.check({"image": feeds()["image"]})

    def test_is_batchable_only_when_every_tensor_is(self) -> None:
        fixed = TensorSpec(name="fixed", dtype=DType.FP32, shape=(1, 10))
        assert SIGNATURE.batchable
        assert not Signature(inputs=SIGNATURE.inputs, outputs=(fixed,)).batchable

    def test_refuses_two_tensors_of_one_name(self) -> None:
        with pytest.raises(ManifestError, match="two inputs are named 'words'"):
            Signature(inputs=(SIGNATURE.inputs[1],) * 2, outputs=())

    def test_refuses_negative_dimensions(self) -> None:
        with pytest.raises(ManifestError, match="dimension of -1"):
            TensorSpec(name="x", dtype=DType.FP32, shape=(-1, 3))


class TestDTypes:
    @pytest.mark.parametrize("dtype", list(DType))
    def test_numpy_and_back(self, dtype: DType) -> None:
        assert DType.from_numpy(dtype.numpy) is dtype

    def test_config_names(self) -> None:
        assert DType.FP32.config_name == "TYPE_FP32"
        assert DType.BYTES.config_name == "TYPE_STRING"

    def test_what_cannot_travel(self) -> None:
        with pytest.raises(ManifestError, match="complex128"):
            DType.from_numpy(np.dtype(np.complex128))
        with pytest.raises(ManifestError, match="seq"):
            DType.from_onnxruntime("seq(map(int64,tensor(float)))")


class TestDecoding:
    @pytest.fixture
    def document(self, digits: Path) -> Any:
        return json.loads((digits / "1" / "manifest.json").read_bytes())

    def test_is_the_inverse_of_encode(self, document: Any) -> None:
        absent = {"conversion": None, "weights": {}, "ranking": None}  # what older manifests leave out
        assert json.loads(json.dumps(encode(decode(Manifest, document)))) == {**document, **absent}

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (("labls",), "x", "unknown key 'labls' (did you mean 'labels'?)"),
            (("signature", "inputs", 0, "dtyp"), "FP32", "unknown key 'signature.inputs[0].dtyp'"),
            (("signature", "inputs", 0, "dtype"), "FLOAT", "'signature.inputs[0].dtype' must be one of BOOL"),
            (("signature", "inputs", 0, "shape", 1), 1.5, "'signature.inputs[0].shape[1]' must be"),
            (("sha256",), 7, "'sha256' must be a value of type str, got 7"),
            (("golden", "samples"), True, "'golden.samples' must be a value of type int"),
            (("preprocess", "color"), "CMYK", "'preprocess.color' must be one of 'RGB', 'BGR', 'L'"),
            (("preprocess", "crop"), [1], "'preprocess.crop' must be a list of 2"),
            (("verification",), {}, "'verification' must be a list"),
            (("provenance",), None, "'provenance' must be an object"),
            (("format_version",), 99, "manifest format 99 is not known"),
            (("graph_file",), "../other/model.onnx", "must be a plain file name"),
        ],
    )
    def test_names_the_path_of_a_bad_value(
        self, document: Any, path: tuple[Any, ...], value: Any, message: str
    ) -> None:
        *parents, last = path
        target = document
        for key in parents:
            target = target[key]
        target[last] = value
        with pytest.raises(ManifestError) as caught:
            decode(Manifest, document)
        assert message in str(caught.value)

    def test_names_a_missing_key(self, document: Any) -> None:
        del document["signature"]["outputs"]
        with pytest.raises(ManifestError, match=r"missing key 'signature\.outputs'"):
            decode(Manifest, document)

    def test_a_file_that_is_not_json(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_text("{")
        with pytest.raises(ManifestError, match="is not JSON"):
            Manifest.read(tmp_path / "manifest.json")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ManifestError, match="No such file"):
            Manifest.read(tmp_path / "manifest.json")


class TestPreprocess:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"mean": (0.5,)}, "preprocess.mean must have 3 values"),
            ({"std": (1.0, 0.0, 1.0)}, "must not hold a zero"),
            ({"dtype": DType.INT64}, "must be UINT8, FP16 or FP32"),
            ({"dtype": DType.UINT8, "mean": (0.5, 0.5, 0.5)}, "must be empty for dtype UINT8"),
            ({"resize": 0}, "at least 1 pixel"),
            ({"crop": (8, -1)}, "at least 1 pixel"),
        ],
    )
    def test_refuses_nonsense(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ManifestError, match=message):
            Preprocess(**fields)

    def test_travels_as_json(self) -> None:
        spec = Preprocess(resize=(7, 9), crop=(5, 5), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), layout="HWC")
        assert Preprocess.from_json(spec.to_json()) == spec

    @pytest.mark.parametrize("text", ["{", "[]", '{"resize": "big"}', '{"resiz": 3}'])
    def test_refuses_broken_json(self, text: str) -> None:
        with pytest.raises(ManifestError, match="preprocess"):
            Preprocess.from_json(text)

    @given(height=st.integers(1, 400), width=st.integers(1, 400), side=st.integers(1, 300))
    def test_resize_keeps_the_shorter_side(self, height: int, width: int, side: int) -> None:
        resized = Preprocess(resize=side).resized(height, width)
        assert min(resized) == side
        assert max(resized) == int(side * max(height, width) / min(height, width))

    @given(height=st.integers(1, 60), width=st.integers(1, 60), crop=st.tuples(st.integers(1, 60), st.integers(1, 60)))
    def test_crop_has_its_size_and_is_centred(self, height: int, width: int, crop: tuple[int, int]) -> None:
        left, top, right, bottom = Preprocess(crop=crop).cropped(height, width)
        assert (bottom - top, right - left) == crop
        assert abs((left + right) - width) <= 1
        assert abs((top + bottom) - height) <= 1

    @pytest.mark.parametrize("layout", ["CHW", "HWC"])
    @pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.UINT8])
    def test_normalizes_by_the_formula(self, layout: Any, dtype: DType) -> None:
        pixels = np.random.default_rng(7).integers(0, 256, (5, 6, 3), np.uint8)
        scaled = dtype is not DType.UINT8
        mean, std = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)) if scaled else ((), ())
        sample = Preprocess(layout=layout, dtype=dtype, mean=mean, std=std).normalize(pixels)
        expected = pixels.astype(np.float64)
        if scaled:
            expected = (expected / 255 - np.array(mean)) / np.array(std)
        if layout == "CHW":
            expected = np.moveaxis(expected, 2, 0)
        assert sample.dtype == dtype.numpy
        assert sample.flags.c_contiguous
        np.testing.assert_allclose(sample, expected, atol=2e-3 if dtype is DType.FP16 else 1e-6)


class TestGolden:
    def test_round_trip(self, tmp_path: Path) -> None:
        bf16 = np.ones((2, 3)).astype(DType.BF16.numpy)
        golden = GoldenSamples(inputs={"x": bf16}, source_outputs={"y": np.ones(2)}, graph_outputs={})
        golden.write(tmp_path / "golden.npz")
        read = GoldenSamples.read(tmp_path / "golden.npz")
        assert read.inputs["x"].dtype == bf16.dtype
        np.testing.assert_array_equal(read.inputs["x"], golden.inputs["x"])
        np.testing.assert_array_equal(read.source_outputs["y"], golden.source_outputs["y"])
        assert not read.graph_outputs

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", b"nonsense"])
    def test_damaged_files(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "golden.npz").write_bytes(content)
        with pytest.raises(ManifestError, match="cannot read golden samples"):
            GoldenSamples.read(tmp_path / "golden.npz")

    def test_runs_no_pickles(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "golden.npz", **{"input/x": np.array([{"a": 1}], dtype=object)})  # type: ignore[arg-type]
        with pytest.raises(ManifestError, match="cannot read golden samples"):
            GoldenSamples.read(tmp_path / "golden.npz")


def all_errors(base: type[GraphkilnError] = GraphkilnError) -> list[type[GraphkilnError]]:
    return [base, *(error for child in base.__subclasses__() for error in all_errors(child))]


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    from graphkiln_backend.graph import errors

    drawn = {line.split("─ ")[-1].split()[0] for line in (errors.__doc__ or "").splitlines() if "─ " in line}
    defined = {error.__name__ for error in all_errors() if error.__module__ == errors.__name__}
    assert drawn == defined - {"GraphkilnError"}
    assert issubclass(ClientError, GraphkilnError)


def test_every_error_has_a_code_that_triton_knows() -> None:
    known = {"INTERNAL", "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "UNSUPPORTED", "ALREADY_EXISTS"}
    assert {error.triton_code for error in all_errors()} <= known
    assert {error.exit_code for error in all_errors()} <= {1, 2}
