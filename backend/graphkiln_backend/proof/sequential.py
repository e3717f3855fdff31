"""Confidence sequences of a share: bounds that hold at all times together, however often one looks at them.

A confidence interval holds for one number of trials that was set before. Looking at it after each trial and stopping
when it suits is wrong far more often than its level says. A confidence sequence may be looked at after each trial: the
probability that it *ever* excludes the true share is at most `alpha`.

The sequence here is Robbins' mixture for Bernoulli trials. For a share `q`, after `n` trials with `k` events,

    M_n(q) = B(a + k, b + n - k) / (B(a, b) q^k (1 - q)^(n - k))

is the likelihood of the trials under a Beta(a, b) mixture of shares, relative to that under `q`. If `q` is the true
share, it is a martingale that begins with 1, and exceeds `1 / alpha` at any time with a probability of at most `alpha`
(Ville's inequality). The shares with `M_n(q) < 1 / alpha` are therefore a confidence sequence. No trial's result is
assumed but that each has the same chance of an event, whatever happened before.

Sources: H. Robbins, "Statistical methods related to the law of the iterated logarithm", Annals of Mathematical
Statistics 41 (1970), 1397-1409; J. Ville, "Etude critique de la notion de collectif" (1939); S. R. Howard, A. Ramdas,
J. McAuliffe, J. Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", Annals of Statistics 49
(2021), 1055-1080, doi:10.1214/20-AOS1991.

Imports nothing but `math`: the supervisor evaluates it.
"""

from __future__ import annotations

import math

# Beta distribution of the mixture. It only decides where the bounds are tight: for rare events (mean 5%), which
# differences between two versions, failures and slow requests are. They hold for every share.
EVENTS, NO_EVENTS = 0.5, 10.0

_STEPS = 60  # bisections: below the resolution of fp64


def lower_share(events: int, trials: int, alpha: float) -> float:
    """Lower bound of a share that holds at all times; 0 without events.

    Args:
        events: Trials with the event so far.
        trials: Trials so far.
        alpha: Probability that both bounds together ever exclude the true share.
    """
    return _bound(0.0, events, trials, alpha) if events else 0.0


def upper_share(events: int, trials: int, alpha: float) -> float:
    """Upper bound, like `lower_share`; 1 without trials that lack the event."""
    return _bound(1.0, events, trials, alpha) if events < trials else 1.0


def _bound(excluded: float, events: int, trials: int, alpha: float) -> float:
    """Bisect between an excluded share and the observed one."""
    included = events / trials
    for _ in range(_STEPS):
        middle = (excluded + included) / 2
        if _is_excluded(middle, events, trials, alpha):
            excluded = middle
        else:
            included = middle
    return excluded


def log_martingale(share: float, events: int, trials: int) -> float:
    """Logarithm of `M_n(share)`; `share` is strictly between 0 and 1."""
    others = trials - events
    mixture = _log_beta(EVENTS + events, NO_EVENTS + others) - _log_beta(EVENTS, NO_EVENTS)
    return mixture - events * math.log(share) - others * math.log1p(-share)


def _is_excluded(share: float, events: int, trials: int, alpha: float) -> bool:
    if share <= 0.0 or share >= 1.0:  # the limit of bisections; events and others are both possible
        return True
    return log_martingale(share, events, trials) >= -math.log(alpha)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
