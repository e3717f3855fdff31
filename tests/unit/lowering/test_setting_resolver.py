"""Precedence: the first source of a key wins, and whatever loses is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.lowering.settings import SettingResolver, Sourced, parse_count, parse_switch


@pytest.fixture
def resolver() -> SettingResolver:
    resolver = SettingResolver()
    resolver.add("threads", "2", "--set")
    resolver.add("engine", "openvino", "parameters.engine")
    return resolver


class TestPrecedence:
    def test_the_first_source_wins(self, resolver: SettingResolver) -> None:
        resolver.add("threads", "8", "parameters.threads")
        assert resolver.get("threads") == "2"
        assert resolver.values["threads"] == Sourced("2", "--set")
        assert resolver.rejected == ["threads 8 of parameters.threads: --set requests 2"]

    def test_a_source_that_agrees_is_not_rejected(self, resolver: SettingResolver) -> None:
        resolver.add("threads", "2", "parameters.threads")
        assert resolver.rejected == []
        assert resolver.values["threads"].origin == "--set"

    def test_a_key_without_a_source_is_empty(self, resolver: SettingResolver) -> None:
        assert resolver.get("streams") == ""
        assert "streams" not in resolver.values

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.sampled_from("123"))))
    def test_every_value_counts_or_is_told(self, sources: list[tuple[str, str, str]]) -> None:
        resolver = SettingResolver()
        for key, value, origin in sources:
            resolver.add(key, value, origin)
        for key, value, origin in sources:
            told = any(line.startswith(f"{key} {value} of {origin}: ") for line in resolver.rejected)
            assert told == (resolver.get(key) != value)
        assert {key: resolver.get(key) for key in resolver.values} == {key: v for key, v, _ in reversed(sources)}


class TestParsing:
    def test_the_value_that_counts_is_parsed(self, resolver: SettingResolver) -> None:
        assert resolver.parse("threads", parse_count, 0) == 2

    @pytest.mark.parametrize("default", [True, False])
    def test_a_key_without_a_source_has_the_default(self, resolver: SettingResolver, default: bool) -> None:
        assert resolver.parse("self_test", parse_switch, default) is default

    def test_a_malformed_value_names_its_source(self, resolver: SettingResolver) -> None:
        with pytest.raises(RepositoryError, match=r"parameters\.engine must be a whole number.*got 'openvino'"):
            resolver.parse("engine", parse_count, 0)

    def test_a_value_that_lost_is_not_parsed(self, resolver: SettingResolver) -> None:
        resolver.add("threads", "many", "parameters.threads")
        assert resolver.parse("threads", parse_count, 0) == 2


class TestCheck:
    def test_one_of_some_words(self, resolver: SettingResolver) -> None:
        resolver.check("engine", ("onnxruntime", "openvino"))
        resolver.check("layout", ())  # nobody gives it
        with pytest.raises(RepositoryError, match=r"parameters\.engine must be a, b, got 'openvino'"):
            resolver.check("engine", ("a", "b"))

    def test_an_empty_value_is_a_value(self, resolver: SettingResolver) -> None:
        resolver.add("layout", "", "parameters.layout")
        with pytest.raises(RepositoryError, match=r"parameters\.layout must be nchw, nhwc, got ''"):
            resolver.check("layout", ("nchw", "nhwc"))


class TestRejection:
    def test_keys_without_effect_stay_and_are_told(self, resolver: SettingResolver) -> None:
        resolver.reject_unused(["streams", "threads"], "it is Sunday")
        assert resolver.rejected == ["threads 2 of --set: it is Sunday"]
        assert resolver.get("threads") == "2"

    def test_a_removed_key_is_gone_and_told(self, resolver: SettingResolver) -> None:
        resolver.remove("threads", "there are none")
        assert resolver.rejected == ["threads 2 of --set: there are none"]
        assert "threads" not in resolver.values
        assert resolver.parse("threads", parse_count, 0) == 0

    def test_lines_come_in_their_order(self, resolver: SettingResolver) -> None:
        resolver.add("engine", "auto", "flag")
        resolver.reject("layout", Sourced("nhwc", "block"), "another engine")
        resolver.add("threads", "3", "flag")
        assert [line.split()[0] for line in resolver.rejected] == ["engine", "layout", "threads"]
