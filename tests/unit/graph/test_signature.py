"""Signatures of graphs, and validation of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError, SignatureError
from graphkiln_backend.graph.signature import ANY_RANK, Signature, TensorSpec, counted_dim, free_dim

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="image", dtype=DType.FP32, shape=("batch", 3, "side", "side")),
        TensorSpec(name="words", dtype=DType.BYTES, shape=("batch",)),
    ),
    outputs=(TensorSpec(name="scores", dtype=DType.FP32, shape=("batch", 10)),),
)


def feeds(batch: int = 2, side: int = 4) -> dict[str, Any]:
    return {"image": np.zeros((batch, 3, side, side), np.float32), "words": np.array([b"a"] * batch, np.object_)}


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        (("batch", 3, "side", ANY_RANK), "batch,3,side,..."),
        (("s53", "s85", "2*s53 + 1", "u0"), "dim_53,dim_85,2*dim_53 + 1,dim_0"),
        (("unk__12", "DynamicDimension.1", "s", "sos1"), "dim_12,dim_1,s,sos1"),
        ((free_dim("x", 0), free_dim("a.b", 1), counted_dim("y", 0)), "-1,-1,-1"),
    ],
)
def test_dimensions_are_shown_by_names_that_tell_something(shape: tuple[int | str, ...], shown: str) -> None:
    assert str(TensorSpec(name="x", dtype=DType.FP32, shape=shape)) == f"x FP32[{shown}]"


def test_equal_sizes_are_named_readably_in_errors() -> None:
    spec = TensorSpec(name="ids", dtype=DType.INT64, shape=("batch", "s53", "s53"))
    with pytest.raises(SignatureError, match=r"'dim_53' is 3 elsewhere.*ids INT64\[batch,dim_53,dim_53\]"):
        Signature(inputs=(spec,), outputs=()).check({"ids": np.zeros((1, 3, 4), np.int64)})


@given(batch=st.integers(0, 5), side=st.integers(0, 9))
def test_any_size_of_a_symbol(batch: int, side: int) -> None:
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
def test_tensors_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SignatureError) as caught:
        SIGNATURE.check({**feeds(), **change})
    assert message in str(caught.value)
    assert caught.value.triton_code == "INVALID_ARG"


def test_missing_input() -> None:
    with pytest.raises(SignatureError, match="missing input 'words'"):
        SIGNATURE.check({"image": feeds()["image"]})


def test_batchable() -> None:
    fixed = TensorSpec(name="fixed", dtype=DType.FP32, shape=(1, 10))
    assert SIGNATURE.batchable
    assert not Signature(inputs=SIGNATURE.inputs, outputs=(fixed,)).batchable


def test_duplicate_names() -> None:
    with pytest.raises(ManifestError, match="two inputs are named 'words'"):
        Signature(inputs=(SIGNATURE.inputs[1],) * 2, outputs=())


def test_negative_dimensions() -> None:
    with pytest.raises(ManifestError, match="dimension of -1"):
        TensorSpec(name="x", dtype=DType.FP32, shape=(-1, 3))


def spec(name: str, *shape: int | str, dtype: DType = DType.FP32) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


OPTIONAL = Signature(
    inputs=(spec("x", "n"),),
    outputs=(spec("y", "n"),),
    optional_inputs=(spec("scale", dtype=DType.FP64), spec("m", "n")),
)


class TestOptionalInputs:
    def test_optional_inputs_may_be_omitted(self) -> None:
        x = np.zeros(3, np.float32)
        OPTIONAL.check({"x": x})
        OPTIONAL.check({"x": x, "scale": np.float64(2.0), "m": np.ones(3, np.float32)})

    def test_optional_inputs_are_checked(self) -> None:
        x = np.zeros(3, np.float32)
        with pytest.raises(SignatureError, match="wrong dtype of input 'scale'"):
            OPTIONAL.check({"x": x, "scale": np.float32(2.0)})
        with pytest.raises(SignatureError, match=r"wrong rank of input 'scale'.*got FP64\[1\]"):
            OPTIONAL.check({"x": x, "scale": np.ones(1)})
        with pytest.raises(SignatureError, match=r"'n' is 3 elsewhere"):
            OPTIONAL.check({"x": x, "m": np.ones(4, np.float32)})

    def test_optional_inputs_do_not_replace_required_ones(self) -> None:
        with pytest.raises(SignatureError, match=r"missing input 'x': expected x FP32\[n\], got m"):
            OPTIONAL.check({"m": np.ones(4, np.float32)})

    def test_optional_inputs_do_not_affect_batching(self) -> None:
        assert OPTIONAL.batchable


class TestBatch:
    @pytest.mark.parametrize(
        ("shapes", "fixed"),
        [
            (((4, 3), (4,)), 4),
            (((4, 3), (5,)), None),
            (((4, 3), ("batch",)), None),
            ((("batch", 3), ("batch",)), None),
            (((4, 3), ()), None),
            (((), ()), None),
            (((0, 3), (0,)), 0),
        ],
    )
    def test_fixed_batch(self, shapes: tuple[tuple[int | str, ...], ...], fixed: int | None) -> None:
        inputs, outputs = shapes
        assert Signature(inputs=(spec("x", *inputs),), outputs=(spec("y", *outputs),)).fixed_batch == fixed

    def test_scalars_are_not_batchable(self) -> None:
        assert not spec("x").batchable
        assert not spec("x", 1, "n").batchable
        assert spec("x", "n", 1).batchable


class TestText:
    @pytest.mark.parametrize("array", [np.array([b"a"]), np.array(["a"]), np.array([b"a", 1], object)[:1]])
    def test_arrays_of_text(self, array: Any) -> None:
        Signature(inputs=(spec("x", "n", dtype=DType.BYTES),), outputs=()).check({"x": array})

    def test_text_in_place_of_numbers(self) -> None:
        with pytest.raises(SignatureError, match=r"expected x FP32\[n\], got BYTES\[1\]"):
            Signature(inputs=(spec("x", "n"),), outputs=()).check({"x": np.array(["1"])})

    def test_unsupported_numpy_type(self) -> None:
        with pytest.raises(SignatureError, match=r"got complex128\[1\]"):
            Signature(inputs=(spec("x", "n"),), outputs=()).check({"x": np.ones(1, complex)})


def test_empty_name() -> None:
    with pytest.raises(ManifestError, match="empty name"):
        spec("", 1)


def test_text_of_specs() -> None:
    assert str(spec("x", "batch", 3, dtype=DType.BF16)) == "x BF16[batch,3]"
    assert str(spec("x")) == "x FP32[]"


class TestRank:
    def test_unknown_rank_accepts_any_tensor(self) -> None:
        unknown = Signature(inputs=(spec("x", ANY_RANK),), outputs=())
        for shape in ((), (2,), (2, 3)):
            unknown.check({"x": np.zeros(shape, np.float32)})
        assert not unknown.batchable

    def test_is_like(self) -> None:
        assert spec("x", ANY_RANK).is_like(spec("x", 2, 3))
        assert not spec("x", 2).is_like(spec("x", 2, 3))
        assert not spec("x", ANY_RANK).is_like(spec("y", 2))

    def test_data_dependent_dimension_is_not_a_batch(self) -> None:
        counted = spec("boxes", counted_dim("boxes", 0), 4)
        assert (counted.varies, counted.batchable) == (True, False)
