"""How a configuration that is served is known again, whichever protocol shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphkiln.tuning.running_server import is_left, scheduling, stored_document, without_cache

OVER_HTTP: dict[str, Any] = {
    "name": "m",
    "max_batch_size": 8,
    "dynamic_batching": {"max_queue_delay_microseconds": 500, "preserve_ordering": False},
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 2}],
    "parameters": {"engine": {"string_value": "openvino"}},
}
OVER_GRPC = {**OVER_HTTP, "dynamic_batching": {"max_queue_delay_microseconds": "500"}, "output": []}


def test_both_protocols_show_the_same() -> None:
    assert scheduling(OVER_HTTP) == scheduling(OVER_GRPC) == (8, 500, [2], {"engine": "openvino"})
    assert scheduling({}) == (0, 0, [], {})


@pytest.mark.parametrize(
    "change",
    [{"max_batch_size": 4}, {"dynamic_batching": {}}, {"instance_group": [{"count": 1}]}, {"parameters": {}}],
)
def test_whatever_a_candidate_changes_is_seen(change: dict[str, Any]) -> None:
    assert scheduling({**OVER_HTTP, **change}) != scheduling(OVER_HTTP)


def test_what_was_there_before_is_not_what_a_search_left() -> None:
    """The search has loaded that, too: what serves today is a candidate like any other."""
    smaller = {**OVER_HTTP, "max_batch_size": 4}
    assert is_left(smaller, OVER_HTTP, [OVER_HTTP, smaller])
    assert not is_left(OVER_GRPC, OVER_HTTP, [OVER_HTTP, smaller])
    assert not is_left({**OVER_HTTP, "max_batch_size": 2}, OVER_HTTP, [smaller])


def test_a_cache_is_off_where_there_is_one() -> None:
    assert without_cache(OVER_HTTP) == OVER_HTTP
    cached = {**OVER_HTTP, "response_cache": {"enable": True}}
    assert without_cache(cached)["response_cache"] == {"enable": False}


def test_what_a_folder_holds_is_compared_with_what_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(
        "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 500 } instance_group { count: 2 } "
        'parameters { key: "engine" value { string_value: "openvino" } }\n'
    )
    assert scheduling(stored_document(tmp_path)) == scheduling(OVER_HTTP)
    assert scheduling(stored_document(tmp_path / "none")) == scheduling({})
