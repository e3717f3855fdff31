"""Cases through `graphkiln convert`, and the converted version as an instance computes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx

from conforming.cases import Case
from conforming.instance import ask_instance
from conforming.outcome import Outcome, Verdict
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe


def ask_converted(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """What becomes of cases that are converted first, without samples of theirs.

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
    try:
        version = convert(recipe)
    except GraphkilnError as error:
        return Outcome.of(Verdict.REFUSED, error)
    return ask_instance(case, version)
