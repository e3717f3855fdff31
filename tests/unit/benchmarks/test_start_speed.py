"""When a process of a server was started is known to a hundredth of a second."""

from __future__ import annotations

import subprocess
import sys
import time

from start_speed import _FIRST, CPP, _begun, _median_first, _peer_rows, _Start


def test_a_process_began_after_it_was_asked_for() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            after = time.time()
            assert before - 0.05 <= _begun(process.pid) <= after + 0.05
        finally:
            process.kill()


def test_one_request_that_is_held_up_is_not_the_worst_size() -> None:
    rounds = [_Start(first={("m", 1): slow, ("m", 2): 1.4}) for slow in (30.0, 1.1, 1.0)]
    assert _median_first({"digits, warm": rounds}, "digits, warm") == 1.4


def test_first_requests_of_a_peer_have_a_row_where_they_were_made() -> None:
    ours, asked = _Start({"ready": 3.0}, first={("m", 1): 1.5}), _Start({"ready": 2.0}, first={("m", 1): 1.25})
    starts = {"digits, warm": [ours], f"digits, {CPP}": [asked], "digits, bare sessions": [_Start({"ready": 1.0})]}
    rows = {row["phase"]: row["digits, warm"] for row in _peer_rows(CPP, ["digits, warm"], starts)}
    assert rows[f"{CPP}, {_FIRST}"] == 1.25
    assert rows[f"ratio to {CPP}"] == 1.5
    assert not any(_FIRST in str(row["phase"]) for row in _peer_rows("bare sessions", ["digits, warm"], starts))
    assert not [*_peer_rows("not measured", ["digits, warm"], starts)]
