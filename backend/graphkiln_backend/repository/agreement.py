"""Compatibility of versions of a model: names, types, dims and batching of their tensors.

Triton has one signature for all versions of a model and sends requests without a version to the newest one, so a
version with another signature would break existing clients. Extensions are compatible: a new output, a new optional
input, or a dynamic input dimension that was fixed before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError
from graphkiln_backend.repository.config import ModelConfigProto, complete, select_versions
from graphkiln_backend.repository.version import read_version_signature
from graphkiln_backend.repository.version_folders import version_folders

HINT = "convert it under another --name, or remove the versions with the other signature from the store"


def find_disagreement(new: ModelConfigProto, old: ModelConfigProto) -> str:
    """Describe incompatible changes between two complete configurations; empty if there are none."""
    return "; ".join(_disagreements(new, old))


def check_agreement(
    written: ModelConfigProto, version: Path, serving: Collection[int], graph_folder: Callable[[Path], Path]
) -> None:
    """Check that the signature of a version is compatible with the other versions of its model.

    Versions that are already being served take precedence; among versions loaded together, the newest does.

    Args:
        written: The model's configuration as written, not completed; it applies to all versions.
        version: The version's folder, in the model's folder.
        serving: Numbers of the versions that are being served.
        graph_folder: Returns the folder that holds the graph of a version.

    Raises:
        RepositoryError: The signatures are incompatible, or the version's graph cannot be read or contradicts the
            configuration.
        ManifestError: The version's manifest cannot be read.
    """
    number = int(version.name)
    numbers = list(version_folders(version.parent.iterdir()))
    deciding = [each for each in select_versions(written, numbers) if each in serving or each > number]
    others = [each for each in reversed(deciding) if each != number]
    own = _complete_for(written, graph_folder(version)) if others else written
    for other in others:
        try:
            theirs = _complete_for(written, graph_folder(version.with_name(str(other))))
        except (GraphkilnError, OSError):  # reported when that version is loaded
            continue
        newer, older = (own, theirs) if number > other else (theirs, own)
        if problem := find_disagreement(newer, older):
            role = "served now" if other in serving else "newer"
            raise RepositoryError(
                f"incompatible signature, version {other} ({role}) differs: "
                f"{find_disagreement(own, theirs) or problem}",
                hint=HINT,
            )


def _complete_for(written: ModelConfigProto, graph: Path) -> ModelConfigProto:
    config = ModelConfigProto()
    config.CopyFrom(written)
    complete(config, read_version_signature(graph, written.default_model_filename), labels_file=None)
    return config


def _disagreements(new: ModelConfigProto, old: ModelConfigProto) -> Iterator[str]:
    if (new.max_batch_size > 0) != (old.max_batch_size > 0):
        yield "it supports batches" if new.max_batch_size > 0 else "it does not support batches"
    yield from _missing("output", new.output, old.output)
    yield from _missing("input", new.input, old.input)
    before = {tensor.name for tensor in old.input}
    for tensor in new.input:
        if tensor.name not in before and not tensor.optional:
            yield f"input '{tensor.name}' is new"


def _missing(kind: str, new: Sequence[Any], old: Sequence[Any]) -> Iterator[str]:
    found = {tensor.name: tensor for tensor in new}
    for tensor in old:
        name = f"{kind} '{tensor.name}'"
        if tensor.name not in found:
            yield f"{name} is missing"
        elif not _fits(kind, found[tensor.name], tensor):
            yield f"{name} is {_text(found[tensor.name])}, not {_text(tensor)}"
        elif kind == "input" and tensor.optional and not found[tensor.name].optional:
            yield f"{name} is no longer optional"


def _fits(kind: str, new: Any, old: Any) -> bool:
    if new.data_type != old.data_type or len(new.dims) != len(old.dims):
        return False
    return all(
        now in (before, -1) or (before == -1 and kind == "output")
        for now, before in zip(new.dims, old.dims, strict=True)
    )


def _text(tensor: Any) -> str:
    types = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return f"{types[tensor.data_type].name.removeprefix('TYPE_')} {list(tensor.dims)}"
