"""Confidence sequences of a share: bounds beside direct integration, and their error rate at all times together."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import brentq
from scipy.special import betaln
from scipy.stats import beta, binom

from graphkiln_backend.proof.sequential import EVENTS, NO_EVENTS, log_martingale, lower_share, upper_share

ALPHA = 0.05
MILLION = 1_000_000


def bounds(events: int, trials: int, alpha: float) -> tuple[float, float]:
    return lower_share(events, trials, alpha), upper_share(events, trials, alpha)


@pytest.mark.parametrize(("events", "trials"), [(0, 10), (1, 10), (3, 40), (12, 5000), (50, 5000), (9, 10), (40, 40)])
def test_bounds_are_where_the_mixture_is_as_many_times_likelier_as_the_level_says(events: int, trials: int) -> None:
    """An independent way: scipy's binomial likelihood, integrated over the mixture by quadrature, solved by Brent."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    # Substitution q = sin^2(t) smooths the mixture's pole at 0.
    angles = (nodes + 1) * math.pi / 4
    shares = np.sin(angles) ** 2
    density = beta.pdf(shares, EVENTS, NO_EVENTS) * 2 * np.sin(angles) * np.cos(angles)
    mixed = float(np.sum(weights * math.pi / 4 * density * binom.pmf(events, trials, shares)))

    def excess(share: float) -> float:
        return math.log(mixed) - float(binom.logpmf(events, trials, share)) - math.log(1 / ALPHA)

    low, high = bounds(events, trials, ALPHA)
    mean = events / trials
    assert low == pytest.approx(brentq(excess, 1e-300, mean, xtol=1e-14) if events else 0.0, rel=1e-6)
    assert high == pytest.approx(brentq(excess, mean, 1 - 1e-15, xtol=1e-14) if events < trials else 1.0, rel=1e-6)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.97])
def test_martingale_keeps_its_mean(share: float) -> None:
    """Under the true share, the mean over all outcomes of n trials is 1: the condition of Ville's inequality."""
    for trials in (1, 7, 60):
        likelihoods = binom.pmf(range(trials + 1), trials, share)
        values = [math.exp(log_martingale(share, events, trials)) for events in range(trials + 1)]
        assert float(np.dot(likelihoods, values)) == pytest.approx(1.0, rel=1e-9)


def test_no_trials_say_nothing() -> None:
    assert bounds(0, 0, ALPHA) == (0.0, 1.0)


def test_bounds_are_wider_than_those_of_one_look_and_become_narrow() -> None:
    widths = []
    for trials in (100, 1_000, 10_000, 100_000):
        events = trials // 100
        low, high = bounds(events, trials, ALPHA)
        once_low = beta.ppf(0.025, events, trials - events + 1)  # Clopper and Pearson, 1934
        once_high = beta.ppf(0.975, events + 1, trials - events)
        assert low < once_low < events / trials < once_high < high
        widths.append(high - low)
    assert all(after < before / 2 for before, after in pairwise(widths))


def test_bounds_of_a_million_trials() -> None:
    low, high = bounds(10_000, MILLION, 0.001)
    assert 0.0094 < low < 0.01 < high < 0.0106


@pytest.mark.parametrize(("share", "trials"), [(0.005, 5000), (0.05, 400)])
def test_error_rate_of_a_million_streams(share: float, trials: int) -> None:
    """Streams of true share are excluded at some time, looking after each trial, in less than the level says.

    A fixed interval of the same level, looked at as often, is wrong several times as often (negative control).
    """
    excluded, at_once = 0, 0
    for seed in range(10):
        ever, once = exclusions(np.random.default_rng(seed), share, streams=MILLION // 10, trials=trials)
        excluded += ever
        at_once += once
    # Three standard errors of the simulation above the level would still be compatible with it; it is well below.
    assert 0.01 * MILLION < excluded < ALPHA * MILLION
    assert at_once > 2 * ALPHA * MILLION


def exclusions(random: np.random.Generator, share: float, *, streams: int, trials: int) -> tuple[int, int]:
    """Count streams whose true share was outside the bounds at any time: of the sequence, and of a fixed interval.

    Between two events the martingale falls and then rises, so that its largest values are at events and just before
    them: trials in between need no look.
    """
    gammas = log_gammas(trials + 1)
    threshold = -math.log(ALPHA)
    position = np.zeros(streams, np.int64)
    ever, once = np.zeros(streams, bool), np.zeros(streams, bool)
    for events in range(trials + 1):
        following = position + random.geometric(share, streams)
        before = np.minimum(following - 1, trials)  # the last trial before the next event
        for count in (position, before):
            valid = (count > 0) & (position <= trials)
            ever |= valid & (martingales(gammas, share, events, np.minimum(count, trials)) >= threshold)
            once |= valid & (count >= 100) & outside_normal(share, events, np.minimum(count, trials))
        position = following
        if (position > trials).all():
            break
    return int(ever.sum()), int(once.sum())


def log_gammas(trials: int) -> tuple[npt.NDArray[np.float64], ...]:
    """`lgamma` of the three terms that depend on trials and events."""
    counts = range(trials + 1)
    return (
        np.array([math.lgamma(EVENTS + each) for each in counts]),
        np.array([math.lgamma(NO_EVENTS + each) for each in counts]),
        np.array([math.lgamma(EVENTS + NO_EVENTS + each) for each in counts]),
    )


def martingales(
    gammas: tuple[npt.NDArray[np.float64], ...], share: float, events: int, trials: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """The logarithms of the martingale, `[streams]`."""
    others = np.maximum(trials - events, 0)
    mixed: npt.NDArray[np.float64] = gammas[0][events] + gammas[1][others] - gammas[2][trials]
    return mixed - betaln(EVENTS, NO_EVENTS) - events * math.log(share) - others * math.log1p(-share)


def outside_normal(share: float, events: int, trials: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Streams whose share is outside Wald's test of one look."""
    return np.abs(events - trials * share) > 1.96 * np.sqrt(np.maximum(trials, 1) * share * (1 - share))


def test_simulation_uses_the_code_of_the_bounds() -> None:
    """The vectorized martingale of the simulation is that of `log_martingale`."""
    simulated = martingales(log_gammas(100), 0.03, 4, np.array([4, 50, 100]))
    assert simulated == pytest.approx([log_martingale(0.03, 4, trials) for trials in (4, 50, 100)], rel=1e-9)


def test_imports_no_numpy() -> None:
    code = "import sys, graphkiln_backend.proof.sequential; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
