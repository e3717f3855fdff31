"""What `graphkiln tune` finds, beside exhaustive and random search of the same space, and the default configuration.

On a simulated server, whose best configuration is known without noise, and with real models: MobileNetV3-small, whose
narrowed space is searched exhaustively, and three that were never used while the search was designed. What is chosen
for each is measured once more in turn, with other arrivals. Each part is kept as soon as it is done, and what was
interrupted within a part goes on where it was; a table that is kept holds the rows of parts that were measured before.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from inputs import CACHE, exported_graph
from measurement import show_progress
from parts import Parts
from reporting import RESULTS
from stores import add_model
from tune_analyzer import analyzed
from tune_promise import Held, measure_again
from tune_simulated import simulated_choices
from tune_ways import OURS, Choice, Course, at_random, default, exhaustive, judged, tuned

from graphkiln.story.request import machine_facts
from graphkiln.tuning.candidate import MAX_BATCH_SIZE, QUEUE_DELAY_US, SPIN, STREAMS, Candidate
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.measure import Loading
from graphkiln.tuning.questions import Questions, read_questions
from graphkiln.tuning.space import Axis, Space, span_space
from graphkiln.tuning.subject import Subject, read_subject, vanishing_cache
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Trials

PARTS = CACHE / "tune"  # where each part is kept, and the journals of its searches
KEPT = RESULTS / "tune.json"  # what stands in the documentation
SIMULATED = "simulated"
_SEEDS = 4
# The exhaustive search may take so many times the budget of ours: one more than ours is to be faster by.
_EXHAUSTIVE = 6
_BATCH_SIZES = (1, 2, 8)
_ENOUGH = 400  # requests of a repeat by perf_analyzer: of fewer, p99 is a matter of luck

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model that is tuned.

    Attributes:
        architecture: As `exported_graph` takes it.
        p99_s: The target.
        budget_s: Of our search, and of the random one.
        is_held_out: Whether it was never used while the search was designed; such a one is not searched exhaustively.
    """

    architecture: str
    p99_s: float
    budget_s: float
    is_held_out: bool = True


# With 100 ms and more where a run takes long: below, no configuration of two cores meets the target.
MODELS = {
    "mobilenet_v3_small": Model(architecture="mobilenet_v3_small", p99_s=0.05, budget_s=170.0, is_held_out=False),
    "squeezenet1_1": Model(architecture="squeezenet1_1", p99_s=0.05, budget_s=600.0),
    "regnet_y_400mf": Model(architecture="regnet_y_400mf", p99_s=0.1, budget_s=600.0),
    "vit_tiny": Model(architecture="timm:vit_tiny_patch16_224", p99_s=0.2, budget_s=600.0),
}


def benchmark_tune(rounds: int, seconds: float, only: str = "", budget_s: float = 0.0) -> list[Row]:
    """The simulated server with four seeds a round, then each real model once.

    Args:
        rounds: Of the simulated server.
        seconds: Of the shortest measurement of all searches but ours.
        only: Measure this part, also where it is done, and no other.
        budget_s: Of the search of each real model; 0 for what suits it.

    Returns:
        The rows of all parts: those that were not measured now as they stand in the documentation.

    Raises:
        SystemExit: No part has this name.
    """
    parts = Parts(PARTS, rounds, seconds)
    models = {name: replace(model, budget_s=budget_s or model.budget_s) for name, model in MODELS.items()}
    files = {SIMULATED: SIMULATED, **{name: f"{name}-{model.budget_s:g}" for name, model in models.items()}}
    measures: dict[str, Callable[[], list[Row]]] = {
        SIMULATED: partial(_simulated, rounds * _SEEDS),
        **{name: partial(_real, name, model, PARTS / files[name], seconds) for name, model in models.items()},
    }
    if only and only not in measures:
        sys.exit(f"--only {only}: there is no such part; one of {', '.join(measures)}")
    for name in [only] if only else measures:
        if only and parts.read(files[name]) is not None:
            shutil.rmtree(PARTS / files[name], ignore_errors=True)
        parts.measure(files[name], measures[name], again=bool(only))
    show_progress("")
    kept = rows_by_part(KEPT)
    return [as_row(row) for name in measures for row in parts.read(files[name]) or kept.get(name, ())]


def rows_by_part(path: Path) -> dict[str, list[Row]]:
    """The rows of a result that was kept, by the model that they are of; none where there is no result."""
    found: dict[str, list[Row]] = {}
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        found.setdefault(row["model"].partition(",")[0], []).append(row)
    return found


def as_row(row: Row) -> Row:
    """A row with all columns: one that was kept before there was a column says nothing there."""
    return {column: row.get(column, "-") for column in COLUMNS}


def dated(row: Row) -> Row:
    """A row with the day of its measurement: rows of a table need not be of the same."""
    return {**row, "date": machine_facts()["date"].partition(" ")[0]}


def _simulated(seeds: int) -> list[Row]:
    found: dict[str, list[tuple[Choice, float]]] = {}
    for choice, share in simulated_choices(seeds):
        found.setdefault(choice.name, []).append((choice, share))
    return [dated(row_of(SIMULATED, each)) for each in found.values()]


def _real(name: str, model: Model, journals: Path, seconds: float) -> list[Row]:
    """A row for each way, its rate as a share of the best that any of them found."""
    with _opened(model, journals, seconds) as (course, subject):
        found = [tuned(course), at_random(course), default(course)]
        if not model.is_held_out:
            found.append(exhaustive(course, _EXHAUSTIVE * model.budget_s))
        found.append(analyzed(subject, [axis.key for axis in course.space.axes], model.p99_s))
        rates = judged(course, list(dict.fromkeys(each.candidate for each in found if each.candidate)))
        held = _promise(subject, model, found[0], seconds)
    title = f"{name}, held out" if model.is_held_out else name
    return [dated(row) for row in real_rows(title, found, rates, held)]


def real_rows(title: str, found: Sequence[Choice], rates: Mapping[Candidate, float], held: Held | None) -> list[Row]:
    """Rows of what was chosen; rates are compared with the best of all that were measured."""
    best = max(rates.values(), default=0.0)
    rows = []
    for choice in found:
        if choice.note and not choice.candidate:  # nothing was compared
            rows.append({**row_of(title, [(choice, 0.0)]), "ratio": "-", "least": "-", "runs of 0.95": "-"})
            continue
        rate = rates.get(choice.candidate, 0.0) if choice.candidate else 0.0
        row = row_of(title, [(choice, rate / best if best else 0.0)])
        promised = f"{held}" if held and choice.name == OURS else "-"
        rows.append({**row, "requests/s": f"{rate:.1f}", "perf_analyzer within p99": promised})
    return rows


# Of every row.
COLUMNS = (
    "model", "set-up", "runs", "ratio", "least", "runs of 0.95", "requests/s", "promised/s", "perf_analyzer within p99",
    "budget s", "measured s", "measurements", "choice", "date",
)  # fmt: skip


def row_of(title: str, found: Sequence[tuple[Choice, float]]) -> Row:
    """A row of a way that was gone once or several times."""
    shares, choices = [share for _, share in found], [choice for choice, _ in found]
    promised = [choice.promised for choice in choices if choice.promised]
    budgets = [f"{choice.budget_s:.0f}" for choice in choices if choice.budget_s]
    return {
        "model": title,
        "set-up": choices[0].name,
        "runs": len(found),
        "ratio": round(statistics.median(shares), 3),
        "least": round(min(shares), 3),
        "runs of 0.95": sum(share >= 0.95 for share in shares),
        "requests/s": "-",
        "promised/s": f"{statistics.median(promised):.1f}" if promised else "-",
        "perf_analyzer within p99": "-",
        "budget s": budgets[0] if budgets else "-",
        "measured s": round(statistics.median(choice.spent_s for choice in choices)),
        "measurements": round(statistics.median(choice.measurements for choice in choices)),
        "choice": str(choices[-1].candidate or choices[-1].note or "none"),
    }


def _promise(subject: Subject, model: Model, ours: Choice, seconds: float) -> Held | None:
    if ours.candidate is None or ours.promised is None:
        return None
    enough_s = max(2 * seconds, _ENOUGH / ours.promised)
    return measure_again(subject, ours.candidate, ours.promised, model.p99_s, enough_s)


@contextmanager
def _opened(model: Model, journals: Path, seconds: float) -> Iterator[tuple[Course, Subject]]:
    with tempfile.TemporaryDirectory() as folder, vanishing_cache() as cache:
        add_model(Path(folder), "model", exported_graph(model.architecture))
        subject = read_subject(Path(folder) / "model" / "1", cache)
        questions = read_questions(subject)
        yield (
            Course(
                open_trials=partial(_open_trials, subject, questions, 40 * model.p99_s),
                space=_narrow(span_space(subject, p99_s=model.p99_s).space),
                target=Target(p99_s=model.p99_s),
                budget_s=model.budget_s,
                cores=subject.cores,
                seed=0,
                shortest_s=seconds,
                journals=journals,
            ),
            subject,
        )


@contextmanager
def _open_trials(
    subject: Subject, questions: Questions, timeout_s: float
) -> Iterator[tuple[Trials, Callable[[], float]]]:
    loading = Loading(questions=questions, timeout_s=timeout_s)
    with LocalTrials(subject=subject, loading=loading, batch_sizes=_BATCH_SIZES) as local:
        yield local, time.monotonic


def _narrow(space: Space) -> Space:
    """The part that can be searched exhaustively: engines, precisions, threads, instances, two batch sizes."""
    keys = {axis.key for axis in space.axes}
    kept = space.fixed({key: value for key, value in ((SPIN, False), (STREAMS, 1), (QUEUE_DELAY_US, 0)) if key in keys})
    axes = (Axis(key=axis.key, values=(8, 2)) if axis.key == MAX_BATCH_SIZE else axis for axis in kept.axes)
    return Space(axes=tuple(axes), constraints=kept.constraints)
