"""`sklearn:FILE.skops`: an estimator or pipeline of scikit-learn, exported by skl2onnx.

A `.skops` file with known types runs no code; other types are listed and need `--allow-code`. The
reference is the estimator's own `predict`, `predict_proba`, ..., on rows like its training data: from what its steps
know, on both sides of the splits of its trees, or the user's. If fp32 inputs change an answer, the graph is exported
with FP64 inputs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir
import skl2onnx
import skops.io
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, StringTensorType

from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.arrays import as_text, is_text
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.files import open_regular
from graphkiln_backend.passes.edge_passes import Rename
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.repository.tensor_outputs import with_tensor_outputs
from graphkiln_converters.recipe import Recipe, check_file, first_line
from graphkiln_converters.sources.base import (
    CODE_HINT,
    InputSpec,
    SourceModel,
    feeds_of,
    joined,
    known_columns,
    with_known,
)
from graphkiln_converters.sources.tables import fitted_rows
from graphkiln_converters.sources.texts import documents, reads_documents, vectorizer_options, vectorizers
from graphkiln_converters.sources.trees import Columns, Trees, correct_trees, with_leaves

# Methods that an output of a graph can correspond to.
_METHODS = (
    *("predict", "predict_proba", "decision_function", "transform"),
    *("score_samples", "predict_log_proba", "predict_std"),
)
_ML_OPSET = 3
_TRIED = 512  # rows like the training data, to begin with
_SEED = 1
_ADVICE = (
    "a step of the estimator is exported with other results, on rows like those that it knows of its training data; "
    "give rows of your own, --samples FILE.npz saved with numpy.savez(FILE, INPUT_0=table), to see whether they matter"
)
_TEXT_ADVICE = (
    "ONNX has no operators for some settings of its vectorizer: sublinear_tf, stop words within n-grams, characters, "
    "accents and many token patterns; prepare the text before the model"
)
_MOST_SINGLE = 64  # columns that are tried one by one
# Largest relative L2 for matching an output with a method; the proof is much stricter.
_LOOSE = 1e-2
_EXACT = 1e-5
_TYPES = {DType.FP32: FloatTensorType, DType.FP64: DoubleTensorType, DType.BYTES: StringTensorType}
# Methods with a column for each class.
_BOTH_CLASSES = "decision_function of both classes"
_BY_CLASS = {"predict_proba", "predict_log_proba", "decision_function", _BOTH_CLASSES}
# Types of scikit-learn that skops does not trust, whose state is numbers and arrays: a forged one may compute
# nonsense or crash the conversion, but names no function to call.
_REVIEWED = (
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.metrics._dist_metrics.EuclideanDistance32",
    "sklearn.metrics._dist_metrics.EuclideanDistance64",
    "sklearn.neighbors._ball_tree.BallTree",
    "sklearn.neighbors._kd_tree.KDTree",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    "sklearn.tree._tree.Tree",
)


@dataclass(frozen=True, kw_only=True)
class SklearnModel(SourceModel):
    """A fitted estimator with one input for all columns, or one per column.

    Attributes:
        estimator: The estimator.
        graph: Graph exported by skl2onnx.
        methods: Output of the graph -> method of the estimator that computes it.
        table: Type of the estimator's tables of numbers.
    """

    fits_samples: ClassVar[bool] = True
    reference_batch: ClassVar[int] = 1024

    estimator: Any
    graph: onnx.ModelProto
    methods: Mapping[str, str]
    table: Any = np.float64

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; computed in scikit-learn's precision and rounded to the graph's."""
        table = table_of(self.estimator, self.inputs, feeds, self.table)
        return {
            value.name: _as_output(_call(self.estimator, self.methods[value.name], table), value)
            for value in self.graph.graph.output
        }

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`; only the number of rows varies."""
        return onnx_ir.from_proto(self.graph)

    def fitting(self, samples: Mapping[str, AnyArray]) -> SklearnModel:
        """See `SourceModel.fitting`: FP64 inputs if FP32 changes an answer to the samples.

        Samples in float32 are tables as the estimator gets them: their answers may differ from those of float64.
        """
        if {array.dtype for array in samples.values()} == {np.dtype(np.float32)}:
            hint = "predict with tables of float64, and give such samples: the graph may then have FP64 inputs"
            return replace(self, table=np.float32, advice=hint)
        arrays = [np.reshape(samples[spec.name], (-1, *spec.shape)) for spec in self.inputs]
        return _most_exact(self, [column for array in arrays for column in array.T])

    def error(self, columns: Columns) -> float:
        """Largest error of the graph's answers to rows that are not yet rounded to its input types."""
        wide = {spec.name: array for spec, array in zip(self.inputs, joined(self.inputs, columns), strict=True)}
        expected = self.run(wide)
        found = _outputs(self.graph, feeds_of(self.inputs, columns), self.description)
        return max(_distance(array, found[name]) for name, array in expected.items())


def open_source(location: str, recipe: Recipe) -> SklearnModel:
    """Load an estimator and export it.

    Raises:
        ConversionError: The file is missing or damaged, holds types that need --allow-code, or cannot be exported.
    """
    model = open_estimator(load_estimator(location, recipe), f"sklearn:{location}")
    if recipe.samples:
        return model  # `fitting` follows
    model = _most_exact(model, [])
    _check_types_of_tables(model)
    return model


def open_estimator(estimator: Any, description: str) -> SklearnModel:
    """Export an estimator with FP32 inputs, if possible; `fitting` chooses their final types.

    Raises:
        ConversionError: It is not fitted, or cannot be exported.
    """
    specs = column_inputs(estimator, description, DType.FP32)
    specs = with_known(specs, _plausible(estimator, specs))
    try:
        model = _export(estimator, specs, description)
    except ConversionError:
        if all(spec.dtype is DType.BYTES for spec in specs):
            raise
        model = _export(estimator, _retyped(specs, DType.FP64), description)
    model = replace(model, advice=advice_for(estimator))
    labels = getattr(estimator, "classes_", ())
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and {*model.methods.values()} & _BY_CLASS:
        model = replace(model, labels=tuple(map(str, labels)))
    return _with_rows(model)


def _most_exact(single: SklearnModel, columns: Columns) -> SklearnModel:
    """Return the model with FP64 inputs if these are closer to the estimator than FP32.

    Args:
        single: The model with FP32 inputs.
        columns: The user's rows, to be answered in addition to the known ones.
    """
    tried = [known_columns(single.inputs), *([columns] if columns else [])]
    worst = max(map(single.error, tried))
    if worst <= _EXACT or all(spec.dtype is not DType.FP32 for spec in single.inputs):
        return single
    try:
        double = _export(single.estimator, _retyped(single.inputs, DType.FP64), single.description)
        remaining = max(map(double.error, tried))
    except ConversionError as error:
        return replace(single, advice=f"{single.advice}; FP64 inputs were tried, too: {error.message}")
    if remaining >= worst:
        return replace(
            single, advice=f"{single.advice}; FP64 inputs were tried, too: their largest error is {remaining:.1g}"
        )
    rows = sum(len(columns[0]) for columns in tried)
    note = f"inputs are FP64: the error on {rows} samples is {remaining:.1g}, and was {worst:.1g} with FP32 inputs"
    return replace(
        single, inputs=double.inputs, graph=double.graph, methods=double.methods, notes=(*single.notes, note)
    )


def _check_types_of_tables(model: SklearnModel) -> None:
    """Refuse an estimator that answers float32 and float64 tables differently, if both are likely.

    Estimators that were fitted to a table with named columns, or to text, get no arrays of float32.
    """
    spec = model.inputs[0]
    if len(model.inputs) > 1 or spec.dtype is DType.BYTES or hasattr(model.estimator, "feature_names_in_"):
        return
    generator = np.random.default_rng(_SEED)
    rows = fitted_rows(model.estimator, spec.shape[0], generator, _TRIED, exact=0.0)
    feeds = {spec.name: rows.astype(np.float32)}
    try:
        errors = compare(model.run(feeds), replace(model, table=np.float32).run(feeds))
    except ConversionError:  # it rejects tables of float32
        return
    if any(not error.within(EXPORT) for error in errors):
        raise ConversionError(
            f"scikit-learn answers a table of float32 and the same numbers in float64 differently: "
            f"{'; '.join(str(error) for error in errors if not error.within(EXPORT))}",
            hint="give rows in the type that you predict with: --samples FILE.npz, saved with "
            "numpy.savez(FILE, INPUT_0=table); float64 gives the graph FP64 inputs",
        )


def load_estimator(location: str, recipe: Recipe) -> Any:
    """Load a .skops file.

    Raises:
        ConversionError: The file is missing or damaged, or holds types that need --allow-code.
    """
    check_file(location)
    try:
        open_regular(location).close()
        untrusted = skops.io.get_untrusted_types(file=location)
    except Exception as error:
        raise _foreign(location, error) from error
    unknown = [name for name in untrusted if name not in _REVIEWED]
    if unknown and not recipe.allow_code:
        raise ConversionError(
            f"{location} is not loaded: it holds types that can run code: {', '.join(unknown)}", hint=CODE_HINT
        )
    try:
        return skops.io.load(location, trusted=untrusted)
    except Exception as error:
        raise _foreign(location, error) from error


def _foreign(location: str, error: Exception) -> ConversionError:
    return ConversionError(
        f"{location} is not an estimator saved by skops: {first_line(error)}",
        hint="save it with skops.io.dump(estimator, FILE), with the same release of scikit-learn",
    )


def _export(estimator: Any, inputs: tuple[InputSpec, ...], description: str) -> SklearnModel:
    """Export the estimator, and find the method that each output corresponds to."""
    types = [(spec.name, _TYPES[spec.dtype]([None, *spec.shape])) for spec in inputs]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = skl2onnx.to_onnx(
                estimator,
                initial_types=types,
                target_opset={"": OPSET, "ai.onnx.ml": _ML_OPSET},
                options=vectorizer_options(estimator) or None,
            )
        with_tensor_outputs(graph)
        _restore_names(graph, [spec.name for spec in inputs])
        double = any(spec.dtype is DType.FP64 for spec in inputs)
        correct_trees(graph, estimator, double=double)
    except Exception as error:
        raise ConversionError(
            f"skl2onnx cannot export {description}: {first_line(error)}",
            hint="export it yourself, with custom converters for unsupported steps, and convert the .onnx",
        ) from error
    if double:
        _declare_outputs(graph, description)
    feeds = feeds_of(inputs, [column[:_TRIED] for column in known_columns(inputs)])
    expected, found = _results(estimator, inputs, feeds), _outputs(graph, feeds, description)
    nearest: dict[str, tuple[str, float]] = {}  # output -> the method with the nearest result, and its distance
    for value in graph.graph.output:
        for dim, size in zip(value.type.tensor_type.shape.dim[1:], found[value.name].shape[1:], strict=False):
            dim.dim_value = size  # skl2onnx declares one column for trees of several targets
        distances = {name: _apart(_as_output(each, value), found[value.name]) for name, each in expected.items()}
        nearest[value.name] = min(distances.items(), key=lambda item: item[1])
    methods = {name: method for name, (method, distance) in nearest.items() if distance <= _LOOSE}
    wrong = [name for name in nearest if name not in methods and "prob" in name and "predict_proba" in expected]
    if wrong:
        raise ConversionError(
            f"{description}: '{wrong[0]}' of the exported graph differs from predict_proba: "
            f"{nearest[wrong[0]][1]:.2g} of signal",
            hint=advice_for(estimator),
        )
    if not methods:
        raise ConversionError(
            f"{description}: no output of the exported graph matches {', '.join(expected)}",
            hint="export it yourself and convert the .onnx with --reference",
        )
    kept = [value for value in graph.graph.output if value.name in methods]
    del graph.graph.output[:]
    graph.graph.output.extend(kept)
    notes = tuple(
        f"output '{name}' of skl2onnx's graph is left out: it matches none of {', '.join(expected)}"
        for name in nearest
        if name not in methods
    )
    return SklearnModel(
        description=description,
        named=True,
        libraries=("scikit-learn", "skl2onnx", "skops"),
        inputs=inputs,
        notes=notes,
        estimator=estimator,
        graph=graph,
        methods=methods,
    )


def _restore_names(graph: onnx.ModelProto, columns: Sequence[str]) -> None:
    """Give the inputs the names of the columns, which skl2onnx changes if they have spaces or are those of outputs."""
    given = [value.name for value in graph.graph.input]
    if given == columns:
        return
    results = {}
    for value in graph.graph.output:
        results[value.name] = value.name
        while results[value.name] in columns:
            results[value.name] += "_"
    model = onnx_ir.from_proto(graph)
    Rename(dict(zip(given, columns, strict=True)), results)(model)
    graph.CopyFrom(onnx_ir.to_proto(model))


def _declare_outputs(graph: onnx.ModelProto, description: str) -> None:
    """Declare the types that outputs have: skl2onnx declares FP64 also for results of fp32 nodes."""
    untyped = onnx.ModelProto()
    untyped.CopyFrom(graph)
    for value in untyped.graph.output:
        value.ClearField("type")
    with _open(untyped, description) as session:
        types = {spec.name: spec.dtype for spec in session.signature.outputs}
    for value in graph.graph.output:
        if types[value.name] is DType.FP32:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT


@contextmanager
def _open(graph: onnx.ModelProto, description: str) -> Iterator[Session]:
    """Open a reference session of a graph for the duration of the context."""
    with tempfile.TemporaryDirectory(prefix="graphkiln-") as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(graph, path)
        try:
            with OnnxRuntimeEngine().build_reference(path) as session:
                yield session
        except GraphkilnError as error:
            raise ConversionError(f"{description} does not run as a graph: {error}", hint=error.hint) from error


def _outputs(graph: onnx.ModelProto, feeds: Mapping[str, AnyArray], description: str) -> Mapping[str, AnyArray]:
    with _open(graph, description) as session:
        return session.run(feeds)


def advice_for(estimator: Any) -> str:
    """Hint for a graph whose answers differ from the estimator's."""
    return _TEXT_ADVICE if any(True for _ in vectorizers(estimator)) else _ADVICE


def _results(estimator: Any, inputs: tuple[InputSpec, ...], feeds: Mapping[str, AnyArray]) -> dict[str, Any]:
    """Results of all methods of the estimator."""
    table = table_of(estimator, inputs, feeds)
    results = {method: _call(estimator, method, table) for method in _METHODS if hasattr(estimator, method)}
    if np.ndim(results.get("decision_function", 0)) == 1 and hasattr(estimator, "classes_"):
        results[_BOTH_CLASSES] = _call(estimator, _BOTH_CLASSES, table)
    return results


def _call(estimator: Any, method: str, table: Any) -> Any:
    if method == _BOTH_CLASSES:
        scores = _call(estimator, "decision_function", table)
        return np.stack([-scores, scores], axis=1)
    function: Callable[[Any], Any] = getattr(estimator, method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about column names and unknown categories
        try:
            found = function(table)
        except Exception as error:
            if getattr(table, "dtype", None) == np.float64:  # KMeans takes only the type that it was fitted to
                return _call(estimator, method, table.astype(np.float32))
            raise ConversionError(
                f"{type(estimator).__name__}.{method} rejects the samples: {first_line(error)}",
                hint="provide real samples: --samples FILE.npz",
            ) from error
    return found.toarray() if hasattr(found, "toarray") else found


def _as_output(found: Any, value: onnx.ValueInfoProto) -> AnyArray:
    """Convert a result to the shape and element type of an output of the graph."""
    tensor = value.type.tensor_type
    dtype = DType.from_onnx(tensor.elem_type)
    array = np.asarray(found)
    if dtype is DType.BYTES:
        array = as_text(array if is_text(array) else array.astype(str))
    elif not is_text(array):
        array = array.astype(dtype.numpy)
    missing = len(tensor.shape.dim) - array.ndim
    return array.reshape(*array.shape, *[1] * max(0, missing))


def _distance(expected: AnyArray, found: AnyArray) -> float:
    """Largest error of an element relative to the signal; for classes and text, the share of different elements."""
    (error,) = compare({"": expected}, {"": found})
    return max(error.worst_element, error.relative_l2, error.disagreement)


def _apart(expected: AnyArray, found: AnyArray) -> float:
    """Relative L2, to which single rows count little; for classes and text, the share of different elements."""
    (error,) = compare({"": expected}, {"": found})
    return max(error.relative_l2, error.disagreement)


# Rows like those of the training data.


def _with_rows(model: SklearnModel) -> SklearnModel:
    """Add rows that reach the leaves of trees, or a note if they do not, and rows with missing and unknown values."""
    estimator, specs, columns = model.estimator, model.inputs, known_columns(model.inputs)
    generator = np.random.default_rng(_SEED)
    notes = model.notes
    if trees := Trees.of(model.graph.graph):
        with _open(trees.before(model.graph), model.description) as session:
            columns, note = with_leaves(trees, session.run, specs, columns, generator)
        notes = (*notes, note) if note else notes
    columns = _with_odd_rows(estimator, specs, columns, generator)
    return replace(model, inputs=with_known(specs, columns), notes=notes)


def _plausible(estimator: Any, specs: tuple[InputSpec, ...]) -> list[AnyArray]:
    """Draw columns of numbers and words that the estimator accepts."""
    generator = np.random.default_rng(_SEED)
    width = sum(spec.shape[0] for spec in specs)
    has_numbers = any(spec.dtype is not DType.BYTES for spec in specs)
    numbers = fitted_rows(estimator, width, generator, _TRIED) if has_numbers else np.zeros((_TRIED, width))
    columns: list[AnyArray] = []
    for spec in specs:
        if spec.dtype is DType.BYTES:
            columns.append(generator.permutation(np.array(spec.words, np.object_)))
        else:
            columns += [*numbers[:, len(columns) : len(columns) + spec.shape[0]].T]
    rows = max(_TRIED, *map(len, columns))
    columns = [np.resize(column, rows) for column in columns]
    if not _accepts(estimator, specs, columns):  # logarithms and counts
        positive = [column if column.dtype == np.object_ else np.abs(column) for column in columns]
        columns = positive if _accepts(estimator, specs, positive) else columns
    return columns


def _with_odd_rows(
    estimator: Any, specs: tuple[InputSpec, ...], columns: list[AnyArray], generator: np.random.Generator
) -> list[AnyArray]:
    """Add rows with missing numbers and unknown words, in those columns where the estimator accepts them."""
    some = [column[:_TRIED] for column in columns]
    odd = [np.full(len(some[0]), "unknown word" if each.dtype == np.object_ else np.nan, each.dtype) for each in some]
    few = min(_MOST_SINGLE, len(some))
    single = [[odd[i] if i == number else each for i, each in enumerate(some)] for number in range(few)]
    if _accepts(estimator, specs, odd):
        accepted = [*range(len(some))]
    else:
        accepted = [i for i in range(few) if _accepts(estimator, specs, [column[:2] for column in single[i]])]
    if not accepted or reads_documents(_first_step(estimator)):
        return columns
    chosen = generator.random((len(accepted), len(some[0]))) < 1 / len(accepted)
    for number, rows in zip(accepted, chosen, strict=True):
        some[number] = np.where(rows, odd[number], some[number])
    return [np.concatenate(pair) for pair in zip(columns, some, strict=True)]


def _accepts(estimator: Any, specs: tuple[InputSpec, ...], columns: Columns) -> bool:
    """Return true if the estimator computes rows."""
    try:
        _results(estimator, specs, dict(zip((spec.name for spec in specs), joined(specs, columns), strict=True)))
    except ConversionError:
        return False
    return True


def _retyped(specs: tuple[InputSpec, ...], number: DType) -> tuple[InputSpec, ...]:
    return tuple(spec if spec.dtype is DType.BYTES else replace(spec, dtype=number) for spec in specs)


# Input columns of an estimator: numbers, categories, documents.


def column_inputs(estimator: Any, location: str, number: DType) -> tuple[InputSpec, ...]:
    """Make one input `[rows, columns]`, or one per column if some are text.

    Raises:
        ConversionError: The estimator is not fitted, or takes no table.
    """
    first = _first_step(estimator)
    if reads_documents(first):
        return (InputSpec(name="text", dtype=DType.BYTES, shape=(1,), words=_words_of(first, 0)),)
    count = getattr(estimator, "n_features_in_", None)
    if not isinstance(count, int):
        raise ConversionError(f"{location} is not fitted, or its input is not a table of columns")
    words = {column: found for column in range(count) if (found := _words_in(estimator, column)) is not None}
    if not words:
        return (InputSpec(name="X", dtype=number, shape=(count,)),)
    named = getattr(estimator, "feature_names_in_", None)
    names = [f"column_{number}" for number in range(count)] if named is None else [str(name) for name in named]
    return tuple(
        InputSpec(name=name, dtype=DType.BYTES, shape=(1,), words=words[column])
        if column in words
        else InputSpec(name=name, dtype=number, shape=(1,))
        for column, name in enumerate(names)
    )


def _first_step(estimator: Any) -> Any:
    while hasattr(estimator, "steps"):
        estimator = estimator.steps[0][1]
    return estimator


def _words_in(estimator: Any, column: int) -> tuple[str, ...] | None:
    """Return the categories of a column, or None for numbers."""
    first = _first_step(estimator)
    for name, transformer, _ in getattr(first, "transformers_", ()):  # of a ColumnTransformer
        # scikit-learn's numbers of the columns, which may be given by name, mask or slice.
        positions = list(first._transformer_to_input_indices.get(name, ()))  # noqa: SLF001
        if column in positions and not isinstance(transformer, str):
            found = _words_of(_first_step(transformer), positions.index(column))
            if found:
                return found
    return _words_of(first, column) or None


def _words_of(estimator: Any, column: int) -> tuple[str, ...]:
    """Categories of an encoder for a column; empty for numbers."""
    if reads_documents(estimator):
        return documents(estimator)
    for attribute in ("categories_", "statistics_"):
        categories = getattr(estimator, attribute, None)
        if categories is not None and len(categories) > column:
            found = np.atleast_1d(np.asarray(categories[column]))
            if found.dtype.kind in "OU" and all(isinstance(word, str) for word in found.tolist()):
                return tuple(map(str, found))
    return ()


def table_of(
    estimator: Any, inputs: tuple[InputSpec, ...], feeds: Mapping[str, AnyArray], number: Any = np.float64
) -> Any:
    """Convert inputs of the graph to the estimator's table: of numbers, of objects, or with named columns.

    Args:
        estimator: The estimator.
        inputs: Inputs of the graph.
        feeds: Arrays by input.
        number: Type of the table's numbers.

    Raises:
        ConversionError: The columns have names, and pandas is not installed.
    """
    columns = [as_text(feeds[spec.name]) for spec in inputs]
    columns = [column.astype(number) if column.dtype.kind == "f" else column for column in columns]
    if len(inputs) == 1:
        return columns[0][:, 0] if reads_documents(_first_step(estimator)) else columns[0]
    if not hasattr(estimator, "feature_names_in_"):
        return np.concatenate([column.astype(np.object_) for column in columns], axis=1)
    try:
        import pandas as pd
    except ImportError as error:
        raise ConversionError(
            "the estimator was fitted to a table with named columns, which needs pandas", hint="pip install pandas"
        ) from error
    return pd.DataFrame({spec.name: column[:, 0] for spec, column in zip(inputs, columns, strict=True)})
