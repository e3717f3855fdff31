"""The vocabulary of configurations: no key with two meanings, none that nobody reads, none of a friend's forgotten."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest

from graphkiln_backend.engines.registry import engine_names
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.lowering import settings as keys
from graphkiln_backend.lowering.settings import Settings


@pytest.mark.parametrize(
    ("first", "second"),
    list(combinations([keys.OWN_KEYS, keys.SESSION_KEYS, keys.CUDA_KEYS, keys.TRITON_KEYS], 2)),
)
def test_no_key_belongs_to_two_vocabularies(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    assert set(first).isdisjoint(second)


@pytest.mark.parametrize("vocabulary", [keys.KNOWN_KEYS, keys.TENSORRT_KEYS, keys.OPENVINO_KEYS])
def test_no_key_stands_twice(vocabulary: tuple[str, ...]) -> None:
    assert len(set(vocabulary)) == len(vocabulary)


def test_every_key_of_ours_is_a_setting() -> None:
    assert set(keys.OWN_KEYS) <= {field.name for field in dataclasses.fields(Settings)}


def test_the_options_of_cuda_are_its_keys_but_for_the_setting() -> None:
    assert {*keys.CUDA_OPTIONS, "cudnn_conv_algo_search"} == set(keys.CUDA_KEYS)
    assert "cudnn_conv_algo_search" not in keys.CUDA_OPTIONS


def test_every_other_name_of_an_engine_is_that_of_an_engine() -> None:
    assert {*keys.ENGINE_FOR_XRT.values(), *keys.ENGINE_FOR_ACCELERATOR.values()} <= set(engine_names())


def test_every_accelerator_has_an_engine_and_its_settings() -> None:
    accelerators = {*keys.GPU_ACCELERATORS, *keys.CPU_ACCELERATORS}
    assert accelerators == set(keys.ENGINE_FOR_ACCELERATOR) == set(keys.ACCELERATOR_SETTINGS)
    for settings in keys.ACCELERATOR_SETTINGS.values():
        assert set(settings.values()) <= set(keys.OWN_KEYS)


def test_options_that_mean_a_setting_are_keys_of_their_accelerator() -> None:
    for name, known in {**keys.GPU_ACCELERATORS, **keys.CPU_ACCELERATORS}.items():
        if known is not None:
            assert set(keys.ACCELERATOR_SETTINGS[name]) <= set(known)


def test_the_numbers_of_the_c_backend_mean_searches() -> None:
    assert set(keys.CONV_SEARCH_NUMBERS.values()) == set(keys.CONV_SEARCHES)


class TestCheckKnown:
    def test_known_ones_pass(self) -> None:
        keys.check_known(keys.KNOWN_KEYS, keys.KNOWN_KEYS, "parameters")
        keys.check_known([], (), "parameters")

    def test_entries_of_the_runtime_pass_as_they_are(self) -> None:
        keys.check_known(["session.anything.at.all"], (), "parameters")

    @pytest.mark.parametrize(
        ("key", "near"),
        [
            ("precison", "precision"),
            ("Engine", "engine"),
            ("intra_op_num_threads", "intra_op_thread_count"),
            ("gpu_memory_limit", "gpu_mem_limit"),
            ("fall_back", "fallback"),
        ],
    )
    def test_the_nearest_one_is_the_hint(self, key: str, near: str) -> None:
        with pytest.raises(RepositoryError) as caught:
            keys.check_known(["engine", key], keys.KNOWN_KEYS, "parameters")
        assert caught.value.message == f"unknown key '{key}' in parameters"
        assert caught.value.hint == f"did you mean '{near}'?"

    def test_where_none_is_near_all_are_named(self) -> None:
        with pytest.raises(RepositoryError, match=r"in --set \(known: engine, threads\)"):
            keys.check_known(["zzz"], ("engine", "threads"), "--set")

    def test_a_prefix_in_the_middle_is_none(self) -> None:
        with pytest.raises(RepositoryError, match=r"unknown key 'my\.session\.x'"):
            keys.check_known(["my.session.x"], keys.KNOWN_KEYS, "parameters")
