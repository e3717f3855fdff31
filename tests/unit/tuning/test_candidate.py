"""A candidate is its values: the same wherever and in whatever order they were written."""

from __future__ import annotations

import json
import subprocess
import sys

from graphkiln.tuning.candidate import ENGINE, INSTANCES, PREFERRED, SESSION_KEYS, SPIN, Candidate

CANDIDATE = Candidate.of({INSTANCES: 2, ENGINE: "openvino", PREFERRED: (4, 8), SPIN: False})


def test_equal_values_make_equal_candidates() -> None:
    other = Candidate.of(dict(reversed(CANDIDATE.items)))
    assert other == CANDIDATE
    assert hash(other) == hash(CANDIDATE)
    assert other.id == CANDIDATE.id


def test_an_id_is_the_same_in_another_process() -> None:
    program = (
        "from graphkiln.tuning.candidate import Candidate;"
        f"print(Candidate.of({CANDIDATE.values!r}).id, Candidate.of({{}}).id)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.split() == [CANDIDATE.id, Candidate.of({}).id]


def test_ids_differ_where_values_do() -> None:
    others = [CANDIDATE.with_values(values) for values in ({INSTANCES: 1}, {SPIN: True}, {PREFERRED: ()}, {"new": 1})]
    assert len({each.id for each in (CANDIDATE, *others)}) == 5


def test_json_gives_the_candidate_back() -> None:
    assert Candidate.from_json(json.loads(json.dumps(CANDIDATE.as_json()))) == CANDIDATE


def test_values_are_read_by_key() -> None:
    assert CANDIDATE[ENGINE] == "openvino"
    assert CANDIDATE.number(INSTANCES) == 2
    assert CANDIDATE.number("threads", 7) == 7
    assert ENGINE in CANDIDATE
    assert "threads" not in CANDIDATE


def test_a_session_is_the_part_that_no_scheduler_knows() -> None:
    assert CANDIDATE.restricted_to(SESSION_KEYS).values == {ENGINE: "openvino", SPIN: False}


def test_a_candidate_reads_as_a_line() -> None:
    line = "engine=openvino, instances=2, preferred_batch_sizes=4+8, spin=off"
    assert str(CANDIDATE) == line
    assert str(Candidate.of({PREFERRED: ()})) == "preferred_batch_sizes=none"
