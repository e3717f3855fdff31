"""`sklearn:FILE.skops`: an estimator or pipeline of scikit-learn, exported by skl2onnx.

A `.skops` file with known types runs no code; other types are listed and need `--allow-code`. The
reference is the estimator's own `predict`, `predict_proba`, ... Trees compare with thresholds in double precision:
if fp32 inputs change a comparison, the graph is exported with FP64 inputs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import skl2onnx
import skops.io
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, StringTensorType

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.arrays import as_text, is_text
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.files import open_regular
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_backend.repository.tensor_outputs import with_tensor_outputs
from graphkiln_converters.recipe import Recipe, check_file, first_line
from graphkiln_converters.sources.base import CODE_HINT, InputSpec, SourceModel, synthetic_samples

# Methods that an output of a graph can correspond to.
_METHODS = (
    *("predict", "predict_proba", "decision_function", "transform"),
    *("score_samples", "predict_log_proba", "predict_std"),
)
_ML_OPSET = 3
_TRIED = 256
# Largest distance for matching an output with a method; the proof is much stricter.
_LOOSE = 1e-2
_EXACT = 1e-5
_TYPES = {DType.FP32: FloatTensorType, DType.FP64: DoubleTensorType, DType.BYTES: StringTensorType}
_BOTH_CLASSES = "decision_function of both classes"
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
    """

    estimator: Any
    graph: onnx.ModelProto
    methods: Mapping[str, str]

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        """See `SourceModel.run`; computed in scikit-learn's precision and rounded to the graph's."""
        table = table_of(self.estimator, self.inputs, feeds)
        return {
            value.name: _as_output(_call(self.estimator, self.methods[value.name], table), value)
            for value in self.graph.graph.output
        }

    def export(self) -> onnx_ir.Model:
        """See `SourceModel.export`; only the number of rows varies."""
        return onnx_ir.from_proto(self.graph)


def open_source(location: str, recipe: Recipe) -> SklearnModel:
    """Load an estimator and export it.

    Raises:
        ConversionError: The file is missing or damaged, holds types that need --allow-code, or cannot be exported.
    """
    estimator = _load(location, recipe)
    specs = column_inputs(estimator, location, DType.FP32)
    description = f"sklearn:{location}"
    single, worst = _export(estimator, specs, description)
    if worst <= _EXACT or all(spec.dtype is DType.BYTES for spec in specs):
        return single
    try:
        double, remaining = _export(estimator, column_inputs(estimator, location, DType.FP64), description)
    except ConversionError:
        return single  # its proof reports the error
    note = f"inputs are FP64: the error on {_TRIED} samples is {remaining:.1g}, and was {worst:.1g} with FP32 inputs"
    return replace(double, notes=(*double.notes, note)) if remaining < worst else single


def _load(location: str, recipe: Recipe) -> Any:
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


def _export(estimator: Any, inputs: tuple[InputSpec, ...], description: str) -> tuple[SklearnModel, float]:
    """Export the estimator; also return the largest distance of an output from its method."""
    types = [(spec.name, _TYPES[spec.dtype]([None, *spec.shape])) for spec in inputs]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = skl2onnx.to_onnx(
                estimator,
                initial_types=types,
                target_opset={"": OPSET, "ai.onnx.ml": _ML_OPSET},
            )
        with_tensor_outputs(graph)
    except Exception as error:
        raise ConversionError(
            f"skl2onnx cannot export {description}: {first_line(error)}",
            hint="export it yourself, with custom converters for unsupported steps, and convert the .onnx",
        ) from error
    feeds = synthetic_samples(inputs, _TRIED, {}, seed=1)
    expected, found = _results(estimator, inputs, feeds), _outputs(graph, feeds, description)
    nearest: dict[str, tuple[str, float]] = {}  # output -> the method with the nearest result, and its distance
    for value in graph.graph.output:
        distances = {name: _distance(_as_output(each, value), found[value.name]) for name, each in expected.items()}
        nearest[value.name] = min(distances.items(), key=lambda item: item[1])
    methods = {name: method for name, (method, distance) in nearest.items() if distance <= _LOOSE}
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
    model = SklearnModel(
        description=description,
        libraries=("scikit-learn", "skl2onnx", "skops"),
        inputs=inputs,
        notes=notes,
        estimator=estimator,
        graph=graph,
        methods=methods,
    )
    return model, max(nearest[name][1] for name in methods)


def _outputs(graph: onnx.ModelProto, feeds: Mapping[str, AnyArray], description: str) -> Mapping[str, AnyArray]:
    with tempfile.TemporaryDirectory(prefix="graphkiln-") as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(graph, path)
        try:
            with OnnxRuntimeEngine().build_reference(path) as session:
                return session.run(feeds)
        except GraphkilnError as error:
            raise ConversionError(f"{description} does not run as a graph: {error}", hint=error.hint) from error


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
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if found.dtype.kind != "f":
        return float(np.mean(expected != found)) if found.size else 0.0
    scale = np.abs(expected) + np.sqrt(np.mean(np.square(expected, dtype=np.float64))) + np.finfo(np.float32).tiny
    return float(np.max(np.abs(np.subtract(expected, found)) / scale, initial=0.0))


# Input columns of an estimator: numbers, categories, documents.

_MOST_WORDS = 256


def column_inputs(estimator: Any, location: str, number: DType) -> tuple[InputSpec, ...]:
    """Make one input `[rows, columns]`, or one per column if some are text.

    Raises:
        ConversionError: The estimator is not fitted, or takes no table.
    """
    first = _first_step(estimator)
    if _reads_documents(first):
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


def _reads_documents(estimator: Any) -> bool:
    return hasattr(estimator, "build_analyzer")


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
    if _reads_documents(estimator):
        known = list(getattr(estimator, "vocabulary_", {}))[:_MOST_WORDS]
        return (*known, *(" ".join(known[start : start + 4]) for start in range(0, len(known), 3)), "unknown words")
    for attribute in ("categories_", "statistics_"):
        categories = getattr(estimator, attribute, None)
        if categories is not None and len(categories) > column:
            found = np.atleast_1d(np.asarray(categories[column]))
            if found.dtype.kind in "OU" and all(isinstance(word, str) for word in found.tolist()):
                return tuple(map(str, found))
    return ()


def table_of(estimator: Any, inputs: tuple[InputSpec, ...], feeds: Mapping[str, AnyArray]) -> Any:
    """Convert inputs of the graph to the estimator's table: of numbers, of objects, or with named columns.

    Raises:
        ConversionError: The columns have names, and pandas is not installed.
    """
    columns = [as_text(feeds[spec.name]) for spec in inputs]
    if len(inputs) == 1:
        (table,) = columns
        if _reads_documents(_first_step(estimator)):
            return table[:, 0]
        return table.astype(np.float64) if table.dtype == np.float32 else table
    if not hasattr(estimator, "feature_names_in_"):
        return np.concatenate([column.astype(np.object_) for column in columns], axis=1)
    try:
        import pandas as pd
    except ImportError as error:
        raise ConversionError(
            "the estimator was fitted to a table with named columns, which needs pandas", hint="pip install pandas"
        ) from error
    return pd.DataFrame({spec.name: column[:, 0] for spec, column in zip(inputs, columns, strict=True)})
