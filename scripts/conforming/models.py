"""Cases as models of a model store, and their tensors as Triton's protocol has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conforming.cases import Case
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.repository.config import BACKEND, write_config
from graphkiln_backend.repository.overlay import complete_config

_BACKENDS = frozenset({BACKEND})


def write_model(case: Case, store: Path, engine: str = "") -> Path:
    """Puts a case's graph into a model store, and completes its configuration as `graphkiln serve` does.

    Returns:
        The model's folder.

    Raises:
        GraphkilnError: The graph cannot be served.
    """
    folder = store / case.served_name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(case.model.SerializeToString())
    lines = [f'backend: "{BACKEND}"', "instance_group { count: 1 kind: KIND_CPU }"]
    lines += [f'parameters {{ key: "engine" value {{ string_value: "{engine}" }} }}'] if engine else []
    (folder / "config.pbtxt").write_text("\n".join(lines))
    write_config(complete_config(folder, _BACKENDS, lambda version: version), folder / "config.pbtxt")
    return folder


def to_tensors(feeds: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, AnyArray]:
    """Feeds as the server takes them: where it publishes `[1]` for a scalar, that is what it gets.

    Args:
        feeds: Values by input name.
        ranks: The rank of each input, as the server publishes it.
    """
    return {name: _as_published(np.asarray(value), ranks.get(name)) for name, value in feeds.items()}


def to_values(case: Case, outputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Outputs as the graph computes them: a scalar that came as `[1]` is one again."""
    scalars = {value.name for value in case.model.graph.output if _is_scalar(value.type)}
    return {
        name: array.reshape(()) if name in scalars and array.shape == (1,) else array for name, array in outputs.items()
    }


def ranks_of(inputs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The rank of each input by its name, from a model's metadata."""
    return {each["name"]: len(each["shape"]) for each in inputs}


def _as_published(array: AnyArray, rank: int | None) -> AnyArray:
    return array.reshape(1) if array.ndim == 0 and rank == 1 else array


def _is_scalar(kind: Any) -> bool:
    return kind.HasField("tensor_type") and kind.tensor_type.HasField("shape") and not kind.tensor_type.shape.dim
