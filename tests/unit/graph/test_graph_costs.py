"""Measured node times, read from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import NodeTimes

TIMES = NodeTimes(
    graph="ab", runtime="onnxruntime 1", machine="a core", batches={"8": {"a": 0.5}, "1": {"a": 0.1, "b": 0.0}}
)


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(TIMES.text())
    found = NodeTimes.read(tmp_path / "times.json")
    assert found == TIMES
    assert found.sizes == (1, 8)
    assert found.at(1) == {"a": 0.1, "b": 0.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batches": {}}, "nothing was measured"),
        ({"batches": {"0": {"a": 1.0}}}, "'0' is not a batch size"),
        ({"batches": {"9" * 5000: {"a": 1.0}}}, "is not a batch size"),
        ({"batches": {"1": {"a": 10**400}}}, "cannot be used"),
        ({"batches": {"1": {"a": -1.0}}}, "batches.1.a: -1.0 is not a number of seconds"),
        ({"batches": {"1": {"a": float("nan")}}}, "nan is not a number of seconds"),
        ({"batches": {"1": {}}}, "no node took any time"),
        ({"batches": {"1": {"a": "fast"}}}, "batches.1.a"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_invalid_times(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({**json.loads(TIMES.text()), **change}))
    with pytest.raises(LoweringError, match=words) as raised:
        NodeTimes.read(path)
    assert "graphkiln lower STORE/NAME --measure" in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "times.json").write_bytes(content)
    with pytest.raises(LoweringError, match="cannot be used"):
        NodeTimes.read(tmp_path / "times.json")
