"""The variants: what a platform can execute, and their baselines."""

from __future__ import annotations

from stories import ON_CPU, ON_GPU

from graphkiln.story.variants import final_variants, initial_variants


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
