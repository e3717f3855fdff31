"""Models that share a machine: the exact best choice, beside trying every combination."""

from __future__ import annotations

import random
from itertools import product

import pytest

from graphkiln.tuning.candidate import INSTANCES, THREADS, Candidate
from graphkiln.tuning.sharing import Response, responses_of, share_out
from graphkiln.tuning.space import Space
from graphkiln_backend.graph.errors import InvalidInput, MeasurementError


def response(rate: float, cores: float, memory: int = 1) -> Response:
    candidate = Candidate.of({INSTANCES: int(cores), THREADS: 1})
    return Response(candidate=candidate, rate=rate, cores=cores, memory_bytes=memory)


def test_the_model_with_the_larger_share_gets_the_cores() -> None:
    each = [response(100, 1), response(190, 2), response(270, 3)]
    plan = share_out({"a": each, "b": each}, {"a": 3, "b": 1}, cores=4, memory_bytes=10)
    assert (plan.responses["a"].cores, plan.responses["b"].cores) == (3, 1)
    assert plan.rate == pytest.approx(270 / 0.75)
    assert plan.limited_by == "a"


def test_no_core_is_taken_that_serves_no_request() -> None:
    plan = share_out(
        {"a": [response(100, 1)], "b": [response(100, 1), response(500, 3)]}, {"a": 1, "b": 1}, cores=4, memory_bytes=10
    )
    assert plan.cores == 2


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_of_all_combinations(seed: int) -> None:
    generator = random.Random(seed)
    responses = {
        name: [response(generator.uniform(10, 100), generator.randint(1, 4), generator.randint(1, 9)) for _ in range(6)]
        for name in "abcd"
    }
    shares = {name: generator.uniform(0.5, 4) for name in "abcd"}
    fitting = [
        min(each.rate / shares[name] for name, each in zip("abcd", chosen, strict=True)) * sum(shares.values())
        for chosen in product(*responses.values())
        if sum(each.cores for each in chosen) <= 8 and sum(each.memory_bytes for each in chosen) <= 16
    ]
    if fitting:
        plan = share_out(responses, shares, cores=8, memory_bytes=16)
        assert plan.rate == pytest.approx(max(fitting))
        assert plan.cores <= 8
        assert plan.memory_bytes <= 16
    else:
        with pytest.raises(MeasurementError, match="do not fit together"):
            share_out(responses, shares, cores=8, memory_bytes=16)


def test_models_that_do_not_fit_are_told_with_what_they_need() -> None:
    each = [response(10, 2, 1 << 20)]
    with pytest.raises(MeasurementError, match=r"a, b do not fit together: they need at least 4 cores and 2 MiB"):
        share_out({"a": each, "b": each}, {"a": 1, "b": 1}, cores=2, memory_bytes=1 << 30)


def test_shares_and_models_that_differ_are_refused() -> None:
    each = [response(10, 1)]
    with pytest.raises(InvalidInput, match="shares are given for b, models are a"):
        share_out({"a": each}, {"b": 1}, cores=1, memory_bytes=1)
    with pytest.raises(InvalidInput, match="a has a share of 0"):
        share_out({"a": each}, {"a": 0}, cores=1, memory_bytes=1)
    with pytest.raises(MeasurementError, match="no configuration of a"):
        share_out({"a": []}, {"a": 1}, cores=1, memory_bytes=1)


def test_a_search_gives_the_responses_of_its_model(tune, tiny: Space) -> None:
    from simulated_server import SimulatedServer

    result = tune(SimulatedServer(cores=2), within=tiny, budget_s=300)
    found = responses_of(result)
    assert result.candidate in {each.candidate for each in found}
    assert all(each.rate > 0 and each.cores >= 1 and each.memory_bytes > 0 for each in found)
    plan = share_out({"a": found, "b": found}, {"a": 1, "b": 1}, cores=4, memory_bytes=1 << 40)
    assert plan.rate > 0
