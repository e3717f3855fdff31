"""A request that is really made before a session serves, for versions without golden samples.

Which values make sense to such a graph is unknown, and an operator may refuse made-up ones: an index that is out of
range, a size that does not fit. So the saved graph gets the request, too, in ONNX Runtime with all optimizations off:
what it computes, the session must compute; where it fails as well, the request is at fault and not the session. A
session of another engine, or of another precision, must also compute the same, as far as the saved graph itself
computes the same twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError, VerificationError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.proof.policy import Limits

# Inputs for graphs without golden samples: made from the signature, since sensible values are unknown.

# Of dimensions that vary: the first that a graph takes. Most networks take no image of one pixel.
_SIZES = (1, 8, 64, 224)
# Of a request in which a size is tried that may be too large: four dimensions of 224 would take 10 GB.
_MOST_ELEMENTS = 1 << 22
_SCALES = (1.0, 0.5, 4.0, 0.25)  # of the floating-point numbers of rows that are computed together
_FILLS = 4
_ASCENDING = 2
_COUNTED = 3
_TEXTS = ("", "a", "a", "2")


@dataclass(frozen=True, slots=True)
class SyntheticInputs:
    """A recipe for requests.

    Attributes:
        size: Size of every dimension that varies, but for the batch.
        fill: 0: floating-point numbers between 0 and 1, other numbers 0, empty texts; 1: normal numbers, 1, a letter;
            2: normal numbers, ascending ones, a letter; 3: 2 to 5 in turn, which sizes, scales and repeats may be.
    """

    size: int = 1
    fill: int = 0

    def feeds(self, signature: Signature, batch: int = 1, *, seed: int = 0) -> dict[str, AnyArray]:
        """Make one request; `batch` is the size of a first dimension that varies."""
        generator = np.random.default_rng(seed)
        return {spec.name: self._array(spec, batch, generator) for spec in signature.inputs}

    def batch(self, signature: Signature, size: int) -> dict[str, AnyArray]:
        """Make one request of one row, repeated: as large as `feeds` makes it, at the cost of a copy."""
        row = self.feeds(signature)
        return {spec.name: _repeated(row[spec.name], spec, size) for spec in signature.inputs}

    def _array(self, spec: TensorSpec, batch: int, generator: np.random.Generator) -> AnyArray:
        dims = enumerate(spec.shape)
        shape = [dim if isinstance(dim, int) else batch if axis == 0 else self.size for axis, dim in dims]
        if spec.dtype is DType.BYTES:
            return np.full(shape, _TEXTS[self.fill], np.object_)
        if self.fill == _COUNTED:
            return (np.arange(np.prod(shape, dtype=np.int64)) % 4 + 2).reshape(shape).astype(spec.dtype.numpy)
        if spec.dtype.is_float:
            numbers = generator.standard_normal(shape) if self.fill else generator.random(shape)
            return numbers.astype(spec.dtype.numpy)
        if self.fill == _ASCENDING:
            return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape).astype(spec.dtype.numpy)
        return np.full(shape, self.fill, spec.dtype.numpy)


def synthetic_inputs(signature: Signature) -> Iterator[SyntheticInputs]:
    """Yield synthetic inputs for a graph, the plainest first."""
    varies = any(isinstance(dim, str) for spec in signature.inputs for dim in spec.shape[1:])
    for size in _SIZES if varies else _SIZES[:1]:
        if size == _SIZES[0] or _elements(signature, size) <= _MOST_ELEMENTS:
            yield from (SyntheticInputs(size=size, fill=fill) for fill in range(_FILLS))


def different_rows(signature: Signature, size: int) -> Iterator[dict[str, AnyArray]]:
    """Yield requests of one row each that differ as much as they can, so that a mean over them shows.

    Args:
        signature: Signature of a graph whose inputs all have a first dimension that varies.
        size: Size of every other dimension that varies.
    """
    for row, scale in enumerate(_SCALES):
        feeds = SyntheticInputs(size=size, fill=row % _FILLS).feeds(signature, seed=row)
        yield {name: _scaled(array, scale) for name, array in feeds.items()}


def _scaled(array: AnyArray, scale: float) -> AnyArray:
    if array.dtype.kind in "biuOSU":
        return array
    scaled: AnyArray = (array.astype(np.float64) * scale).astype(array.dtype)
    return scaled


def _repeated(array: AnyArray, spec: TensorSpec, size: int) -> AnyArray:
    return np.repeat(array, size, axis=0) if spec.shape and isinstance(spec.shape[0], str) else array


def _elements(signature: Signature, size: int) -> int:
    shapes = ([dim if isinstance(dim, int) else size for dim in spec.shape[1:]] for spec in signature.inputs)
    return sum(map(math.prod, shapes))


OpenReference = Callable[[Path], Session]
Arrays = Mapping[str, AnyArray]

_FEWEST_ROWS = 3
# Of dimensions that vary, beside the size that a request was made up with: along a dimension of 1 nothing mixes.
_SIZE = 8
_FAILS_ALONE = "the session fails where the saved graph does not"


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of a trial.

    Attributes:
        synthetic: Inputs that the session computes; None where none are known.
        note: Why there are none, or what could not be compared; may be empty.
        outputs: What the session computed for one row of them; None where only the comparison has it.
    """

    synthetic: SyntheticInputs | None
    note: str = ""
    outputs: Arrays | None = None


def try_as_saved(session: Session, graph_path: Path, open_reference: OpenReference) -> Trial:
    """Try a session that runs the graph as it was saved.

    Args:
        session: The session.
        graph_path: The saved graph.
        open_reference: Loads the saved graph for the comparison.

    Raises:
        LoweringError: It refuses what the saved graph computes, or every request for the same reason.
    """
    failures: list[tuple[SyntheticInputs, GraphkilnError]] = []
    for inputs in synthetic_inputs(session.signature):
        try:
            outputs = session.run(inputs.feeds(session.signature))
        except GraphkilnError as error:
            failures.append((inputs, error))
        else:
            return Trial(inputs, outputs=outputs)
    with _opened(open_reference, graph_path) as reference:
        for inputs, failure in failures:
            if reference and _outputs(reference, inputs.feeds(reference.signature)) is not None:
                raise LoweringError(_FAILS_ALONE, attempts=(str(failure),))
    # Sizes are fixed and values change nothing: the runtime can never compute the graph. Text is another matter: of the
    # few that are tried, none may be a number or a date.
    specs = session.signature.inputs
    fixed = all(isinstance(dim, int) for spec in specs for dim in spec.shape)
    is_text = any(spec.dtype is DType.BYTES for spec in specs)
    first = str(failures[0][1])
    if fixed and not is_text and all(str(failure) == first for _, failure in failures):
        raise LoweringError("every request fails, whatever its values are", attempts=(first,))
    return Trial(None, f"no request that was made up runs, the first because: {first}")


def try_beside(session: Session, graph_path: Path, open_reference: OpenReference, limits: Limits) -> Trial:
    """Try a session that another engine, or the passes, made of the saved graph.

    It never gets what the saved graph refuses: OpenVINO (2026.4) divides by a zero that ONNX Runtime reports.

    Args:
        session: The session.
        graph_path: The saved graph.
        open_reference: Loads the saved graph for the comparison.
        limits: Largest differences of the outputs.

    Raises:
        LoweringError: It refuses what the saved graph computes.
        VerificationError: It computes something else, or nothing could be compared.
    """
    with _opened(open_reference, graph_path) as reference:
        if reference is None:
            raise _unproven("it has no golden samples, and ONNX Runtime does not load it for a comparison")
        computed = None
        for inputs in synthetic_inputs(reference.signature):
            feeds = inputs.feeds(reference.signature)
            expected = _outputs(reference, feeds)
            if expected is not None:
                _compare(session, reference, feeds, expected, limits)
                computed = computed or inputs
    if computed is None:
        raise _unproven("it has no golden samples, and refuses every request that was made up")
    return Trial(computed)


def check_repeats(session: Session, synthetic: SyntheticInputs, limits: Limits) -> None:
    """Make the same request twice.

    ONNX Runtime (1.31) writes the new statistics of a BatchNormalization in training mode over the saved ones.

    Raises:
        LoweringError: The responses differ: what was requested before would be part of every response.
    """
    feeds = synthetic.feeds(session.signature)
    if wrong := _differences(session.run(feeds), session.run(feeds), limits):
        raise LoweringError(
            "the same request gets another response the second time",
            attempts=(wrong[0],),
            hint="a BatchNormalization in training mode does that: export the model in evaluation mode (model.eval())",
        )


def find_mixed_rows(session: Session, synthetic: SyntheticInputs | None, limits: Limits) -> str:
    """Find out why the rows of several requests must not be computed together; empty where they may.

    Args:
        session: The session.
        synthetic: Inputs that it computes; None where none are known.
        limits: Largest differences between a row of a batch and the same row alone.
    """
    signature = session.signature
    if not all(spec.batchable for spec in signature.inputs):
        return ""
    if synthetic is None:
        return "no request is known that the graph computes, so its rows may depend on each other"
    varies = any(isinstance(dim, str) for spec in signature.inputs for dim in spec.shape[1:])
    for size in dict.fromkeys((synthetic.size, _SIZE)) if varies else (synthetic.size,):
        rows, alone = list[Arrays](), list[Arrays]()
        for row in different_rows(signature, size):
            if (outputs := _outputs(session, row)) is not None:
                rows.append(row)
                alone.append(outputs)
        if len(rows) < _FEWEST_ROWS and size == synthetic.size:
            rows, alone = [synthetic.feeds(signature, seed=seed) for seed in range(_FEWEST_ROWS)], []
        if len(rows) >= _FEWEST_ROWS and (reason := _compare_rows(session, rows, alone, limits)):
            return reason
    return ""


def _compare_rows(session: Session, rows: Sequence[Arrays], alone: Sequence[Arrays], limits: Limits) -> str:
    """Compute rows together, and alone where that is not done yet; return how they differ."""
    feeds = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    try:
        alone = alone or [session.run(row) for row in rows]
        together = session.run(feeds)
    except GraphkilnError as error:
        return f"{len(rows)} rows at once fail: {error}"
    for name, array in together.items():
        if array.shape[:1] != (len(rows),) or any(single[name].shape[:1] != (1,) for single in alone):
            return f"output '{name}' has the shape {list(array.shape)} for {len(rows)} rows"
    for index, single in enumerate(alone):  # each by itself: a large one would hide the others
        found = {name: array[index : index + 1] for name, array in together.items()}
        if differing := _differences(single, found, limits):
            return f"a row depends on the others: {differing[0]}"
    return ""


def _compare(session: Session, reference: Session, feeds: Arrays, expected: Arrays, limits: Limits) -> None:
    try:
        outputs = session.run(feeds)
    except GraphkilnError as error:
        raise LoweringError(_FAILS_ALONE, attempts=(str(error),)) from error
    if not (wrong := _differences(expected, outputs, limits)):
        return
    again = reference.run(feeds)
    same = (
        again[name].shape == array.shape and again[name].tobytes() == array.tobytes()
        for name, array in expected.items()
    )
    if all(same):
        raise VerificationError(
            "the outputs are not those of the saved graph",
            report=f"{limits.name}, for a request that was made up: {'; '.join(wrong)}",
            hint="choose another engine or precision, or convert the model with samples that make sense to it",
        )


def _differences(expected: Arrays, found: Arrays, limits: Limits) -> list[str]:
    return [str(error) for error in compare(expected, found) if not error.within(limits)]


def _outputs(session: Session, feeds: Arrays) -> Arrays | None:
    """Compute the outputs; None where the session refuses the feeds."""
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


def _unproven(report: str) -> VerificationError:
    return VerificationError(
        "nothing proves that the outputs are those of the saved graph",
        report=report,
        hint="convert it with samples that make sense to it (graphkiln convert FILE.onnx --samples DIR), leave engine "
        "and precision out, or serve it unproven (self_test: off)",
    )
