"""The tables on the screen."""

from __future__ import annotations

import json

import pytest
from stories import ON_CPU, make_judgment, story_document

from graphkiln.story.results import Observation, Record, Round, build_document
from graphkiln.story.tables import print_tables
from graphkiln.story.variants import final_variants, initial_variants
from graphkiln_backend.graph.precision import Precision


def test_tables_fit_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    variants = (*initial_variants(ON_CPU), *final_variants(Precision.INT8))
    each = Observation(
        judgment=make_judgment(interval=(0.982, 0.9999), right=0.935),
        rounds=(Round(number=0, per_second=1234.5, latencies_ms=(12345.6,), cores=16.1, memory_mb=12345.0),),
    )
    facts = {**story_document()["facts"], "machine": "Some(R) Processor, 2 cores"}
    record = Record(facts=facts, precision=Precision.INT8, seen={variant.key: each for variant in variants})
    print_tables(json.loads(json.dumps(build_document(variants, record, {variant.key: () for variant in variants}))))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\u2026" not in shown
    for variant in variants:
        assert variant.title in shown
