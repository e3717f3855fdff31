"""Operations that move elements, beside NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from translating import check_operator, run_operator

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError

X = np.arange(2 * 3 * 4 * 5, dtype="f4").reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("kind", "shape"), [("reshape", (6, 20)), ("reshape", (120,)), ("expand_dims", (2, 1, 3, 4, 5))]
)
def test_shapes(kind: str, shape: tuple[int, ...]) -> None:
    check_operator(kind, [X], X.reshape(shape))


def test_squeeze() -> None:
    check_operator("squeeze", [X[:, :1]], X[:, 0], axes=[1])


@pytest.mark.parametrize("perm", [(0, 2, 3, 1), (3, 2, 1, 0)])
def test_transposition(perm: tuple[int, ...]) -> None:
    check_operator("transpose", [X], X.transpose(perm), perm=list(perm))


def test_expansion() -> None:
    x = X[:, :1, :, :1]
    expected = np.broadcast_to(x, X.shape).copy()
    check_operator("expand", [x], expected)
    check_operator("broadcast_like", [x, X], expected)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_concatenation(axis: int) -> None:
    check_operator("concat", [X, X + 1, X - 1], np.concatenate([X, X + 1, X - 1], axis), axis=axis)


@pytest.mark.parametrize("axis", [0, 2, 4, -1])
def test_a_stack_has_a_new_axis(axis: int) -> None:
    check_operator("stack", [X, X + 1], np.stack([X, X + 1], axis), axis=axis)


class TestSlices:
    @pytest.mark.parametrize(
        ("start", "stop", "step"),
        [
            ([0, 1, 0, 0], [2, 3, 4, 5], [1, 1, 1, 1]),
            ([0, 0, 1, 0], [2, 3, 4, 5], [1, 1, 2, 2]),
            ([1, 2, 3, 4], [2, 3, 4, 5], [1, 1, 1, 1]),
            ([0, 0, 0, 0], [2, 3, 4, 5], [1, 1, 1, 1]),
            ([0, 0, 0, 0], [2, 3, 99, 99], [1, 1, 1, 1]),
        ],
    )
    def test_start_stop_and_step(self, start: list[int], stop: list[int], step: list[int]) -> None:
        ranges = tuple(slice(*bounds) for bounds in zip(start, stop, step, strict=True))
        check_operator("slice", [X], X[ranges], start=start, stop=stop, step=step)

    def test_must_be_as_many_as_axes(self) -> None:
        with pytest.raises(ConversionError, match="operands and attributes are not as expected"):
            run_operator("slice", [X], [X], start=[0], stop=[2], step=[1])

    @pytest.mark.parametrize("dim", [1, -3])
    def test_narrow(self, dim: int) -> None:
        check_operator("narrow", [X], X[:, 1:3], dim=dim, start=1, length=2)

    @pytest.mark.parametrize(
        ("start", "stop"),
        [
            ([0, 1, 0, 0], [2, 2, 4, 5]),
            ([0, 0, 1, 2], [2, 3, 4, 4]),
            ([1, 1, 1, 1], [2, 2, 2, 2]),
            ([0, 0, 0, 0], [2, 3, 4, 5]),
        ],
    )
    def test_an_update_replaces_a_part(self, start: list[int], stop: list[int]) -> None:
        ranges = tuple(slice(*bounds) for bounds in zip(start, stop, strict=True))
        expected, part = X.copy(), -1 - X[ranges]
        expected[ranges] = part
        check_operator("slice_update", [X, part], expected, start=start, stop=stop, step=[1] * 4)

    def test_an_update_with_steps(self) -> None:
        with pytest.raises(ConversionError, match="a step other than 1 cannot be translated"):
            run_operator("slice_update", [X, X[::2]], [X], start=[0] * 4, stop=[2, 3, 4, 5], step=[2, 1, 1, 1])


class TestRoll:
    @pytest.mark.parametrize(
        ("shifts", "dims"), [([1], [2]), ([-2], [2]), ([1, -1], [2, 3]), ([7], [2]), ([4], [2]), ([1], [-2])]
    )
    def test_along_axes(self, shifts: list[int], dims: list[int]) -> None:
        expected = np.roll(X, shifts, dims)
        check_operator("roll", [X], expected, shifts=shifts, dims=dims)

    def test_over_all_at_once(self) -> None:
        with pytest.raises(ConversionError, match="dims is not given"):
            run_operator("roll", [X], [X], shifts=[1], dims=[-1])


@pytest.mark.parametrize("dims", [[0], [1, 3], [-1]])
def test_flip(dims: list[int]) -> None:
    check_operator("flip", [X], np.flip(X, dims).copy(), dims=dims)


class TestGathering:
    def test_slices_of_an_axis(self) -> None:
        indices = np.array([[2, 0], [1, 1]])
        check_operator("gather", [X, indices], np.take(X, indices, axis=1), axis=1)

    def test_an_embedding(self) -> None:
        table, tokens = np.linspace(0, 1, 40, dtype="f4").reshape(10, 4), np.array([[9, 0, 3]], "i4")
        check_operator("gather", [table, tokens], table[tokens], axis=0)

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_an_index_for_each_element(self, dim: int) -> None:
        x = X[0, 0]
        indices = np.random.default_rng(0).integers(0, min(x.shape), x.shape)
        check_operator("dim_gather", [x, indices], np.take_along_axis(x, indices, dim), dim=dim)

    def test_by_several_axes(self) -> None:
        indices = np.array([[0, 2], [1, 1], [0, 0]], "i4")
        check_operator("gather_nd", [X, indices], X[indices[:, 0], indices[:, 1]])


class TestTriangles:
    @pytest.mark.parametrize("diagonal", [-2, 0, 1, 9])
    @pytest.mark.parametrize("kind", ["tril", "triu"])
    def test_the_rest_is_zero(self, kind: str, diagonal: int) -> None:
        check_operator(kind, [X], getattr(np, kind)(X, diagonal), diagonal=diagonal)

    def test_the_rest_is_filled(self) -> None:
        expected = np.where(np.tril(np.ones((4, 5), bool)), X, np.float32(-1e4))
        check_operator("tril", [X], expected, diagonal=0, is_floating_fill_value=True, floating_fill_value=-1e4)


class TestConstants:
    def constant(self, kind: str, expected: Any, **attributes: Any) -> None:
        """Returned beside an input: a graph needs one."""
        array = np.asarray(expected)
        check_operator(kind, [], array, **attributes)

    def test_filled(self) -> None:
        self.constant("constant", np.full((2, 3), 0.5, "f4"), is_floating_value=True, floating_value=0.5)
        self.constant("constant", np.full((2,), -3), is_floating_value=False, integer_value=-3)

    def test_ranges(self) -> None:
        self.constant("arange", np.arange(-2, 9, 3), integer_start=-2, integer_delta=3)
        self.constant("arange", np.arange(0.5, 2, 0.25, dtype="f4"), float_start=0.5, float_delta=0.25)

    @pytest.mark.parametrize("shape", [(3, 3), (2, 4)])
    def test_identity_matrices(self, shape: tuple[int, int]) -> None:
        self.constant("eye", np.eye(*shape, dtype="f4"))


@pytest.mark.parametrize(
    ("attributes", "dtype"),
    [
        ({"floating_on_value": 0.9, "floating_off_value": 0.1}, "f4"),
        ({"integer_on_value": 5, "integer_off_value": -1}, "i8"),
    ],
)
def test_one_hot(attributes: dict[str, Any], dtype: str) -> None:
    on, off = attributes.values()
    labels = np.array([[0, 3], [2, 1]])
    check_operator("one_hot", [labels], np.where(np.eye(4)[labels] > 0, on, off).astype(dtype), depth=4, **attributes)


# Resampling and padding beside PyTorch's.

X_OF_RESIZING = np.random.default_rng(0).standard_normal((2, 3, 5, 6)).astype("f4")
SCALES = {1: ["scale_factor"], 2: ["height_scale", "width_scale"], 3: ["depth_scale", "height_scale", "width_scale"]}
LINEAR = {1: ("linear", "linear"), 2: ("bilinear", "bilinear"), 3: ("trilinear", "trilinear")}


def resampled(x: AnyArray, scales: tuple[float, ...], mode: str, aligned: bool | None) -> AnyArray:
    found: AnyArray = functional.interpolate(
        torch.from_numpy(x), scale_factor=scales, mode=mode, align_corners=aligned, recompute_scale_factor=False
    ).numpy()
    return found


def attributes(scales: tuple[float, ...], aligned: bool | None) -> dict[str, Any]:
    named = dict(zip(SCALES[len(scales)], scales, strict=True))
    return named if aligned is None else {**named, "align_corners": aligned}


class TestUpsampling:
    @pytest.mark.parametrize("scales", [(2.0, 2.0), (1.5, 3.0), (0.5, 1.0), (1.3, 0.7)])
    def test_nearest(self, scales: tuple[float, ...]) -> None:
        check_operator(
            "upsample_nearest_2d",
            [X_OF_RESIZING],
            resampled(X_OF_RESIZING, scales, "nearest", None),
            **attributes(scales, None),
        )

    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("scales", [(2.0, 2.0), (1.5, 3.0), (1.3, 2.7)])
    @pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
    def test_interpolated(self, mode: str, scales: tuple[float, ...], aligned: bool) -> None:
        expected = resampled(X_OF_RESIZING, scales, mode, aligned)
        check_operator(f"upsample_{mode}_2d", [X_OF_RESIZING], expected, tolerance=1e-4, **attributes(scales, aligned))

    @pytest.mark.parametrize("axes", [1, 3])
    def test_along_one_axis_and_three(self, axes: int) -> None:
        x, scales = X_OF_RESIZING[:, :, :, 0] if axes == 1 else X_OF_RESIZING[:, :, None].repeat(2, 2), (2.0,) * axes
        name = {1: "linear", 3: "trilinear"}[axes]
        check_operator(f"upsample_{name}_{axes}d", [x], resampled(x, scales, name, False), **attributes(scales, False))
        nearest = resampled(x, scales, "nearest", None)
        check_operator(f"upsample_nearest_{axes}d", [x], nearest, **attributes(scales, None))

    def test_to_a_size_that_its_scales_do_not_give(self) -> None:
        """A size was given: OneFlow rounds the scale to fp32, and floor(size * scale) can be one less."""
        expected = functional.interpolate(torch.from_numpy(X_OF_RESIZING), size=(9, 7), mode="bilinear").numpy()
        scales = (9 / 5 - 1e-3, 7 / 6 - 1e-3)
        check_operator("upsample_bilinear_2d", [X_OF_RESIZING], expected, tolerance=1e-4, **attributes(scales, False))

    def test_channels_last(self) -> None:
        with pytest.raises(ConversionError, match="channels_last"):
            run_operator(
                "upsample_nearest_2d",
                [X_OF_RESIZING],
                [X_OF_RESIZING],
                data_format="channels_last",
                **attributes((1.0, 1.0), None),
            )


class TestPadding:
    @pytest.mark.parametrize(
        ("before", "after"),
        [([0, 0, 1, 2], [0, 0, 3, 0]), ([1, 0, 0, 0], [0, 2, 0, 0]), ([0, 0, -1, 0], [0, 0, 0, -2])],
    )
    def test_a_constant(self, before: list[int], after: list[int]) -> None:
        pairs = [pad for axis in (3, 2, 1, 0) for pad in (before[axis], after[axis])]
        expected = functional.pad(torch.from_numpy(X_OF_RESIZING), pairs, value=0.5).numpy()
        constants = {"floating_constant_value": 0.5, "integral_constant_value": 0}
        check_operator(
            "pad",
            [X_OF_RESIZING],
            np.ascontiguousarray(expected),
            padding_before=before,
            padding_after=after,
            **constants,
        )

    def test_integers(self) -> None:
        x = np.arange(6).reshape(2, 3)
        constants = {"floating_constant_value": 0.0, "integral_constant_value": -7}
        expected = np.pad(x, ((1, 0), (0, 2)), constant_values=-7)
        check_operator("pad", [x], expected, padding_before=[1, 0], padding_after=[0, 2], **constants)

    @pytest.mark.parametrize(("kind", "mode"), [("reflection", "reflect"), ("replication", "replicate")])
    def test_of_the_border(self, kind: str, mode: str) -> None:
        padding = [1, 2, 3, 0]  # left, right, top, bottom
        expected = functional.pad(torch.from_numpy(X_OF_RESIZING), padding, mode=mode).numpy()
        check_operator(f"{kind}_pad2d", [X_OF_RESIZING], expected, padding=padding)
        row = X_OF_RESIZING[:, :, 0]
        expected = functional.pad(torch.from_numpy(row), padding[:2], mode=mode).numpy()
        check_operator(f"{kind}_pad1d", [row], expected, padding=padding[:2])


class TestGrids:
    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
    @pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
    def test_samples(self, mode: str, padding_mode: str, aligned: bool) -> None:
        grid = np.random.default_rng(1).uniform(-1.3, 1.3, (2, 4, 7, 2)).astype("f4")
        sampled = functional.grid_sample(
            *map(torch.from_numpy, (X_OF_RESIZING, grid)), mode, padding_mode, aligned
        ).numpy()
        options = {"interpolation_mode": mode, "padding_mode": padding_mode, "align_corners": aligned}
        check_operator("grid_sample", [X_OF_RESIZING, grid], sampled, tolerance=1e-4, **options)

    def test_an_unknown_mode(self) -> None:
        grid = np.zeros((2, 5, 6, 2), "f4")
        with pytest.raises(ConversionError, match="interpolation_mode 'area' cannot be translated"):
            run_operator("grid_sample", [X_OF_RESIZING, grid], [X_OF_RESIZING], interpolation_mode="area")

    @pytest.mark.parametrize("aligned", [True, False])
    def test_affine_grids(self, aligned: bool) -> None:
        theta = np.random.default_rng(2).standard_normal((2, 2, 3)).astype("f4")
        expected = functional.affine_grid(torch.from_numpy(theta), [2, 3, 5, 4], aligned).numpy()
        check_operator("affine_grid", [theta], expected, size=[2, 3, 5, 4], align_corners=aligned)
