"""Compatibility of versions of a model: names, types, dims and batching of their tensors.

Triton has one signature for all versions of a model, and gives requests that name no version to the newest: a version
with another signature would break every client of the older one. More is no contradiction: another output, an optional
input, an input dimension that varies where it was fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError
from graphkiln_backend.repository.config import ModelConfigProto, complete, select_versions
from graphkiln_backend.repository.version import read_version_signature
from graphkiln_backend.repository.version_folders import version_folders

HINT = "convert it under another --name, or take the versions that have the other signature out of the store"


def find_disagreement(new: ModelConfigProto, old: ModelConfigProto) -> str:
    """Describe incompatible changes between two configurations; empty for none.

    Args:
        new: Complete.
        old: Complete.
    """
    return "; ".join(_disagreements(new, old))


def check_agreement(
    written: ModelConfigProto, version: Path, serving: Collection[int], graph_folder: Callable[[Path], Path]
) -> None:
    """Refuse a version that is loaded beside others whose requests it could not take, or they its own.

    Those that serve already decide; of versions that are loaded together, the newest one.

    Args:
        written: The model's configuration, not completed: what is written in it holds for all versions.
        version: The version's folder, beside those of the others.
        serving: Numbers of the versions that serve by now.
        graph_folder: Finds the graph of a version.

    Raises:
        RepositoryError: It is refused, or its own graph cannot be read or contradicts the configuration.
        ManifestError: Its own manifest cannot be read.
    """
    number = int(version.name)
    numbers = list(version_folders(version.parent.iterdir()))
    deciding = [each for each in select_versions(written, numbers) if each in serving or each > number]
    others = [each for each in reversed(deciding) if each != number]
    own = _complete_for(written, graph_folder(version)) if others else written
    for other in others:
        try:
            theirs = _complete_for(written, graph_folder(version.with_name(str(other))))
        except (GraphkilnError, OSError):  # its own loading says so
            continue
        newer, older = (own, theirs) if number > other else (theirs, own)
        if problem := find_disagreement(newer, older):
            role = "which serves" if other in serving else "which is newer"
            raise RepositoryError(
                f"its signature is not that of version {other}, {role}: {find_disagreement(own, theirs) or problem}",
                hint=HINT,
            )


def _complete_for(written: ModelConfigProto, graph: Path) -> ModelConfigProto:
    config = ModelConfigProto()
    config.CopyFrom(written)
    complete(config, read_version_signature(graph, written.default_model_filename), labels_file=None)
    return config


def _disagreements(new: ModelConfigProto, old: ModelConfigProto) -> Iterator[str]:
    if (new.max_batch_size > 0) != (old.max_batch_size > 0):
        yield "it takes batches" if new.max_batch_size > 0 else "it takes no batches"
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
