"""`--accuracy-floor`: whether a model and its samples can tell, and how small a loss they can tell of."""

from __future__ import annotations

from graphkiln.tuning.questions import MOST_SAMPLES, Questions, classifies
from graphkiln.tuning.statistics import requests_needed
from graphkiln.tuning.target import CONFIDENCE
from graphkiln_backend.graph.errors import InvalidInput

_MOST_LABELLED = 2048
"""Each candidate's session computes them all, and they lie in memory."""


def samples_to_read(floor: float | None) -> int:
    """How many samples are read at most: with a floor as many as tell of such a loss, within bounds.

    Args:
        floor: Share of the accuracy that may be lost; None for no floor.
    """
    if floor is None:
        return MOST_SAMPLES
    return min(_MOST_LABELLED, max(MOST_SAMPLES, samples_needed(floor) or 0))


def samples_needed(floor: float) -> int | None:
    """How many samples rule a larger loss out at 95% where none of them is lost; None where no number does.

    598 for 0.5%.

    Args:
        floor: Share of the accuracy that may be lost.

    Source: J. A. Hanley, A. Lippman-Hand, "If Nothing Goes Wrong, Is Everything All Right?" (1983), exact.
    """
    return requests_needed(0, 1 - floor) if floor else None


def check_floor(questions: Questions, floor: float | None) -> None:
    """Refuses a floor where nothing says what is right.

    Raises:
        InvalidInput: The samples have no labels, or the model gives no classes.
    """
    if floor is None:
        return
    if not classifies(questions.reading):
        raise InvalidInput(
            "--accuracy-floor counts right classes, and this model answers with something else",
            hint="leave it out: what it answers is held to the limits of its task in any case",
        )
    if questions.targets is None:
        raise InvalidInput(
            f"--accuracy-floor needs samples whose right classes are known: {questions.unlabelled}",
            hint="--samples DIR with one folder of images for each label of the model",
        )


def undecided(questions: Questions, floor: float | None) -> str:
    """What of a floor the samples cannot tell, in words; empty where they can, or where there is none.

    Args:
        questions: With the right class of each.
        floor: Share of the accuracy that may be lost.
    """
    if floor is None or questions.targets is None:
        return ""
    count, needed = len(questions.targets), samples_needed(floor)
    if needed is not None and count >= needed:
        return ""
    told = 1 - (1 - CONFIDENCE) ** (1 / count)
    enough = "no number decides a floor of 0" if needed is None else f"it takes {needed}"
    return (
        f"an accuracy floor of {floor * 100:.3g}% is not decided by {count} labelled samples: "
        f"where none is lost, a loss below {told * 100:.2g}% may still be there (at 95%); {enough}"
    )
