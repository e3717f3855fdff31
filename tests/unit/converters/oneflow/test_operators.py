"""Attributes of OneFlow's operations compared with NumPy and PyTorch, and refused operations.

`tests/conversion/test_oneflow.py` compares each operation with OneFlow's recorded outputs, with one set of attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from translating import check_operator, run_operator

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError


def random(*shape: int) -> AnyArray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("f4")


def by_torch(function: Callable[..., Any], *arrays: AnyArray, **options: Any) -> AnyArray:
    found: AnyArray = np.ascontiguousarray(function(*map(torch.from_numpy, arrays), **options).numpy())
    return found


X = np.arange(2 * 3 * 4 * 5, dtype="f4").reshape(2, 3, 4, 5)
A, B = random(2, 4, 4), random(1, 2, 4, 4)[0]
FLOAT = {"has_float_operand": True, "has_int_operand": False, "float_operand": 1.5, "int_operand": 0}
CHANNELS_LAST = {"data_format": "channels_last"}


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "words"),
    [
        ("floordiv", [np.array([-7, 7]), np.array([2, 2])], {}, "negative quotient of integers"),
        ("conv2d", [random(1, 2, 4, 4), random(2, 2, 1, 1)], CHANNELS_LAST, "channels_last"),
        ("deconv2d", [random(1, 2, 4, 4), random(2, 2, 1, 1)], CHANNELS_LAST, "channels_last"),
        ("unfold", [random(1, 2, 4, 4)], CHANNELS_LAST, "channels_last"),
        ("fold", [random(1, 2, 4, 4)], CHANNELS_LAST, "channels_last"),
        ("max_pool_2d", [random(1, 2, 4, 4)], CHANNELS_LAST, "channels_last"),
        ("upsample_nearest_2d", [random(1, 2, 4, 4)], CHANNELS_LAST, "channels_last"),
        (
            "avg_pool_2d",
            [random(1, 1, 4, 4)],
            {"divisor_override": 3, "ceil_mode": True, "kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0]},
            "divisor_override together with ceil_mode",
        ),
        ("matmul", [A[0], B[0, :3]], {}, "do not fit each other: MatMul"),
        ("normalization", [X, *[random(3)] * 4], {"training": True}, "saved in training mode"),
        (
            "normalization",
            [X, random(3), random(3)],
            {"axis": 1, "epsilon": 1e-5, "operand_segment_sizes": [1, 0, 0, 1, 1, 0]},
            "no running statistics",
        ),
        ("layer_norm", [X], {"begin_norm_axis": 2, "begin_params_axis": 3}, "is not begin_norm_axis"),
        ("layer_norm", [X, X[0, 0, 0]], {"begin_norm_axis": 3, "scale": True, "center": True}, "has 1 parameters"),
        ("group_norm", [X], {"num_groups": 3, "activation": "silu"}, "activation 'silu'"),
        ("slice", [X], {"start": [0], "stop": [2], "step": [1]}, "are not as expected"),
        ("slice_update", [X, X[::2]], {"start": [0] * 4, "stop": [2, 3, 4, 5], "step": [2, 1, 1, 1]}, "a step other"),
        ("roll", [X], {"shifts": [1], "dims": [-1]}, "dims is not given"),
        ("grid_sample", [X, np.zeros((2, 5, 6, 2), "f4")], {"interpolation_mode": "area"}, "interpolation_mode"),
    ],
)
def test_untranslatable_attributes_are_refused(
    kind: str, inputs: list[AnyArray], attributes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConversionError, match=words):
        run_operator(kind, inputs, inputs[:1], **attributes)


def test_maxima_of_windows_of_several_sizes_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"cannot be divided into \[3, 3\]"):
        run_operator("adaptive_max_pool2d", [random(1, 1, 8, 8)], [random(1, 1, 3, 3)])


class TestElementwise:
    @pytest.mark.parametrize("axis", [1, 3, -1])
    @pytest.mark.parametrize(("kind", "function"), [("fused_bias_add_gelu", functional.gelu), ("bias_add", None)])
    def test_a_bias_along_an_axis(self, axis: int, kind: str, function: Any) -> None:
        bias = random(X.shape[axis])
        total = X / 60 + np.moveaxis(np.broadcast_to(bias, (1, 1, 1, len(bias))), -1, axis)
        check_operator(kind, [X / 60, bias], by_torch(function, total) if function else total, axis=axis)

    @pytest.mark.parametrize("dtype", ["i4", "i8"])
    def test_integers_are_clipped_by_their_own_bounds(self, dtype: str) -> None:
        x = np.arange(-5, 6).astype(dtype)
        bounds = {"floating_min": 0.0, "floating_max": 0.0, "integral_min": -2, "integral_max": 3}
        check_operator("clip_by_scalar", [x], np.clip(x, -2, 3), **bounds)

    @pytest.mark.parametrize("dtype", ["f4", "i8"])
    def test_the_remainder_has_the_sign_of_the_dividend(self, dtype: str) -> None:
        x, y = np.array([-7, 7, -7, 7]).astype(dtype), np.array([3, 3, -3, -3]).astype(dtype)
        check_operator("broadcast_fmod", [x, y], np.fmod(x, y))

    def test_angles_of_all_quadrants(self) -> None:
        y, x = (axis.ravel().astype("f4") for axis in np.meshgrid([-2.0, -0.5, 0.0, 0.5, 2.0], [-1.0, 0.0, 1.0]))
        check_operator("atan2", [y, x], np.arctan2(y, x))

    def test_a_scalar_takes_the_type_of_the_tensor(self) -> None:
        integer = {"has_float_operand": False, "has_int_operand": True, "float_operand": 0.0, "int_operand": 3}
        check_operator("scalar_add", [np.arange(-3, 3)], np.arange(6), **integer)
        check_operator("scalar_mul", [X], X * 3, **integer)

    @pytest.mark.parametrize(
        ("kind", "function"), [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)]
    )
    def test_all_numbers_but_zero_are_true(self, kind: str, function: Callable[..., Any]) -> None:
        x, y = np.array([0, 0, -2, 0.5], "f4"), np.array([0, 3, 0, 1], "f4")
        check_operator(f"broadcast_logical_{kind}", [x, y], function(x, y))

    @pytest.mark.parametrize(("kind", "scalar_first"), [("where_scalar_x", True), ("where_scalar_y", False)])
    def test_a_scalar_on_either_side(self, kind: str, scalar_first: bool) -> None:
        condition = np.array([[True], [False], [True], [True]])
        x, y = (np.float32(1.5), X) if scalar_first else (X, np.float32(1.5))
        check_operator(kind, [condition, X], np.where(condition, x, y), **FLOAT)


class TestReductions:
    @pytest.mark.parametrize("keepdims", [True, False])
    @pytest.mark.parametrize("axes", [[0], [-1], [2, 0], [0, 1, 2, 3], []])
    def test_axes(self, axes: list[int], keepdims: bool) -> None:
        expected = np.asarray(X.sum(tuple(axes) or None, keepdims=keepdims))
        check_operator("reduce_sum", [X], expected, axis=axes, keepdims=keepdims)

    @pytest.mark.parametrize("unbiased", [True, False])
    @pytest.mark.parametrize("axes", [[1], [2, 0]])
    def test_variance(self, axes: list[int], unbiased: bool) -> None:
        expected = np.asarray(A.var(tuple(axes), ddof=int(unbiased)))
        check_operator("var", [A], expected, dim=axes, keepdim=False, unbiased=unbiased)

    def test_the_unbiased_variance_of_one_element_is_zero(self) -> None:
        """OneFlow returns 0 where the divisor would be 0."""
        check_operator("var", [A[:, :1]], np.zeros((2, 4), "f4"), dim=[1], keepdim=False, unbiased=True)

    @pytest.mark.parametrize(("kind", "function"), [("reduce_any", np.any), ("reduce_all", np.all)])
    @pytest.mark.parametrize("dtype", ["?", "f4", "i4"])
    def test_any_and_all_of_every_type(self, kind: str, function: Callable[..., Any], dtype: str) -> None:
        x = np.array([[0, 0, 0], [0, 2, 0], [1, -1, 3]]).astype(dtype)
        check_operator(kind, [x], function(x, axis=1), axis=[1], keepdims=False)
        check_operator(kind, [x], function(x, axis=(0, 1), keepdims=True), axis=[0, 1], keepdims=True)

    def test_the_first_of_equal_maxima(self) -> None:
        check_operator("argmax", [np.array([[1, 5, 5], [7, 2, 7]], "f4")], np.array([1, 0]))

    @pytest.mark.parametrize(("direction", "sign"), [("ASCENDING", 1), ("DESCENDING", -1)])
    def test_sorting(self, direction: str, sign: int) -> None:
        check_operator("arg_sort", [A], np.argsort(sign * A, axis=-1).astype("i4"), direction=direction)


class TestProducts:
    @pytest.mark.parametrize("transpose_a", [True, False])
    @pytest.mark.parametrize("transpose_b", [True, False])
    def test_matrix_products_with_transposed_operands(self, transpose_a: bool, transpose_b: bool) -> None:
        a, b = A.swapaxes(1, 2) if transpose_a else A, B.swapaxes(1, 2) if transpose_b else B
        check_operator("batch_matmul", [A, B], a @ b, transpose_a=transpose_a, transpose_b=transpose_b)

    def test_a_factor_does_not_scale_the_addend(self) -> None:
        check_operator("matmul", [A[0], B[0], A[1]], 0.5 * (A[0] @ B[0]) + A[1], alpha=0.5)


class TestNormalizations:
    X = random(2, 6, 4, 5)

    @pytest.mark.parametrize("axis", [1, 2, -1])
    def test_batch_norm_along_any_axis(self, axis: int) -> None:
        mean, variance, gamma, beta = random(4, self.X.shape[axis])
        numbers = [mean, np.abs(variance) + 0.1, gamma, beta]
        first = np.ascontiguousarray(self.X.swapaxes(1, axis))
        expected = np.ascontiguousarray(by_torch(functional.batch_norm, first, *numbers, eps=1e-3).swapaxes(1, axis))
        options = {"axis": axis, "epsilon": 1e-3, "training": False}
        check_operator("normalization", [self.X, *numbers], expected, **options)
        if axis == 1:
            check_operator("normalization_infer", [self.X, *numbers, self.X], expected + self.X, **options)

    @pytest.mark.parametrize("axis", [1, -1])
    @pytest.mark.parametrize(("scale", "center"), [(True, True), (True, False), (False, True), (False, False)])
    def test_layer_norm_with_and_without_parameters(self, axis: int, scale: bool, center: bool) -> None:
        shape = self.X.shape[axis:]
        gamma, beta = random(*shape), random(*shape) + 1
        expected = functional.layer_norm(
            torch.from_numpy(self.X),
            shape,
            torch.from_numpy(gamma) if scale else None,
            torch.from_numpy(beta) if center else None,
            eps=1e-4,
        )
        operands = [self.X, *[beta] * center, *[gamma] * scale]  # OneFlow's order
        attributes: dict[str, Any] = {"begin_norm_axis": axis, "begin_params_axis": axis, "epsilon": 1e-4}
        check_operator("layer_norm", operands, expected.numpy(), scale=scale, center=center, **attributes)

    @pytest.mark.parametrize("affine", [True, False])
    def test_group_norm_with_and_without_parameters(self, affine: bool) -> None:
        gamma, beta = random(6), random(6) + 1
        given = [gamma, beta] if affine else []
        expected = functional.group_norm(torch.from_numpy(self.X), 2, *map(torch.from_numpy, given), eps=1e-4).numpy()
        check_operator(
            "group_norm", [self.X, *given[::-1]], expected, affine=affine, num_groups=2, epsilon=1e-4, tolerance=1e-4
        )

    def test_a_vector_of_zeros_has_the_length_of_epsilon(self) -> None:
        x = self.X.copy()
        x[0] = 0
        squares = (x**2).sum(1, keepdims=True)
        expected = x / np.sqrt(np.maximum(squares, 1e-6))
        check_operator("l2_normalize", [x], [expected, squares], axis=1, epsilon=1e-6)


def geometry(axes: int, stride: int, padding: int, dilation: int, groups: int) -> dict[str, Any]:
    return {
        "strides": [stride] * axes,
        "padding_before": [padding] * axes,
        "dilation_rate": [dilation] * axes,
        "groups": groups,
        "kernel_size": [3] * axes,
    }


WINDOWS = [
    {"kernel_size": [3, 2], "stride": [2, 1], "padding": [1, 0], "dilation": [1, 1]},
    {"kernel_size": [2, 3], "stride": [1, 2], "padding": [2, 1], "dilation": [2, 1]},
]


class TestWindows:
    @pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), [(2, 1, 1, 1), (1, 2, 2, 1), (3, 1, 1, 2)])
    @pytest.mark.parametrize("axes", [1, 2, 3])
    def test_convolutions(self, axes: int, stride: int, padding: int, dilation: int, groups: int) -> None:
        x, weight = random(2, 4, *[9] * axes), random(8, 4 // groups, *[3] * axes)
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        expected = by_torch(getattr(functional, f"conv{axes}d"), x, weight, **options)
        attributes = geometry(axes, stride, padding, dilation, groups)
        check_operator(f"conv{axes}d", [x, weight], expected, tolerance=1e-4, **attributes)

    @pytest.mark.parametrize(("bias", "addend"), [(True, False), (False, True), (True, True)])
    def test_optional_operands_of_a_convolution(self, bias: bool, addend: bool) -> None:
        x, weight = random(2, 4, 7, 7), random(8, 4, 3, 3)
        given, added = random(8), random(2, 8, 5, 5)
        expected = by_torch(functional.conv2d, x, weight, *[given] * bias) + (added if addend else 0)
        operands = [x, weight, *[given] * bias, *[added] * addend]
        sizes = {"operand_segment_sizes": [1, 1, int(bias), int(addend)]}
        check_operator("conv2d", operands, expected, tolerance=1e-4, **geometry(2, 1, 0, 1, 1), **sizes)

    @pytest.mark.parametrize(("stride", "padding", "output_padding", "groups"), [(2, 1, 1, 1), (3, 0, 2, 2)])
    @pytest.mark.parametrize("axes", [1, 2, 3])
    def test_transposed_convolutions(
        self, axes: int, stride: int, padding: int, output_padding: int, groups: int
    ) -> None:
        x, weight = random(2, 4, *[5] * axes), random(4, 8 // groups, *[3] * axes)
        options = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups}
        expected = by_torch(getattr(functional, f"conv_transpose{axes}d"), x, weight, **options)
        attributes = {**geometry(axes, stride, padding, 1, groups), "output_padding": [output_padding] * axes}
        check_operator(f"deconv{axes}d", [x, weight], expected, tolerance=1e-4, **attributes)

    @pytest.mark.parametrize("window", WINDOWS)
    def test_unfold_and_fold(self, window: dict[str, list[int]]) -> None:
        x = random(2, 3, 8, 9)
        columns = by_torch(functional.unfold, x, **window)
        attributes = {{"stride": "strides", "dilation": "dilation_rate"}.get(k, k): v for k, v in window.items()}
        check_operator("unfold", [x], columns, **attributes)
        folded = by_torch(functional.fold, columns, output_size=[8, 9], **window)
        check_operator("fold", [columns], folded, output_size=[8, 9], **attributes)

    @pytest.mark.parametrize("ceil_mode", [True, False])
    @pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [(3, 2, 1, 1), (3, 1, 1, 2), (3, 2, 0, 1)])
    def test_maxima_and_their_indices(
        self, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
    ) -> None:
        """Indices count the elements of one channel of one sample."""
        x = random(2, 3, 8, 8)
        values, indices = functional.max_pool2d(
            torch.from_numpy(x), kernel, stride, padding, dilation, ceil_mode, return_indices=True
        )
        attributes: dict[str, Any] = {"kernel_size": [kernel] * 2, "stride": [stride] * 2, "padding": [padding] * 2}
        attributes |= {"dilation": [dilation] * 2, "ceil_mode": ceil_mode}
        check_operator("max_pool_2d", [x], [values.numpy(), indices.numpy()], return_indices=True, **attributes)
        check_operator("max_pool_2d", [x], values.numpy(), **attributes)

    @pytest.mark.parametrize(
        ("padding", "ceil_mode", "counted", "divisor"),
        [(1, False, True, None), (1, False, False, None), (0, True, True, None), (1, False, False, 5)],
    )
    def test_means_of_windows(self, padding: int, ceil_mode: bool, counted: bool, divisor: int | None) -> None:
        x = random(2, 3, 8, 8)
        expected = functional.avg_pool2d(torch.from_numpy(x), 3, 2, padding, ceil_mode, counted, divisor).numpy()
        attributes = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [padding] * 2, "ceil_mode": ceil_mode}
        attributes |= {"count_include_pad": counted, "divisor_override": divisor or 0}
        check_operator("avg_pool_2d", [x], expected, **attributes)

    @pytest.mark.parametrize("target", [(1, 1), (4, 4), (3, 5), (8, 8), (11, 2)])
    def test_means_down_to_a_size(self, target: tuple[int, int]) -> None:
        x = random(2, 3, 8, 8)
        check_operator("adaptive_avg_pool2d", [x], by_torch(functional.adaptive_avg_pool2d, x, output_size=target))


class TestArrangement:
    @pytest.mark.parametrize(
        ("start", "stop", "step"),
        [
            ([0, 1, 0, 0], [2, 3, 4, 5], [1, 1, 1, 1]),
            ([0, 0, 1, 0], [2, 3, 4, 5], [1, 1, 2, 2]),
            ([0, 0, 0, 0], [2, 3, 99, 99], [1, 1, 1, 1]),
        ],
    )
    def test_slices(self, start: list[int], stop: list[int], step: list[int]) -> None:
        ranges = tuple(slice(*bounds) for bounds in zip(start, stop, step, strict=True))
        check_operator("slice", [X], X[ranges], start=start, stop=stop, step=step)

    @pytest.mark.parametrize(
        ("start", "stop"), [([0, 0, 1, 2], [2, 3, 4, 4]), ([1, 1, 1, 1], [2, 2, 2, 2]), ([0, 0, 0, 0], [2, 3, 4, 5])]
    )
    def test_an_update_replaces_a_part(self, start: list[int], stop: list[int]) -> None:
        ranges = tuple(slice(*bounds) for bounds in zip(start, stop, strict=True))
        expected, part = X.copy(), -1 - X[ranges]
        expected[ranges] = part
        check_operator("slice_update", [X, part], expected, start=start, stop=stop, step=[1] * 4)

    @pytest.mark.parametrize(("shifts", "dims"), [([1, -1], [2, 3]), ([7], [2]), ([4], [2]), ([1], [-2])])
    def test_roll(self, shifts: list[int], dims: list[int]) -> None:
        check_operator("roll", [X], np.roll(X, shifts, dims), shifts=shifts, dims=dims)

    @pytest.mark.parametrize("diagonal", [-2, 1, 9])
    @pytest.mark.parametrize("kind", ["tril", "triu"])
    def test_triangles(self, kind: str, diagonal: int) -> None:
        check_operator(kind, [X], getattr(np, kind)(X, diagonal), diagonal=diagonal)
        expected = np.where(getattr(np, kind)(np.ones((4, 5), bool), diagonal), X, np.float32(-1e4))
        fill = {"is_floating_fill_value": True, "floating_fill_value": -1e4}
        check_operator(kind, [X], expected, diagonal=diagonal, **fill)

    def test_constants_of_integers(self) -> None:
        check_operator("constant", [], np.full((2,), -3), is_floating_value=False, integer_value=-3)
        check_operator("arange", [], np.arange(-2, 9, 3), integer_start=-2, integer_delta=3)
        labels = np.array([[0, 3], [2, 1]])
        expected = np.where(np.eye(4)[labels] > 0, 5, -1)
        check_operator("one_hot", [labels], expected, depth=4, integer_on_value=5, integer_off_value=-1)

    @pytest.mark.parametrize("aligned", [True, False, None])
    @pytest.mark.parametrize("scales", [(1.5, 3.0), (1.3, 2.7), (0.5, 1.0)])
    def test_resampling(self, scales: tuple[float, float], aligned: bool | None) -> None:
        x = random(2, 3, 5, 6)
        modes = ("nearest",) if aligned is None else ("bilinear", "bicubic")
        for mode in modes:
            expected = functional.interpolate(
                torch.from_numpy(x), scale_factor=scales, mode=mode, align_corners=aligned
            )
            options = dict(zip(("height_scale", "width_scale"), scales, strict=True))
            options |= {} if aligned is None else {"align_corners": aligned}
            check_operator(f"upsample_{mode}_2d", [x], expected.numpy(), tolerance=1e-4, **options)

    def test_resampling_to_a_size_that_its_scales_do_not_give(self) -> None:
        """A size was given: OneFlow rounds the scale to fp32, and floor(size * scale) can be one less."""
        x = random(2, 3, 5, 6)
        expected = by_torch(functional.interpolate, x, size=(9, 7), mode="bilinear")
        scales = {"height_scale": 9 / 5 - 1e-3, "width_scale": 7 / 6 - 1e-3, "align_corners": False}
        check_operator("upsample_bilinear_2d", [x], expected, tolerance=1e-4, **scales)

    def test_padding_of_integers_and_with_negative_widths(self) -> None:
        x = np.arange(6).reshape(2, 3)
        constants = {"floating_constant_value": 0.0, "integral_constant_value": -7}
        expected = np.pad(x, ((1, 0), (0, 2)), constant_values=-7)
        check_operator("pad", [x], expected, padding_before=[1, 0], padding_after=[0, 2], **constants)
        check_operator("pad", [x], x[1:, :1], padding_before=[-1, 0], padding_after=[0, -2], **constants)

    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
    @pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
    def test_grid_samples(self, mode: str, padding_mode: str, aligned: bool) -> None:
        x = random(2, 3, 5, 6)
        grid = np.random.default_rng(1).uniform(-1.3, 1.3, (2, 4, 7, 2)).astype("f4")
        options = {"padding_mode": padding_mode, "align_corners": aligned}
        expected = by_torch(functional.grid_sample, x, grid, mode=mode, **options)
        check_operator("grid_sample", [x, grid], expected, tolerance=1e-4, interpolation_mode=mode, **options)

    @pytest.mark.parametrize("aligned", [True, False])
    def test_affine_grids(self, aligned: bool) -> None:
        theta = random(2, 2, 3)
        expected = by_torch(functional.affine_grid, theta, size=[2, 3, 5, 4], align_corners=aligned)
        check_operator("affine_grid", [theta], expected, size=[2, 3, 5, 4], align_corners=aligned)
