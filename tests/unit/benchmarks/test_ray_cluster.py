"""Nodes that a busy machine does not start in time."""

from __future__ import annotations

from typing import Any

import pytest
from ray_cluster import RayNodes


class FakeCluster:
    """Starts a node after so many failures."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures

    def add_node(self, **_: Any) -> str:
        if self.failures:
            raise self.failures.pop()
        return "node"


def nodes(*failures: Exception) -> RayNodes:
    made = RayNodes.__new__(RayNodes)
    made._cluster = FakeCluster(list(failures))  # type: ignore[assignment]
    return made


def test_a_node_that_did_not_start_in_time_is_started_again() -> None:
    late = Exception("The current node timed out during startup. This could happen because ...")
    assert nodes(late, late, late).add() == "node"
    with pytest.raises(Exception, match="timed out"):
        nodes(late, late, late, late).add()


def test_other_failures_are_raised() -> None:
    with pytest.raises(RuntimeError, match="no disk"):
        nodes(RuntimeError("no disk")).add()
