"""Cases through `graphkiln convert`, and the converted version as an instance computes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx

from conforming.cases import Case
from conforming.instance import ask_instance
from conforming.outcome import Outcome, Verdict
from conforming.reasons import needs_samples
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe


def ask_converted(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """What becomes of cases that are converted first; with their own inputs as samples where made-up ones do not do.

    Args:
        cases: The cases.

    Yields:
        An outcome for each case.
    """
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="conforming-") as folder:
            yield case, _ask(case, Path(folder))


def _ask(case: Case, folder: Path) -> Outcome:
    source = folder / f"{case.served_name}.onnx"
    onnx.save(case.model, source)
    recipe = Recipe(
        source=str(source), name=case.served_name, model_store=folder / "store", keep_names=True, max_batch_size=2
    )
    outcome = _convert(case, recipe)
    if outcome.verdict is not Verdict.REFUSED or not needs_samples(outcome.reason):
        return outcome
    for path in _write_samples(case, folder):
        outcome = _convert(case, recipe.model_copy(update={"samples": path}))
        if outcome.verdict is not Verdict.REFUSED:
            break
    return outcome


def _convert(case: Case, recipe: Recipe) -> Outcome:
    try:
        version = convert(recipe)
    except GraphkilnError as error:
        return Outcome.of(Verdict.REFUSED, error)
    return ask_instance(case, version)


def _write_samples(case: Case, folder: Path) -> Iterator[Path]:
    """A case's inputs as `convert --samples` takes them: rows of a batch, or one whole sample. Which, it says then."""
    feeds = {name: value for name, value in case.feeds(0).items() if isinstance(value, np.ndarray)}
    for name, arrays in (("rows", feeds), ("whole", {key: value[np.newaxis] for key, value in feeds.items()})):
        path = folder / f"{name}.npz"
        np.savez(path, **arrays)
        yield path
