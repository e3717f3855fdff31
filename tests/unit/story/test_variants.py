"""The variants: what a platform can execute, and their baselines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import ON_CPU, ON_GPU

from graphkiln.story.request import Platform
from graphkiln.story.variants import BASE_GRAPH, LOWEST_PRECISIONS, final_variants, initial_variants
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import parse_override
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_backend.proof.policy import BY_PRECISION


def test_what_a_cpu_cannot_do_is_said() -> None:
    unavailable = {variant.key: variant.unavailable for variant in initial_variants(ON_CPU) if variant.unavailable}
    assert unavailable == {"search": "cuDNN's search needs a GPU"}
    assert {variant.key for variant in initial_variants(ON_GPU) if variant.unavailable} == {"engine", "int8"}


def test_each_is_compared_with_one_before_it() -> None:
    for platform in (ON_CPU, ON_GPU):
        variants = (*initial_variants(platform), *final_variants("bf16"))
        keys = [variant.key for variant in variants]
        assert len(set(keys)) == len(keys)
        assert all(not variant.baseline or variant.baseline in keys[:index] for index, variant in enumerate(variants))


def test_the_chain_has_one_variant_for_each_step() -> None:
    for platform in (ON_CPU, ON_GPU):
        chain = [v for v in (*initial_variants(platform), *final_variants(Precision.FP16)) if not v.switch]
        assert [variant.step for variant in chain] == [0, 1, 2, 3, 4, 5]
        assert [variant.is_served for variant in chain] == [False, False, False, True, True, True]
        assert {variant.precision for variant in chain[:4]} == {Precision.FP32}


def test_switches_are_compared_with_the_plain_server() -> None:
    switches = [variant for variant in initial_variants(ON_CPU) if variant.switch]
    assert {variant.baseline for variant in switches} == {"parallel"}
    assert {variant.step for variant in switches} == {4}
    assert all(variant.is_served for variant in switches)


@pytest.mark.parametrize("platform", [ON_CPU, ON_GPU])
def test_what_decides_about_the_precision_can_be_executed(platform: Platform) -> None:
    switches = {variant.precision: variant for variant in initial_variants(platform) if variant.switch}
    for precision in LOWEST_PRECISIONS[platform.device.kind]:
        assert not switches[precision].unavailable


@pytest.mark.parametrize(
    ("precision", "settings", "saved"),
    [
        (Precision.INT8, ("engine=auto",), {"precision": Precision.INT8}),
        (Precision.BF16, ("engine=openvino", "precision=bf16"), {}),
        (Precision.FP32, ("engine=auto", "precision=fp32"), {}),
    ],
)
def test_int8_is_saved_in_the_graph_other_precisions_are_set(
    precision: Precision, settings: tuple[str, ...], saved: dict[str, object]
) -> None:
    compiled, served = final_variants(precision)
    assert compiled.settings == served.settings == settings
    assert compiled.graph is not None
    assert served.graph is not None
    assert compiled.graph.options == saved
    assert served.graph.options == {**saved, "input": "uint8-nhwc", "top_k": 5}
    assert str(precision) in compiled.title
    assert compiled.limits is served.limits


def test_a_fusion_is_by_itself() -> None:
    """Each fused graph skips the other fusion, the base skips both."""
    skipped = {
        v.key: v.graph.options["skip"] for v in initial_variants(ON_CPU) if v.graph and "skip" in v.graph.options
    }
    assert skipped["pad"] == ("add-into-producer",)
    assert skipped["add"] == ("pad-into-conv",)
    assert set(skipped["parallel"]) == {"pad-into-conv", "add-into-producer"}


def test_the_passes_that_are_skipped_exist() -> None:
    names = {each.name for each in OPTIMIZATIONS}
    assert set(BASE_GRAPH.options["skip"]) <= names


@pytest.mark.parametrize("platform", [ON_CPU, ON_GPU])
def test_settings_are_ones_that_serve_takes(platform: Platform) -> None:
    for variant in (*initial_variants(platform), *final_variants(Precision.BF16)):
        for setting in variant.settings:
            assert parse_override(setting)


@given(st.sampled_from(list(BY_PRECISION)))
def test_a_coarser_precision_is_allowed_more(precision: Precision) -> None:
    exact = initial_variants(ON_CPU)[2].limits
    assert final_variants(precision)[0].limits.relative_l2 >= exact.relative_l2
