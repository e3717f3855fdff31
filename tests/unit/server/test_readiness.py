"""How a server is started so that its readiness means something."""

from __future__ import annotations

import pytest

from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.launch import Readiness

KNOWN = dict.fromkeys(("strict-readiness", "exit-on-error", "http-port"), True)
WHOLE = ("--strict-readiness=false", "--exit-on-error=true")


def parse(*arguments: str) -> TritonFlags:
    return TritonFlags.parse(arguments, KNOWN)


def test_a_server_that_may_serve_everything_serves_everything_or_nothing() -> None:
    readiness = Readiness()
    readiness.choose(parse("--http-port=1"), loads=True)
    assert readiness.arguments == WHOLE


def test_one_that_did_not_serves_what_it_can_and_the_next_one_tries_again() -> None:
    readiness = Readiness()
    readiness.choose(parse(), loads=True)
    assert readiness.give_in()
    readiness.choose(parse(), loads=True)
    assert readiness.arguments == ()
    assert not readiness.give_in()
    readiness.choose(parse(), loads=True)
    assert readiness.arguments == WHOLE


def test_one_that_has_nothing_to_load_or_something_bad_is_strict() -> None:
    readiness = Readiness()
    readiness.choose(parse(), loads=False)
    assert readiness.arguments == ()
    assert not readiness.give_in()


@pytest.mark.parametrize("flag", ["--strict-readiness=true", "--strict-readiness=false", "--exit-on-error=false"])
def test_the_users_own_word_counts(flag: str) -> None:
    readiness = Readiness()
    readiness.choose(parse(flag), loads=True)
    assert readiness.arguments == ()


def test_what_loads_without_end_is_known_for_one_start() -> None:
    readiness = Readiness()
    readiness.choose(parse(), loads=True)
    readiness.endless.add("m version 1")
    readiness.give_in()
    readiness.choose(parse(), loads=True)
    assert readiness.endless == {"m version 1"}
    readiness.choose(parse(), loads=True)
    assert readiness.endless == set()
