"""Signature and input example of a model of MLflow: comparison with the opened model, and rows for its proof."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
from mlflow.exceptions import MlflowException
from mlflow.types import Schema, TensorSpec

from graphkiln_backend.graph.arrays import as_text
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, ManifestError
from graphkiln_converters.recipe import first_line
from graphkiln_converters.sources.base import EXPORT_BATCH, InputSpec, SourceModel, synthetic_samples

Source = TypeVar("Source", bound=SourceModel)
_SEED = 3
_SYNTHETIC = 6
_NUMBERS = "biuf"


def tensors_of(schema: Schema | None) -> list[TensorSpec]:
    """Tensors of a signature's inputs or outputs; empty for columns, or without a signature."""
    return [each for each in schema.inputs if isinstance(each, TensorSpec)] if schema else []


def check_inputs(
    schema: Schema | None, model: SourceModel, *, any_number: bool = False, columns: Sequence[str] = ()
) -> None:
    """Compare the inputs of a signature with those of the model.

    Args:
        schema: Inputs of the signature, or None.
        model: The opened model.
        any_number: The model takes numbers of any type.
        columns: Names of a table's columns, if the model knows them.

    Raises:
        ConversionError: They differ.
    """
    if schema is None:
        return
    if not schema.is_tensor_spec():
        _check_columns(schema, model.inputs, columns)
        return
    tensors = tensors_of(schema)
    if len(tensors) != len(model.inputs):
        raise _disagrees(f"it has {len(tensors)} inputs, the model {len(model.inputs)}")
    named = {each.name: each for each in tensors if each.name}
    if named and named.keys() != {spec.name for spec in model.inputs}:
        raise _disagrees(f"its inputs are {', '.join(named)}, the model's {_names(model.inputs)}")
    for spec, given in zip(model.inputs, tensors, strict=True):
        tensor, is_text = named.get(spec.name, given), spec.dtype is DType.BYTES
        sizes, dtype = _sizes(spec, whole=bool(model.whole)), _dtype(tensor.type)
        documents = is_text and len(tensor.shape) == 1 and sizes[1:] == (1,)
        if not documents and not _fits(tensor.shape, sizes):
            raise _disagrees(f"input '{spec.name}' is {list(tensor.shape)}, the model's {list(sizes)}")
        if dtype is not spec.dtype and not (any_number and DType.BYTES not in (dtype, spec.dtype)):
            raise _disagrees(f"input '{spec.name}' is {tensor.type}, the model's {spec.dtype}")


def _check_columns(schema: Schema, inputs: Sequence[InputSpec], columns: Sequence[str]) -> None:
    """Compare the columns of a signature with a model's: names, where the model has any, and text or numbers."""
    width = sum(math.prod(spec.shape) for spec in inputs)
    if len(schema.inputs) != width:
        raise _disagrees(f"it has {len(schema.inputs)} columns, the model takes {width}")
    try:
        types = dict(zip(schema.input_names(), map(np.dtype, schema.numpy_types()), strict=True))
    except MlflowException as error:
        raise _disagrees(f"the model takes numbers and text: {first_line(error)}") from error
    known = columns or ([spec.name for spec in inputs] if len(inputs) > 1 else [])
    if schema.has_input_names() and known and types.keys() != {*known}:
        raise _disagrees(f"its columns are {', '.join(map(str, types))}, the model's {', '.join(known)}")
    kinds = [*types.values()]
    for position, spec in enumerate(inputs):
        own = kinds if len(inputs) == 1 else [types.get(spec.name, kinds[position])]
        is_text = spec.dtype is DType.BYTES
        if wrong := [str(each) for each in own if each.kind not in ("OSU" if is_text else _NUMBERS)]:
            raise _disagrees(f"'{spec.name}' is {wrong[0]}, the model takes {'text' if is_text else 'numbers'}")


def check_outputs(schema: Schema | None, model: SourceModel) -> None:
    """Compare the tensors among the outputs of a signature with those that the model computes.

    Raises:
        ConversionError: They differ.
    """
    if not (tensors := tensors_of(schema)):
        return
    samples = synthetic_samples(model.inputs, 1 if model.whole else EXPORT_BATCH, {}, seed=_SEED)
    found = model.run({name: np.asarray(rows[0]) for name, rows in samples.items()} if model.whole else samples)
    for tensor, position in zip(tensors, [*found, *[""] * len(tensors)], strict=False):
        array = found.get(tensor.name or position)
        if array is None:
            raise _disagrees(f"output '{tensor.name or ''}' is not one of the model's: {', '.join(found)}")
        sizes = array.shape if model.whole else (-1, *array.shape[1:])
        if not _fits(tensor.shape, sizes) or _dtype(tensor.type) is not DType.from_numpy(array.dtype):
            raise _disagrees(
                f"output '{tensor.name or position}' is {tensor.type} {list(tensor.shape)}, "
                f"the model's {array.dtype} {list(sizes)}"
            )


def rows_of(
    example: Any, inputs: Sequence[InputSpec], *, whole: bool = False, any_number: bool = False
) -> dict[str, AnyArray]:
    """Rows of an input example by input, `[rows, *shape]`; empty without an example.

    Args:
        example: Table, array or dict of arrays; or None.
        inputs: Inputs of the model.
        whole: The example is one whole sample.
        any_number: Keep the types of the example's numbers.

    Raises:
        ConversionError: The example has other inputs, shapes or kinds of values.
    """
    if example is None:
        return {}
    given, rows = _by_input(example, inputs), dict[str, AnyArray]()
    for spec in inputs:
        if spec.name not in given:
            raise _unfit(f"it has {', '.join(given) or 'one array'}, the model takes {_names(inputs)}")
        array = np.asarray(given[spec.name])
        array = array[None] if whole else array
        if spec.dtype is DType.BYTES:
            array = as_text(array.astype(np.object_)).reshape(len(array), -1)
        if not _fits(array.shape, (-1, *_sizes(spec, whole=True))):
            raise _unfit(f"'{spec.name}' is {list(array.shape)}, expected {list(_sizes(spec, whole=whole))}")
        try:
            kept = any_number and array.dtype.kind in _NUMBERS
            rows[spec.name] = array if kept else array.astype(spec.dtype.numpy)
        except (TypeError, ValueError) as error:
            raise _unfit(f"'{spec.name}' is not {spec.dtype}: {first_line(error)}") from error
    return rows


def _by_input(example: Any, inputs: Sequence[InputSpec]) -> Mapping[str, Any]:
    """Arrays of an example by input; a table has an input for each column, or one for all."""
    if isinstance(example, Mapping):
        return cast("Mapping[str, Any]", example)
    if len(inputs) == 1:
        return {inputs[0].name: np.asarray(example)}
    if hasattr(example, "columns"):
        return {str(name): np.asarray(example[name])[:, None] for name in example.columns}
    array = np.asarray(example)
    by_column = array.ndim == 2 and array.shape[1] == len(inputs)
    return {spec.name: array[:, [column]] for column, spec in enumerate(inputs)} if by_column else {}


def with_rows(model: Source, rows: Mapping[str, AnyArray]) -> Source:
    """Prove rows before those that the model knows, or before synthetic ones of their sizes."""
    if not rows:
        return model
    sized = [replace(spec, shape=rows[spec.name].shape[1:]) for spec in model.inputs]
    made = synthetic_samples(tuple(sized), _SYNTHETIC, {}, seed=_SEED)
    known = [made[spec.name] if spec.known is None else spec.known for spec in sized]
    joined = [
        np.concatenate([rows[spec.name].astype(further.dtype), further])
        for spec, further in zip(sized, known, strict=True)
    ]
    return replace(model, inputs=tuple(replace(spec, known=array) for spec, array in zip(sized, joined, strict=True)))


def _sizes(spec: InputSpec, *, whole: bool) -> tuple[int, ...]:
    """Shape of an input in MLflow's notation: -1 for sizes that vary."""
    sizes = tuple(-1 if axis in spec.dynamic else size for axis, size in enumerate(spec.shape))
    return sizes if whole else (-1, *sizes)


def _fits(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return true if two shapes can be of one tensor."""
    pairs = zip(shape, sizes, strict=False)
    return len(shape) == len(sizes) and all(-1 in pair or pair[0] == pair[1] for pair in pairs)


def _dtype(kind: Any) -> DType | None:
    try:
        return DType.BYTES if np.dtype(kind).kind in "OSU" else DType.from_numpy(np.dtype(kind))
    except ManifestError:
        return None


def _names(inputs: Sequence[InputSpec]) -> str:
    return ", ".join(spec.name for spec in inputs)


def _disagrees(problem: str) -> ConversionError:
    return ConversionError(
        f"the signature disagrees with the model: {problem}",
        hint="log the model again with mlflow.models.infer_signature(input, output) of this model",
    )


def _unfit(problem: str) -> ConversionError:
    return ConversionError(
        f"the input example does not fit the model: {problem}",
        hint="log the model again with an input_example that it takes",
    )
