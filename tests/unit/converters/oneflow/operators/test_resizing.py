"""Resampling and padding beside PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from translating import check_operator, run_operator

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError

X = np.random.default_rng(0).standard_normal((2, 3, 5, 6)).astype("f4")
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
        check_operator("upsample_nearest_2d", [X], resampled(X, scales, "nearest", None), **attributes(scales, None))

    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("scales", [(2.0, 2.0), (1.5, 3.0), (1.3, 2.7)])
    @pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
    def test_interpolated(self, mode: str, scales: tuple[float, ...], aligned: bool) -> None:
        expected = resampled(X, scales, mode, aligned)
        check_operator(f"upsample_{mode}_2d", [X], expected, tolerance=1e-4, **attributes(scales, aligned))

    @pytest.mark.parametrize("axes", [1, 3])
    def test_along_one_axis_and_three(self, axes: int) -> None:
        x, scales = X[:, :, :, 0] if axes == 1 else X[:, :, None].repeat(2, 2), (2.0,) * axes
        name = {1: "linear", 3: "trilinear"}[axes]
        check_operator(f"upsample_{name}_{axes}d", [x], resampled(x, scales, name, False), **attributes(scales, False))
        nearest = resampled(x, scales, "nearest", None)
        check_operator(f"upsample_nearest_{axes}d", [x], nearest, **attributes(scales, None))

    def test_to_a_size_that_its_scales_do_not_give(self) -> None:
        """A size was given: OneFlow rounds the scale to fp32, and floor(size * scale) can be one less."""
        expected = functional.interpolate(torch.from_numpy(X), size=(9, 7), mode="bilinear").numpy()
        scales = (9 / 5 - 1e-3, 7 / 6 - 1e-3)
        check_operator("upsample_bilinear_2d", [X], expected, tolerance=1e-4, **attributes(scales, False))

    def test_channels_last(self) -> None:
        with pytest.raises(ConversionError, match="channels_last"):
            run_operator("upsample_nearest_2d", [X], [X], data_format="channels_last", **attributes((1.0, 1.0), None))


class TestPadding:
    @pytest.mark.parametrize(
        ("before", "after"),
        [([0, 0, 1, 2], [0, 0, 3, 0]), ([1, 0, 0, 0], [0, 2, 0, 0]), ([0, 0, -1, 0], [0, 0, 0, -2])],
    )
    def test_a_constant(self, before: list[int], after: list[int]) -> None:
        pairs = [pad for axis in (3, 2, 1, 0) for pad in (before[axis], after[axis])]
        expected = functional.pad(torch.from_numpy(X), pairs, value=0.5).numpy()
        constants = {"floating_constant_value": 0.5, "integral_constant_value": 0}
        check_operator(
            "pad", [X], np.ascontiguousarray(expected), padding_before=before, padding_after=after, **constants
        )

    def test_integers(self) -> None:
        x = np.arange(6).reshape(2, 3)
        constants = {"floating_constant_value": 0.0, "integral_constant_value": -7}
        expected = np.pad(x, ((1, 0), (0, 2)), constant_values=-7)
        check_operator("pad", [x], expected, padding_before=[1, 0], padding_after=[0, 2], **constants)

    @pytest.mark.parametrize(("kind", "mode"), [("reflection", "reflect"), ("replication", "replicate")])
    def test_of_the_border(self, kind: str, mode: str) -> None:
        padding = [1, 2, 3, 0]  # left, right, top, bottom
        expected = functional.pad(torch.from_numpy(X), padding, mode=mode).numpy()
        check_operator(f"{kind}_pad2d", [X], expected, padding=padding)
        row = X[:, :, 0]
        expected = functional.pad(torch.from_numpy(row), padding[:2], mode=mode).numpy()
        check_operator(f"{kind}_pad1d", [row], expected, padding=padding[:2])


class TestGrids:
    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
    @pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
    def test_samples(self, mode: str, padding_mode: str, aligned: bool) -> None:
        grid = np.random.default_rng(1).uniform(-1.3, 1.3, (2, 4, 7, 2)).astype("f4")
        sampled = functional.grid_sample(*map(torch.from_numpy, (X, grid)), mode, padding_mode, aligned).numpy()
        options = {"interpolation_mode": mode, "padding_mode": padding_mode, "align_corners": aligned}
        check_operator("grid_sample", [X, grid], sampled, tolerance=1e-4, **options)

    def test_an_unknown_mode(self) -> None:
        grid = np.zeros((2, 5, 6, 2), "f4")
        with pytest.raises(ConversionError, match="interpolation_mode 'area' cannot be translated"):
            run_operator("grid_sample", [X, grid], [X], interpolation_mode="area")

    @pytest.mark.parametrize("aligned", [True, False])
    def test_affine_grids(self, aligned: bool) -> None:
        theta = np.random.default_rng(2).standard_normal((2, 2, 3)).astype("f4")
        expected = functional.affine_grid(torch.from_numpy(theta), [2, 3, 5, 4], aligned).numpy()
        check_operator("affine_grid", [theta], expected, size=[2, 3, 5, 4], align_corners=aligned)
