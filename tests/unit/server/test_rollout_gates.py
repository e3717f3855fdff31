"""Gates of a rollout: verdicts on simulated requests, and their error rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

from graphkiln_backend.server.rollout_gates import ALPHA, Verdict, agreement_bounds, judge
from graphkiln_backend.server.rollouts import Gates, Latencies, Progress

SEEDS = range(20)
REQUESTS = 5000
GATES = Gates(agree=0.995, p99_ratio=1.1, errors=0.01, requests=REQUESTS, then=(0.1, 0.5, 1.0))


def seen(**counts: int) -> Progress:
    """Progress of a shadow with these counts."""
    disagreed, undecided = counts.pop("disagreed", 0), counts.pop("undecided", 0)
    agreed = counts.pop("agreed", counts.get("compared", disagreed + undecided) - disagreed - undecided)
    found = Progress(model="digits", candidate=2, serving=1, phase="shadow", **counts)
    found.agreed, found.disagreed, found.undecided = agreed, disagreed, undecided
    found.compared = agreed + disagreed + undecided
    return found


def shadow(
    random: np.random.Generator,
    *,
    wrong: float = 0.0,
    failing: float = 0.0,
    slower: float = 1.0,
    gates: Gates = GATES,
    phase: Literal["shadow", "traffic"] = "shadow",
) -> Iterator[tuple[Progress, Verdict]]:
    """Look at a rollout after every 50 requests, until it is decided."""
    progress = seen()
    progress.phase = phase
    for _ in range(0, 4 * REQUESTS, 50):
        failed = int(random.binomial(50, failing))
        disagreed = int(random.binomial(50 - failed, wrong))
        progress.failed += failed
        progress.disagreed += disagreed
        progress.agreed += 50 - failed - disagreed
        progress.compared += 50 - failed
        for seconds in random.lognormal(-5.0, 0.2, 50):
            progress.serving_latency.add(seconds)
        for seconds in slower * random.lognormal(-5.0, 0.2, 50 - failed):
            progress.candidate_latency.add(seconds)
        verdict = judge(progress, gates)
        yield progress, verdict
        if verdict.outcome != "wait":
            return


def outcome(seed: int, **candidate: float | str) -> tuple[str, int, str]:
    """Outcome, comparisons and reason of a simulated shadow."""
    progress, verdict = list(shadow(np.random.default_rng(seed), **candidate))[-1]  # type: ignore[arg-type]
    return verdict.outcome, progress.compared, verdict.reason


def test_candidate_that_is_wrong_on_one_percent_never_passes() -> None:
    """20 of 20 are found before 5,000 requests."""
    found = [outcome(seed, wrong=0.01) for seed in SEEDS]
    assert [each for each, _, _ in found] == ["fail"] * len(SEEDS)
    assert max(compared for _, compared, _ in found) < REQUESTS
    assert all("decisions differ" in reason for _, _, reason in found)


@pytest.mark.parametrize("wrong", [0.0, 0.001])
def test_equal_candidate_passes(wrong: float) -> None:
    """19 of 20 at least, also if one request in a thousand is decided otherwise."""
    found = [outcome(seed, wrong=wrong) for seed in SEEDS]
    assert [each for each, _, _ in found].count("pass") >= len(SEEDS) - 1, found
    assert {compared for each, compared, _ in found if each == "pass"} == {REQUESTS}


def test_failing_candidate_fails_early() -> None:
    for seed in SEEDS:
        each, compared, reason = outcome(seed, failing=0.05)
        assert each == "fail"
        assert compared < 1500
        assert "failed on" in reason


def test_slow_candidate_fails_and_one_of_the_same_speed_does_not() -> None:
    for seed in SEEDS:
        assert outcome(seed, phase="traffic")[0] == "pass"
        assert outcome(seed, slower=1.6)[0] == "pass"  # in shadow it computes on idle cores
        each, _, reason = outcome(seed, slower=1.6, phase="traffic")
        assert each == "fail"
        assert "1.1 times the p99 latency" in reason


@pytest.mark.parametrize("share", [0.995, 0.9951])
def test_wrong_verdicts_of_many_rollouts(share: float) -> None:
    """At the limit, at most the promised share of the rollouts passes or fails although it should not.

    `judge` looks after each batch: 2,000 rollouts, each looked at 100 times.
    """
    random = np.random.default_rng(7)
    passed = refuted = 0
    for _ in range(2000):
        gates = Gates(agree=0.995, then=(1.0,))
        disagreements = np.cumsum(random.binomial(50, 1 - share, 100))
        for looks, disagreed in enumerate(disagreements[9::10], start=1):
            verdict = judge(seen(compared=500 * looks, disagreed=int(disagreed)), gates)
            if verdict.outcome != "wait":
                passed += verdict.outcome == "pass"
                refuted += verdict.outcome == "fail"
                break
    assert passed < ALPHA * 2000
    assert refuted < ALPHA * 2000
    assert passed + refuted > 0


def test_unproven_candidate_is_never_promoted() -> None:
    """All that were asked for were compared, and the lower bound is below."""
    gates = Gates(agree=0.995, requests=1000, then=(1.0,))
    verdict = judge(seen(compared=1000, disagreed=2), gates)
    assert verdict.outcome == "fail"
    assert "cannot prove" in verdict.reason
    assert verdict.low < gates.agree < verdict.high


def test_ties_are_no_evidence() -> None:
    """A model whose decisions are all within the noise of the policy is not promoted."""
    gates = Gates(agree=0.9, requests=1000, then=(1.0,))
    assert judge(seen(compared=1000), gates).outcome == "pass"
    assert judge(seen(compared=1000, undecided=1000), gates).outcome == "fail"
    assert judge(seen(compared=999, undecided=20), gates).outcome == "wait"


def test_without_a_number_of_requests_it_waits_for_the_proof() -> None:
    gates = Gates(agree=0.99, then=(1.0,))
    assert judge(seen(), gates).outcome == "wait"
    assert judge(seen(compared=100), gates).outcome == "wait"
    assert "at least" in judge(seen(compared=100), gates).reason
    assert judge(seen(compared=2000), gates).outcome == "pass"
    assert judge(seen(compared=500, disagreed=40), gates).outcome == "fail"


def test_without_steps_it_waits_for_the_user() -> None:
    verdict = judge(seen(compared=2000), Gates(agree=0.99))
    assert (verdict.outcome, "all conditions are met" in verdict.reason) == ("wait", True)
    assert judge(seen(compared=500, disagreed=40), Gates(agree=0.99)).outcome == "fail"
    assert judge(seen(compared=500, disagreed=40), Gates()).outcome == "wait"


def test_traffic_passes_after_its_requests() -> None:
    """Few of its requests are compared, so that they can refute agreement, but need not prove it again."""
    progress = seen(compared=250)
    progress.phase, progress.answered = "traffic", 4700
    assert judge(progress, GATES).outcome == "wait"
    progress.answered = REQUESTS
    assert judge(progress, GATES).outcome == "pass"
    progress.agreed, progress.disagreed = 200, 50
    assert judge(progress, GATES).outcome == "fail"


def test_failures_in_traffic() -> None:
    progress = seen()
    progress.phase, progress.answered, progress.failed, progress.failure = "traffic", 4000, 200, "timeout"
    verdict = judge(progress, GATES)
    assert (verdict.outcome, "timeout" in verdict.reason) == ("fail", True)


@pytest.mark.parametrize(("slower_s", "verdict"), [(0.0003, "pass"), (0.001, "fail")])
def test_what_cold_caches_cost_is_no_evidence(slower_s: float, verdict: str) -> None:
    """The graph takes 0.1 ms: the ratio alone would abort every candidate with a small share."""
    progress = seen(compared=REQUESTS)
    progress.phase = "traffic"
    for _ in range(REQUESTS):
        progress.serving_latency.add(0.0001)
        progress.candidate_latency.add(0.0001 + slower_s)
    assert judge(progress, GATES).outcome == verdict


def test_few_latencies_decide_nothing() -> None:
    """A p99 of 100 requests is not known."""
    progress = seen(compared=100)
    progress.phase = "traffic"
    progress.serving_latency, progress.candidate_latency = Latencies(), Latencies()
    for _ in range(100):
        progress.serving_latency.add(0.001)
        progress.candidate_latency.add(1.0)
    assert judge(progress, GATES).outcome == "wait"


def test_refutation_is_harder_the_more_steps_there_are() -> None:
    """The probability of a wrong one is divided among them; promotion needs the shadow, whatever follows."""
    progress = seen(compared=1000, disagreed=3)
    one, four = agreement_bounds(progress, Gates(agree=0.99)), agreement_bounds(progress, GATES)
    assert four[0] == one[0] < 0.997 < one[1] < four[1]
