"""Publish the contracts of all versions in the configuration of their model.

Manifests take precedence. `contracts` holds the contract of each version and `graphs` the digest of each graph, by
number. What applies to a whole model only (`preprocess`, `ranking`, `task`, the labels of Triton's classification
extension) is published where all versions that are served agree, and left out where they do not. Values of these in
config.pbtxt itself apply to models without manifests: bare graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from graphkiln_backend.graph.contract import CONTRACTS, GRAPHS, Contract, Contracts
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.preprocess import PREPROCESS, Preprocess
from graphkiln_backend.graph.task import RANKING, TASK, Ranking, is_classification, read_labels, read_task
from graphkiln_backend.repository.config import ModelConfigProto, select_versions
from graphkiln_backend.repository.version import (
    ModelVersion,
    contract_of,
    find_labels,
    find_labels_file,
    read_manifest,
)
from graphkiln_backend.repository.version_folders import version_folders

_log = logging.getLogger("graphkiln.repository")

T = TypeVar("T")

_UNPUBLISHED_HINT = (
    "graphkiln serve publishes the manifest of each version with --model-control-mode=none (its default) or poll; in "
    "other modes, correct config.pbtxt, or convert the version under another --name"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """A version, its contract and the digest of its graph; both are empty without a manifest."""

    number: int
    contract: Contract
    has_manifest: bool
    graph: str
    labels_file: str


def publish(config: ModelConfigProto, model: Path, served: Collection[int] | None = None) -> None:
    """Write the contracts of a model's versions into its configuration.

    Args:
        config: Complete; changed in place.
        model: The folder with the version folders. A damaged version is left out: it is refused when it is loaded.
        served: Numbers of the versions that will be served; by default those that the version policy selects.
    """
    for key in (CONTRACTS, GRAPHS):
        config.parameters.pop(key, None)
    versions = _read_versions(model)
    if not any(version.contract.is_specified for version in versions):
        return
    contracts = {str(version.number): version.contract for version in versions if version.has_manifest}
    config.parameters[CONTRACTS].string_value = Contracts.of(contracts).to_json()
    graphs = {str(version.number): version.graph for version in versions if version.has_manifest}
    config.parameters[GRAPHS].string_value = encode_json(graphs)
    numbers = select_versions(config, [version.number for version in versions]) if served is None else served
    live = [version for version in versions if version.number in numbers]
    for key in (PREPROCESS, RANKING, TASK):
        _publish_value(config, key, versions, live)
    _publish_labels(config, versions, live)


def check_published(config: ModelConfigProto, model: Path, number: int, version: ModelVersion) -> None:
    """Compare the contract that a server publishes for a version with the version's own.

    Args:
        config: The configuration of the running server.
        model: The model's folder.
        number: The version's number.
        version: The version.

    Raises:
        RepositoryError: The published contract differs from the version's own.
        ManifestError: The published contract cannot be read.
    """
    if CONTRACTS in config.parameters:
        found = Contracts.from_json(config.parameters[CONTRACTS].string_value).find(str(number))
        if found != version.contract:
            raise _unpublished(config.name, number, version)
        return
    values = _values_in(config, model, version.contract)
    siblings = [other.contract for other in _read_versions(model) if other.number != number] if values else []
    for attribute, (what, read) in values.items():
        own = getattr(version.contract, attribute)
        is_in_manifests = own or any(getattr(contract, attribute) for contract in siblings)
        if is_in_manifests and own != read():
            raise RepositoryError(
                f"config.pbtxt of '{config.name}' gives {what} that version {number} does not have",
                hint=_UNPUBLISHED_HINT,
            )


def complete_contract(version: ModelVersion, config: ModelConfigProto, model: Path) -> Contract:
    """Return a version's contract, completed from config.pbtxt: the same precedence as a client's.

    Args:
        version: The version.
        config: The model's configuration, complete.
        model: The model's folder, which holds labels.

    Raises:
        ManifestError: A value in the configuration, or the labels, cannot be read.
    """
    own = version.contract
    published = {attribute: read for attribute, (_, read) in _values_in(config, model, own).items()}
    values = {
        key: getattr(own, key) or (published[key]() if key in published else None)
        for key in (PREPROCESS, RANKING, TASK)
    }
    labels, output = own.labels, own.output
    if not labels and is_classification(values[TASK]) and "labels" in published:
        labels, output = published["labels"](), config.output[0].name
    return Contract(labels=labels, output=output if labels else "", **values)


def labels_file_of(version: Path) -> str | None:
    """Return the labels file for an output of a version, relative to the model's folder.

    It is the version's labels file, or else the model's; None without labels, and for other tasks than classification.

    Raises:
        ManifestError: The manifest cannot be read.
    """
    return _labels_file(version, read_manifest(version))


def _labels_file(version: Path, manifest: Manifest | None) -> str | None:
    if manifest and not is_classification(manifest.task):
        return None
    path = find_labels(version, manifest) if manifest else None
    return find_labels_file(version.parent) if path is None else str(path.relative_to(version.parent))


def _read_versions(model: Path) -> list[_Version]:
    """Read all versions of a model except damaged ones, sorted by number."""
    versions = []
    for number, folder in version_folders(model.iterdir()).items():
        try:
            versions.append(_read_version(number, folder))
        except GraphkilnError as error:
            _warn_once(f"the contract of version {number} of {model.name} is not published: {error}")
    return versions


@cache  # a store is read at every poll
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _read_version(number: int, folder: Path) -> _Version:
    manifest = read_manifest(folder)
    contract = contract_of(folder, manifest) if manifest else Contract()
    return _Version(
        number=number,
        contract=contract,
        has_manifest=manifest is not None,
        graph=manifest.graph_digest if manifest else "",
        labels_file=(_labels_file(folder, manifest) or "") if contract.labels else "",
    )


def _publish_value(
    config: ModelConfigProto, key: str, versions: Sequence[_Version], served: Sequence[_Version]
) -> None:
    """Publish a value of the contracts if all served versions agree; keep what is there if no version has one."""
    values = [getattr(version.contract, key) for version in versions]
    if not any(values):
        return
    before = config.parameters.pop(key).string_value if key in config.parameters else ""
    common = _common([getattr(version.contract, key) for version in served])
    if common is not None:
        config.parameters[key].string_value = encode_json(common)
    if before and before not in ["" if value is None else encode_json(value) for value in values]:
        _log.warning(
            "config.pbtxt of %s gives a %s that no version has: those of the manifests are published", config.name, key
        )


def _publish_labels(config: ModelConfigProto, versions: Sequence[_Version], served: Sequence[_Version]) -> None:
    """Set the labels file for Triton's classification extension, if it applies to all served versions."""
    outputs = {version.contract.output for version in versions if version.contract.labels}
    common = _common([(version.contract.output, version.contract.labels) for version in served])
    for output in config.output:
        if output.name not in outputs:
            continue
        output.label_filename = served[-1].labels_file if common and common[0] == output.name else ""
        if common is None:
            _log.warning(
                "the versions of %s have different labels: Triton's classification extension returns none, "
                "graphkiln's clients read those of each version",
                config.name,
            )


def _common(values: Sequence[T]) -> T | None:
    """Return the value if all are equal, else None."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _values_in(config: ModelConfigProto, model: Path, contract: Contract) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Description and parser of each value of a contract that a configuration gives for all versions."""
    parsers: dict[str, Callable[[str], Any]] = {
        PREPROCESS: Preprocess.from_json, RANKING: Ranking.from_json, TASK: read_task
    }  # fmt: skip
    values: dict[str, tuple[str, Callable[[], Any]]] = {
        key: (f"a {key}", partial(parse, config.parameters[key].string_value))
        for key, parse in parsers.items()
        if key in config.parameters
    }
    for output in config.output:
        if output.label_filename and output.name == (contract.output or config.output[0].name):
            path = model / output.label_filename
            values["labels"] = (f"labels ({path.name})", partial(read_labels, path))
            break
    return values


def _unpublished(name: str, number: int, version: ModelVersion) -> RepositoryError:
    if version.manifest is None:
        return RepositoryError(
            f"version {number} of '{name}' has no manifest, unlike other versions: its labels are not known",
            hint="copy the whole version folder, or convert the graph: graphkiln convert FILE.onnx",
        )
    return RepositoryError(
        f"the manifest of version {number} of '{name}' is not the one that was published when the server read it",
        hint="start the server again, or give the changed version a new number",
    )
