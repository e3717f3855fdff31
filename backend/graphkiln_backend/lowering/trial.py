"""Verification with synthetic requests, for versions without golden samples.

Valid input values of such a graph are unknown, and an operator may refuse synthetic ones: an index out of range, a size
that does not fit. So the saved graph runs the same request in ONNX Runtime with all optimizations off. If it fails as
well, the request is invalid, not the session. Otherwise the session must succeed; with another engine or precision it
must also compute the same outputs, unless the saved graph itself is not deterministic.
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

OpenReference = Callable[[Path], Session]
Arrays = Mapping[str, AnyArray]

_SIZES = (1, 8, 64, 224)  # tried for dynamic dimensions; most networks refuse images of one pixel
_MOST_ELEMENTS = 1 << 22  # of a request with a larger size: four dimensions of 224 would take 10 GB
_SCALES = (1.0, 0.5, 4.0, 0.25)  # factors that make the rows of a batch differ
_FILLS = 4
_ASCENDING = 2
_COUNTED = 3
_ENDS = 4
_TEXTS = ("", "a", "a", "2", "2")
_SHORT_BYTES = 2  # no sizes and few indices are integers of so few bytes, whose ends are tried
_FEWEST_ROWS = 3
_SIZE = 8  # second size of dynamic dimensions in the search for mixed rows: a dimension of 1 shows no mixing
_FAILS_ALONE = "the session fails where the saved graph does not"


@dataclass(frozen=True, slots=True)
class SyntheticInputs:
    """Recipe for synthetic requests.

    Attributes:
        size: Size of all dynamic dimensions except the batch.
        fill: Values of floats, integers and texts. 0: uniform in 0..1, 0, empty; 1: normal, 1, a letter; 2: normal,
            ascending, a letter; 3: cycling from 2 to 5, which suits sizes, scales and repeats; 4: as 3, but with the
            ends of the type for integers of 8 and 16 bits.
    """

    size: int = 1
    fill: int = 0

    def feeds(self, signature: Signature, batch: int = 1, *, seed: int = 0) -> dict[str, AnyArray]:
        """Make a request; `batch` is the size of a dynamic first dimension."""
        generator = np.random.default_rng(seed)
        return {spec.name: self._array(spec, batch, generator) for spec in signature.inputs}

    def batch(self, signature: Signature, size: int) -> dict[str, AnyArray]:
        """Make a request that repeats one row, which is cheaper than `feeds` for a large batch."""
        row = self.feeds(signature)
        return {spec.name: _repeated(row[spec.name], spec, size) for spec in signature.inputs}

    def _array(self, spec: TensorSpec, batch: int, generator: np.random.Generator) -> AnyArray:
        dims = enumerate(spec.shape)
        shape = [dim if isinstance(dim, int) else batch if axis == 0 else self.size for axis, dim in dims]
        if spec.dtype is DType.BYTES:
            return np.full(shape, _TEXTS[self.fill], np.object_)
        if self.fill == _ENDS and _is_short(spec):
            ends = np.iinfo(str(spec.dtype.numpy))
            values = np.array([ends.max, ends.min, 1, ends.max // 2 + 1, ends.max - 1], spec.dtype.numpy)
            resized: AnyArray = np.resize(values, shape)
            return resized
        if self.fill in (_COUNTED, _ENDS):
            return (np.arange(np.prod(shape, dtype=np.int64)) % 4 + 2).reshape(shape).astype(spec.dtype.numpy)
        if spec.dtype.is_float:
            numbers = generator.standard_normal(shape) if self.fill else generator.random(shape)
            return numbers.astype(spec.dtype.numpy)
        if self.fill == _ASCENDING:
            return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape).astype(spec.dtype.numpy)
        return np.full(shape, self.fill, spec.dtype.numpy)


def synthetic_inputs(signature: Signature) -> Iterator[SyntheticInputs]:
    """Yield recipes for a graph, the simplest first."""
    varies = any(isinstance(dim, str) for spec in signature.inputs for dim in spec.shape[1:])
    fills = [*range(_FILLS), *([_ENDS] if any(map(_is_short, signature.inputs)) else [])]
    for size in _SIZES if varies else _SIZES[:1]:
        if size == _SIZES[0] or _elements(signature, size) <= _MOST_ELEMENTS:
            yield from (SyntheticInputs(size=size, fill=fill) for fill in fills)


def _is_short(spec: TensorSpec) -> bool:
    return spec.dtype.numpy.kind in "iu" and spec.dtype.numpy.itemsize <= _SHORT_BYTES


def different_rows(signature: Signature, size: int) -> Iterator[dict[str, AnyArray]]:
    """Yield requests of one row each that differ strongly, so that any mean over rows shows.

    Args:
        signature: Signature with dynamic first dimensions only.
        size: Size of all other dynamic dimensions.
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


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of a trial.

    Attributes:
        synthetic: Recipe that the session accepts, or None.
        note: Reason why there is no recipe, or empty.
        outputs: Outputs of the session for one row, if it ran alone.
    """

    synthetic: SyntheticInputs | None
    note: str = ""
    outputs: Arrays | None = None


def try_as_saved(session: Session, graph_path: Path, open_reference: OpenReference) -> Trial:
    """Try a session that runs the graph as saved.

    Args:
        session: The session.
        graph_path: The saved graph.
        open_reference: Loads the saved graph in the reference engine.

    Raises:
        LoweringError: The session fails on a request that the saved graph accepts, or on all for the same reason.
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
    # With fixed sizes, the same error for all values means that the runtime cannot compute the graph. Text is an
    # exception: the graph may need a number or a date.
    specs = session.signature.inputs
    fixed = all(isinstance(dim, int) for spec in specs for dim in spec.shape)
    is_text = any(spec.dtype is DType.BYTES for spec in specs)
    first = str(failures[0][1])
    if fixed and not is_text and all(str(failure) == first for _, failure in failures):
        raise LoweringError("every synthetic request fails with the same error", attempts=(first,))
    return Trial(None, f"every synthetic request fails, the first with: {first}")


def try_beside(session: Session, graph_path: Path, open_reference: OpenReference, limits: Limits) -> Trial:
    """Compare a session of another engine or precision with the saved graph.

    Requests that the saved graph refuses are never sent to the session: OpenVINO (2026.4) divides by a zero that ONNX
    Runtime reports.

    Args:
        session: The session.
        graph_path: The saved graph.
        open_reference: Loads the saved graph in the reference engine.
        limits: Policy row.

    Raises:
        LoweringError: The session fails on a request that the saved graph accepts.
        VerificationError: Its outputs differ, or nothing could be compared.
    """
    with _opened(open_reference, graph_path) as reference:
        if reference is None:
            raise _unproven("it has no golden samples, and ONNX Runtime cannot load it for a comparison")
        computed = None
        for inputs in synthetic_inputs(reference.signature):
            feeds = inputs.feeds(reference.signature)
            expected = _outputs(reference, feeds)
            if expected is not None:
                _compare(session, reference, feeds, expected, limits)
                computed = computed or inputs
    if computed is None:
        raise _unproven("it has no golden samples, and refuses every synthetic request")
    return Trial(computed)


def check_repeats(session: Session, synthetic: SyntheticInputs, limits: Limits) -> None:
    """Check that a repeated request gets the same response.

    ONNX Runtime (1.31) overwrites the saved statistics of a BatchNormalization in training mode at each run.

    Raises:
        LoweringError: The responses differ, so that earlier requests influence later ones.
    """
    feeds = synthetic.feeds(session.signature)
    if wrong := _differences(session.run(feeds), session.run(feeds), limits):
        raise LoweringError(
            "a repeated request gets a different response",
            attempts=(wrong[0],),
            hint="a BatchNormalization in training mode does that: export the model in evaluation mode (model.eval())",
        )


def find_mixed_rows(session: Session, synthetic: SyntheticInputs | None, limits: Limits) -> str:
    """Return the reason why requests must not share a batch, or empty.

    Args:
        session: The session.
        synthetic: Recipe that the session accepts, or None.
        limits: Policy row for a row in a batch compared with the same row alone.
    """
    signature = session.signature
    if not all(spec.batchable for spec in signature.inputs):
        return ""
    if synthetic is None:
        return "no valid request is known, so its rows may depend on each other"
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
    """Compare rows computed in one batch with the same rows computed alone; return the difference."""
    feeds = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    try:
        alone = alone or [session.run(row) for row in rows]
        together = session.run(feeds)
    except GraphkilnError as error:
        return f"{len(rows)} rows at once fail: {error}"
    for name, array in together.items():
        if array.shape[:1] != (len(rows),) or any(single[name].shape[:1] != (1,) for single in alone):
            return f"output '{name}' has the shape {list(array.shape)} for {len(rows)} rows"
    for index, single in enumerate(alone):  # one by one: a row of large values would hide the others
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
            report=f"{limits.name}, for a synthetic request: {'; '.join(wrong)}",
            hint="choose another engine or precision, or convert the model with valid samples",
        )


def _differences(expected: Arrays, found: Arrays, limits: Limits) -> list[str]:
    return [str(error) for error in compare(expected, found) if not error.within(limits)]


def _outputs(session: Session, feeds: Arrays) -> Arrays | None:
    """Return the outputs, or None if the session refuses the feeds."""
    try:
        return session.run(feeds)
    except GraphkilnError:
        return None


@contextmanager
def _opened(open_reference: OpenReference, graph_path: Path) -> Iterator[Session | None]:
    """Open the saved graph as a session; yield None if it cannot be loaded."""
    try:
        reference = open_reference(graph_path)
    except GraphkilnError:
        yield None
        return
    with reference:
        yield reference


def _unproven(report: str) -> VerificationError:
    return VerificationError(
        "cannot verify the outputs against the saved graph",
        report=report,
        hint="convert it with valid samples (graphkiln convert FILE.onnx --samples DIR), leave engine and precision "
        "out, or serve it without verification (self_test: off)",
    )
