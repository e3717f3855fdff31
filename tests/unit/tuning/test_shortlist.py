"""Each session is probed once; a short list is spread over sessions and schedulers."""

from __future__ import annotations

import pytest
from simulated_server import SimulatedServer

from graphkiln.tuning.candidate import PRECISION, SESSION_KEYS
from graphkiln.tuning.search import probe, shortlist
from graphkiln.tuning.space import Space
from graphkiln.tuning.target import Target

TARGET = Target(p99_s=0.08)


def test_each_session_is_probed_once(space: Space) -> None:
    server = SimulatedServer(cores=2)
    probes = probe(space, TARGET, server)
    sessions = {each.restricted_to(SESSION_KEYS) for each in space.candidates}
    assert set(probes.sessions) == sessions
    assert server.now_s == len(sessions)
    assert set(probes.viable) | {each.candidate for each in probes.refused} == set(space.candidates)
    assert all(each[PRECISION] != "int8" for each in probes.viable)


def test_a_short_list_has_every_session_before_a_second_of_any(space: Space) -> None:
    probes = probe(space, TARGET, SimulatedServer(cores=2))
    viable = {each.restricted_to(SESSION_KEYS) for each in probes.viable}
    short = shortlist(probes, len(viable))
    assert {each.restricted_to(SESSION_KEYS) for each in short} == viable
    assert len(shortlist(probes, 10_000)) == len(probes.viable)


def test_some_are_taken_anyway(space: Space) -> None:
    probes = probe(space, TARGET, SimulatedServer(cores=2))
    last = shortlist(probes, 10_000)[-1]
    assert shortlist(probes, 3, [last])[0] == last
    assert len(shortlist(probes, 3, [last])) == 3


def test_what_did_not_load_has_no_times(space: Space) -> None:
    probes = probe(space, Target(p99_s=0.001), SimulatedServer(cores=2))
    assert probes.viable == ()
    with pytest.raises(KeyError):
        probes.bare(space.default.with_values({PRECISION: "fp8"}))
