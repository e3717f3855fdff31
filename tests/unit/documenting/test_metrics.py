"""The page of metrics."""

from __future__ import annotations

import re

from documenting import metrics
from graphkiln_backend.triton.metric_catalog import METRICS


def test_each_metric_has_a_row() -> None:
    page = metrics.render()
    assert "| `graphkiln_nodes` | gauge | `instance`, `executor` | nodes that each executor really ran |" in page
    assert "| `graphkiln_restarts_total` | counter | `cause` only |" in page
    assert "| `nv_inference_count` | counter | - | samples that were computed |" in page
    named = re.findall(r"^\| `([a-z_0-9]+)`", page, re.MULTILINE)
    assert len(named) == len(set(named)) == len(METRICS) + len(metrics.TRITONS)
