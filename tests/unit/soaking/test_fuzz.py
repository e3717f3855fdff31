"""The fuzzer's mutations and its verdict."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from soaking import fuzz


@settings(max_examples=40)
@given(st.data())
def test_mutation_makes_json_and_keeps_the_original(data: st.DataObject) -> None:
    document = {"inputs": [{"name": "x", "shape": [1, 3], "data": [1.0, 2.0, 3.0]}]}
    before = json.dumps(document)
    changed = data.draw(fuzz.mutated(document))
    json.dumps(changed)
    assert json.dumps(document) == before


@settings(max_examples=40)
@given(st.binary(max_size=20), st.data())
def test_damaged_bytes_are_no_longer_than_the_content(content: bytes, data: st.DataObject) -> None:
    assert len(data.draw(fuzz.damaged(content))) <= len(content)


def test_every_failure_is_reported() -> None:
    good = fuzz.FuzzResult(seed=1, sound=True)
    assert fuzz.fuzz_failures(good) == []
    assert "passed" in fuzz.fuzz_to_text(good)
    bad = fuzz.FuzzResult(seed=1, refused=["HTTP valid"], gave_up=1)
    assert len(fuzz.fuzz_failures(bad)) == 3
    assert "FAILED" in fuzz.fuzz_to_text(bad)
    assert fuzz.fuzz_to_json(bad)["failures"] == fuzz.fuzz_failures(bad)
