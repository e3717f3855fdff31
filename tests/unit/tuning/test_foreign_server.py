"""What is not known of a server that somebody else started."""

from __future__ import annotations

import pytest

from graphkiln.tuning.foreign_server import check_knowable
from graphkiln.tuning.target import Objective
from graphkiln_backend.graph.errors import InvalidInput


def test_what_is_not_known_there_is_not_searched_for() -> None:
    for known in (Objective.LATENCY, Objective.THROUGHPUT):
        check_knowable(known)
    for unknown in (Objective.MEMORY, Objective.COST):
        with pytest.raises(InvalidInput, match=f"--objective {unknown}: neither memory nor CPU time"):
            check_knowable(unknown)
