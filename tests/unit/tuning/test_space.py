"""The space: what is in it, what is left out and why, and which of two candidates is the simpler one."""

from __future__ import annotations

import pytest

from graphkiln.tuning.candidate import ENGINE, INSTANCES, THREADS, Candidate
from graphkiln.tuning.space import Axis, Space
from graphkiln_backend.graph.errors import InvalidInput


def within_two_cores(candidate: Candidate) -> str:
    needed = candidate.number(INSTANCES) * candidate.number(THREADS)
    return f"{needed} threads on 2 cores" if needed > 2 else ""


SPACE = Space(
    axes=(
        Axis(key=ENGINE, values=("onnxruntime", "openvino")),
        Axis(key=INSTANCES, values=(1, 2)),
        Axis(key=THREADS, values=(2, 1, 4)),
    ),
    constraints=(within_two_cores,),
)


def candidate(engine: str, instances: int, threads: int) -> Candidate:
    return Candidate.of({ENGINE: engine, INSTANCES: instances, THREADS: threads})


def test_every_point_is_a_candidate_or_left_out_with_a_reason() -> None:
    assert SPACE.points == 12
    assert len(SPACE.candidates) == 6
    assert len(SPACE.exclusions) == 6
    assert {each.candidate for each in SPACE.exclusions}.isdisjoint(SPACE.candidates)
    assert SPACE.reasons() == {"4 threads on 2 cores": 4, "8 threads on 2 cores": 2}


def test_the_default_is_the_simplest() -> None:
    assert SPACE.default == candidate("onnxruntime", 1, 2) == SPACE.candidates[0]


def test_fewer_and_shorter_steps_from_the_default_are_simpler() -> None:
    order = sorted(
        [candidate("openvino", 2, 1), candidate("onnxruntime", 1, 4), candidate("onnxruntime", 1, 1)],
        key=SPACE.simplicity,
    )
    assert [each[THREADS] for each in order] == [1, 4, 1]
    assert order[-1][ENGINE] == "openvino"


def test_neighbors_are_legal_and_one_step_away() -> None:
    assert set(SPACE.neighbors(candidate("onnxruntime", 1, 1))) == {
        candidate("openvino", 1, 1),
        candidate("onnxruntime", 2, 1),
        candidate("onnxruntime", 1, 2),
    }


def test_a_fixed_key_has_one_value_even_a_new_one() -> None:
    fixed = SPACE.fixed({ENGINE: "openvino", INSTANCES: 1})
    assert {each[ENGINE] for each in fixed.candidates} == {"openvino"}
    assert SPACE.fixed({THREADS: 3}).exclusions[0].reason == "3 threads on 2 cores"


def test_only_some_keys_vary() -> None:
    assert SPACE.only([ENGINE]).candidates == (candidate("onnxruntime", 1, 2), candidate("openvino", 1, 2))


@pytest.mark.parametrize("narrow", [lambda: SPACE.fixed({"thread": 1}), lambda: SPACE.only(["thread"])])
def test_a_misspelled_key_is_refused(narrow: object) -> None:
    assert callable(narrow)
    with pytest.raises(InvalidInput, match=r"'thread' is not tuned.*threads"):
        narrow()


def test_what_serves_today_is_known_where_a_key_is_fixed_to_something_else() -> None:
    space = Space(axes=(Axis(key="a", values=(1, 2)), Axis(key="b", values=(1, 2))))
    fixed = space.fixed({"a": 2}).fixed({"b": 2})
    assert (space.today, fixed.default) == (space.default, Candidate.of({"a": 2, "b": 2}))
    assert fixed.today == space.default
    assert space.only(["a"]).today == space.default
