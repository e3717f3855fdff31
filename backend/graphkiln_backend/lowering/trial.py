"""One request is really made before a session serves, also where there are no golden samples.

What a graph takes nobody knows then, and an operator may refuse what was made up: an index that is out of range, a size
that does not fit. So the saved graph is asked, too, by ONNX Runtime with all optimizations off: what it computes, the
session must compute; where it fails as well, the request is at fault and not the session. A session of another engine,
or of another precision, must compute the same besides, as far as the saved graph itself computes the same twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError, VerificationError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.synthetic import SyntheticInputs, different_rows, synthetic_inputs
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.proof.policy import Limits

_FEWEST_ROWS = 3
_SIZE = 8
"""Of dimensions that vary, beside the size that a request was made up with: along a dimension of 1 nothing mixes."""

OpenReference = Callable[[Path], Session]
Feeds = Mapping[str, AnyArray]
Outputs = Mapping[str, AnyArray]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Attributes:
        synthetic: Inputs that the session computes; None where none are known.
        note: Why there is none, or what could not be compared; empty where there is nothing to say.
    """

    synthetic: SyntheticInputs | None
    note: str = ""


def try_as_saved(session: Session, graph_path: Path, open_reference: OpenReference) -> Trial:
    """Asks a session that runs the graph as it was saved.

    Args:
        session: The session.
        graph_path: The saved graph.
        open_reference: Loads it for the comparison.

    Raises:
        LoweringError: It refuses what the saved graph computes, or whatever it is handed.
    """
    failures: list[tuple[SyntheticInputs, GraphkilnError]] = []
    for inputs in synthetic_inputs(session.signature):
        try:
            session.run(inputs.feeds(session.signature))
        except GraphkilnError as error:
            failures.append((inputs, error))
        else:
            return Trial(inputs)
    with _opened(open_reference, graph_path) as reference:
        for inputs, failure in failures:
            if _computes(reference, inputs):
                raise LoweringError("the session fails where the saved graph does not", attempts=(str(failure),))
    _check_values_matter(session, [str(failure) for _, failure in failures])
    return Trial(None, f"no request that was made up runs, the first because: {failures[0][1]}")


def try_beside(session: Session, graph_path: Path, open_reference: OpenReference, limits: Limits) -> Trial:
    """Asks a session that another engine, or the passes, made of the saved graph.

    It is never handed what the saved graph refuses: OpenVINO (2026.4) divides by a zero that ONNX Runtime reports.

    Args:
        session: The session.
        graph_path: The saved graph.
        open_reference: Loads it for the comparison.
        limits: How far the outputs may be apart.

    Raises:
        LoweringError: It refuses what the saved graph computes.
        VerificationError: It computes something else, or nothing could be compared.
    """
    with _opened(open_reference, graph_path) as reference:
        if reference is None:
            raise _unproven("it has no golden samples, and ONNX Runtime does not load it for a comparison")
        taken = [inputs for inputs in synthetic_inputs(reference.signature) if _computes(reference, inputs)]
        for inputs in taken:
            _compare(session, reference, inputs, limits)
    if not taken:
        raise _unproven("it has no golden samples, and refuses every request that was made up")
    return Trial(taken[0])


def check_repeats(session: Session, synthetic: SyntheticInputs, limits: Limits) -> None:
    """Makes the same request twice.

    ONNX Runtime (1.31) writes the new statistics of a BatchNormalization in training mode over the saved ones.

    Raises:
        LoweringError: The responses differ: what was requested before would be part of every response.
    """
    feeds = synthetic.feeds(session.signature)
    wrong = [str(error) for error in compare(session.run(feeds), session.run(feeds)) if not error.within(limits)]
    if wrong:
        raise LoweringError(
            "the same request gets another response the second time",
            attempts=(wrong[0],),
            hint="a BatchNormalization in training mode does that: export the model in evaluation mode (model.eval())",
        )


def find_mixed_rows(session: Session, synthetic: SyntheticInputs | None, limits: Limits) -> str:
    """Why the rows of several requests must not be computed together; empty where they may.

    Args:
        session: The session.
        synthetic: Inputs that it computes; None where none are known.
        limits: How far a row of a batch may be from the same row alone.
    """
    signature = session.signature
    if not all(spec.batchable for spec in signature.inputs):
        return ""
    if synthetic is None:
        return "no request is known that the graph computes, so nobody knows whether its rows depend on each other"
    sizes = dict.fromkeys((synthetic.size, _SIZE)) if _has_sizes(signature) else (synthetic.size,)
    for size in sizes:
        tried = ((row, _outputs(session, row)) for row in different_rows(signature, size))
        rows, alone = _transposed([(row, outputs) for row, outputs in tried if outputs is not None])
        if len(rows) < _FEWEST_ROWS and size == synthetic.size:
            rows, alone = [synthetic.feeds(signature, seed=seed) for seed in range(_FEWEST_ROWS)], []
        if len(rows) >= _FEWEST_ROWS and (reason := _compare_rows(session, rows, alone, limits)):
            return reason
    return ""


def _transposed(pairs: Sequence[tuple[Feeds, Outputs]]) -> tuple[list[Feeds], list[Outputs]]:
    return [row for row, _ in pairs], [outputs for _, outputs in pairs]


def _compare_rows(session: Session, rows: Sequence[Feeds], alone: Sequence[Outputs], limits: Limits) -> str:
    """Computes rows together, and alone where that is not done yet.

    Each is compared by itself, since a large one would hide the others.
    """
    feeds = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    try:
        alone = alone or [session.run(row) for row in rows]
        together = session.run(feeds)
    except GraphkilnError as error:
        return f"{len(rows)} rows at once fail: {error}"
    for name, array in together.items():
        if array.shape[:1] != (len(rows),) or any(single[name].shape[:1] != (1,) for single in alone):
            return f"output '{name}' has the shape {list(array.shape)} for {len(rows)} rows"
    for index, single in enumerate(alone):
        found = {name: array[index : index + 1] for name, array in together.items()}
        if differing := [str(error) for error in compare(single, found) if not error.within(limits)]:
            return f"a row depends on the others: {differing[0]}"
    return ""


def _has_sizes(signature: Signature) -> bool:
    return any(isinstance(dim, str) for spec in signature.inputs for dim in spec.shape[1:])


def _outputs(session: Session, feeds: Feeds) -> Outputs | None:
    """What it computes; None where it refuses."""
    try:
        return session.run(feeds)
    except GraphkilnError:
        return None


@contextmanager
def _opened(open_reference: OpenReference, graph_path: Path) -> Iterator[Session | None]:
    """The saved graph as a session, or None where it cannot be loaded."""
    try:
        reference = open_reference(graph_path)
    except GraphkilnError:
        yield None
        return
    with reference:
        yield reference


def _computes(reference: Session | None, inputs: SyntheticInputs) -> bool:
    if reference is None:
        return False
    try:
        reference.run(inputs.feeds(reference.signature))
    except GraphkilnError:
        return False
    return True


def _compare(session: Session, reference: Session, inputs: SyntheticInputs, limits: Limits) -> None:
    feeds = inputs.feeds(reference.signature)
    expected = reference.run(feeds)
    try:
        outputs = session.run(feeds)
    except GraphkilnError as error:
        raise LoweringError("the session fails where the saved graph does not", attempts=(str(error),)) from error
    wrong = [str(error) for error in compare(expected, outputs) if not error.within(limits)]
    if wrong and _same(expected, reference.run(feeds)):
        raise VerificationError(
            "the outputs are not those of the saved graph",
            report=f"{limits.name}, for a request that was made up: {'; '.join(wrong)}",
            hint="choose another engine or precision, or convert the model with samples that make sense to it",
        )


def _check_values_matter(session: Session, failures: Sequence[str]) -> None:
    """Refuses a graph that the runtime can never compute: sizes are fixed, and the values change nothing.

    Text is another matter: of the few that are tried, none may be a number or a date.

    Raises:
        LoweringError: Every request fails, and all for the same reason.
    """
    inputs = session.signature.inputs
    fixed = all(isinstance(dim, int) for spec in inputs for dim in spec.shape)
    if fixed and len(set(failures)) == 1 and not any(spec.dtype is DType.BYTES for spec in inputs):
        raise LoweringError("every request fails, whatever its values are", attempts=(failures[0],))


def _unproven(report: str) -> VerificationError:
    return VerificationError(
        "nothing proves that the outputs are those of the saved graph",
        report=report,
        hint="convert it with samples that make sense to it (graphkiln convert FILE.onnx --samples DIR), leave engine "
        "and precision out, or serve it unproven (self_test: off)",
    )


def _same(first: Mapping[str, AnyArray], second: Mapping[str, AnyArray]) -> bool:
    return all(map(partial(_same_array, first, second), first))


def _same_array(first: Mapping[str, AnyArray], second: Mapping[str, AnyArray], name: str) -> bool:
    return first[name].shape == second[name].shape and first[name].tobytes() == second[name].tobytes()
