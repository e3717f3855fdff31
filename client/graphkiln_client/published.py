"""Validated documents of a server: its state, its models, and metadata, configuration and contract of a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self, TypeVar

from graphkiln_backend.graph.contract import CONTRACTS, GRAPHS, Contract, Contracts
from graphkiln_backend.graph.decoding import parse_json
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError, ProtocolError
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES, IMAGE_MODEL, TENSOR_MODEL, image_model_name
from graphkiln_backend.graph.preprocess import PREPROCESS, Preprocess
from graphkiln_backend.graph.task import RANKING, TASK, Ranking, Task, read_task
from graphkiln_backend.graph.text import plain_reason

T = TypeVar("T")
Labels = tuple[str, ...]

ALL_CLASSES = 1 << 24  # more than any model has; Triton returns at most the existing classes

# Data types supported by the classification extension. Source: Triton's `TopkClassifications`.
_RANKABLE_TYPES = {
    f"TYPE_{name}"
    for name in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """State of a server.

    Attributes:
        server: Name and version of the server, for example `triton 2.51.0`; empty if the server is not live.
        not_ready: Model versions that are not ready.
    """

    live: bool
    ready: bool
    server: str = ""
    not_ready: tuple[ServedModel, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model version in a server's repository index.

    Attributes:
        version: Version; empty if no version was ever loaded.
        state: `READY`, `LOADING`, `UNLOADING`, `UNLOADED` (replaced, or unloaded on request) or `UNAVAILABLE` (it
            failed); empty if no version was ever loaded.
        reason: Reason why the version is not ready, or empty.
    """

    name: str
    version: str
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """True if the version can serve requests."""
        return self.state == "READY"

    @classmethod
    def parse(cls, row: dict[str, Any]) -> ServedModel:
        """Parse a row of the repository index.

        Source: Triton's model repository extension.

        Raises:
            ProtocolError: The row has no model name.
        """
        if not isinstance(row.get("name"), str):
            raise ProtocolError(f"a row of the repository index has no model name: {str(row)[:80]}")
        version, state, reason = (str(row.get(key, "")) for key in ("version", "state", "reason"))
        if (state, reason) == ("UNAVAILABLE", "unloaded"):
            state, reason = "UNLOADED", ""
        return cls(name=row["name"], version=version, state=state, reason=plain_reason(reason))


@dataclass(frozen=True, kw_only=True)  # no slots, because of cached_property
class ServedVersion:
    """Metadata that a server publishes about a model version.

    Attributes:
        contract: Contract of this version: preprocessing, task and labels. None if the server publishes no contracts.
        given_preprocess: Overrides the published preprocess spec.
        given_labels: Overrides the published labels.
        labels: Labels by output, fetched with the classification extension.
        responding: Version numbers in responses so far; more than one if the version was replaced.
    """

    model: str
    version: str
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    contract: Contract | None
    given_preprocess: Preprocess | None = None
    given_labels: Labels | None = None
    labels: dict[str, Labels] = field(default_factory=dict, compare=False)
    responding: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def read(
        cls,
        model: str,
        pinned: str,
        metadata: Mapping[str, Any],
        config: Mapping[str, Any],
        *,
        preprocess: Preprocess | None = None,
        labels: Labels | None = None,
    ) -> Self:
        """Parse the metadata and configuration of a model.

        Args:
            model: Model name.
            pinned: Version in requests; empty for the server's choice.
            metadata: Metadata from `RemoteModel.metadata`.
            config: Configuration from `RemoteModel.config`.
            preprocess: See `given_preprocess`.
            labels: See `given_labels`.

        Raises:
            ProtocolError: The contracts are malformed.
        """
        version = pinned or newest_version(metadata)
        contracts = published_contracts(model, config)
        # A version that is missing in the contracts was loaded later: graphkiln's instance rejects the digest of
        # `Contract()`, and the client reads the metadata again.
        contract = (contracts.find(version) or Contract()) if contracts and version else None
        return cls(
            model=model,
            version=version,
            metadata=metadata,
            config=config,
            contract=contract,
            given_preprocess=preprocess,
            given_labels=labels,
        )

    @property
    def digest(self) -> str:
        """Digest of the contract, sent with each request; graphkiln's instances reject another contract."""
        return self.contract.digest if self.contract else ""

    def fits(self, version: str) -> bool:
        """Check that a response of a version has the contract that the request was prepared for.

        The server need not have compared contracts: only graphkiln's own instances do, Triton's other backends ignore
        the digest.
        """
        if self.contract is None or version == self.version:
            return True
        return self._contracts is not None and self._contracts.find(version) == self.contract

    @cached_property
    def _contracts(self) -> Contracts | None:
        return published_contracts(self.model, self.config)

    @cached_property
    def preprocess(self) -> Preprocess:
        """Preprocess spec.

        Raises:
            InvalidInput: The model publishes no preprocess spec.
            ProtocolError: The published spec is malformed.
        """
        contract = self.contract.preprocess if self.contract else None
        spec = self.given_preprocess or contract or self._parameter(PREPROCESS, "preprocess spec", Preprocess.from_json)
        if spec is None:
            raise InvalidInput(
                f"model '{self.model}' publishes no preprocess spec for images",
                hint="convert it with --preprocess and --labels, pass model(preprocess=...), or send tensors: infer()",
            )
        return spec

    @cached_property
    def ranking(self) -> Ranking | None:
        """Outputs of a top-k embedded in the graph; None without one.

        Raises:
            ProtocolError: The published ranking is malformed.
        """
        contract = self.contract.ranking if self.contract else None
        return contract or self._parameter(RANKING, "ranking", Ranking.from_json)

    @cached_property
    def task(self) -> Task | None:
        """Image task; None if the server publishes none.

        Raises:
            ProtocolError: The published task is malformed.
        """
        contract = self.contract.task if self.contract else None
        return contract or self._parameter(TASK, "task", read_task)

    @property
    def class_labels(self) -> Labels:
        """Labels by class index: the override, else those of the contract."""
        if self.given_labels is not None:
            return self.given_labels
        return self.contract.labels if self.contract else ()

    def known_labels(self, output: str) -> Labels | None:
        """Return the labels of an output; None if they must be fetched with the classification extension."""
        if self.given_labels is not None:
            return self.given_labels
        if self.contract and self.contract.labels and self.contract.output == output:
            return self.contract.labels
        return self.labels.get(output) if _has_labels(self.config, output) else ()

    @property
    def image_input(self) -> Mapping[str, Any]:
        """Metadata of the only input.

        Raises:
            InvalidInput: The model does not have exactly one input.
        """
        inputs = self.metadata["inputs"]
        if len(inputs) != 1:
            raise InvalidInput(
                f"image requests need a model with one input, '{self.model}' has {len(inputs)}",
                hint="send tensors with infer()",
            )
        row: Mapping[str, Any] = inputs[0]
        return row

    @property
    def is_batching(self) -> bool:
        """True if Triton adds a batch dimension to the configured shapes."""
        return int(self.config.get("max_batch_size", 0)) > 0

    @property
    def takes_several(self) -> bool:
        """True if the input has a batch dimension in addition to height, width and channels."""
        return len(self.image_input["shape"]) > 3

    @property
    def max_batch_size(self) -> int:
        """Maximum number of images in one request; practically unlimited for a dynamic first dimension."""
        varies = self.takes_several and self.image_input["shape"][0] == -1
        return int(self.config.get("max_batch_size", 0)) or (ALL_CLASSES if varies else 1)

    def image_model(self, *, expected: bool = False) -> str:
        """Return the name of the companion model for encoded images; empty if there is none.

        Args:
            expected: Include a companion model that is configured but not published: a server in explicit mode may have
                loaded it.
        """
        published = _text(self.config, IMAGE_MODEL) or ""
        if published or not expected or _text(self.config, ACCEPT_IMAGES) != "true":
            return published
        return image_model_name(str(self.config.get("name", "")))

    def _parameter(self, key: str, what: str, parse: Callable[[str], T]) -> T | None:
        text = _text(self.config, key)
        return None if text is None else _parsed(self.model, what, parse, text)


def published_tensor_model(config: Mapping[str, Any]) -> str:
    """Return the tensor model behind a companion model for encoded images; empty for other models."""
    return _text(config, TENSOR_MODEL) or ""


def published_contracts(model: str, config: Mapping[str, Any]) -> Contracts | None:
    """Return the contracts of a model's versions; None if the server publishes none.

    Raises:
        ProtocolError: The contracts are malformed.
    """
    text = _text(config, CONTRACTS)
    return None if text is None else _parsed(model, "list of contracts", Contracts.from_json, text)


def published_graph(model: str, config: Mapping[str, Any], version: str) -> str:
    """Return the digest of a version's graph and weights; empty if the server publishes none.

    Raises:
        ProtocolError: The digests are malformed.
    """
    graphs = _parsed(model, "list of graphs", partial(parse_json, what="the list"), _text(config, GRAPHS) or "{}")
    return str(graphs.get(version, "")) if isinstance(graphs, dict) else ""


def newest_version(metadata: Mapping[str, Any]) -> str:
    """Return the version that serves requests without a version number: the highest. Source: Triton."""
    versions = metadata.get("versions")
    names = map(str, versions) if isinstance(versions, list) else ()
    return max(filter(str.isdecimal, names), key=int, default="")


def check_metadata(document: dict[str, Any]) -> dict[str, Any]:
    """Validate a model's metadata and normalize names and shapes of its tensors.

    Raises:
        ProtocolError: The document is malformed.
    """
    try:
        for row in (*document.setdefault("inputs", []), *document.setdefault("outputs", [])):
            DType(row["datatype"])
            row["name"], row["shape"] = str(row["name"]), [int(size) for size in row["shape"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the metadata of a model is malformed: {error!r}", body=str(document)[:500]) from error
    return document


def check_config(document: dict[str, Any]) -> dict[str, Any]:
    """Validate the types of the fields that the client reads from a model's configuration.

    Raises:
        ProtocolError: The document is malformed.
    """
    parameters, outputs = document.get("parameters", {}), document.get("output", [])
    valid = (
        isinstance(document.get("max_batch_size", 0), int)
        and isinstance(parameters, dict)
        and isinstance(outputs, list)
        and all(isinstance(row, dict) for row in (*parameters.values(), *outputs))
    )
    if not valid:
        raise ProtocolError("the configuration of a model is malformed", body=str(document)[:500])
    return document


def check_statistics(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a statistics response, one per version.

    Raises:
        ProtocolError: The document is malformed.
    """
    rows = document.get("model_stats", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError("expected a list of versions in the server's statistics", body=str(document)[:500])
    return rows


def _has_labels(config: Mapping[str, Any], output: str) -> bool:
    """Check that the server has labels for an output and can return them."""
    rows = [row for row in config.get("output", []) if row.get("name") == output]
    return any(row.get("label_filename") and row.get("data_type") in _RANKABLE_TYPES for row in rows)


def _text(config: Mapping[str, Any], key: str) -> str | None:
    parameter = config.get("parameters", {}).get(key)
    return None if parameter is None else str(parameter.get("string_value", ""))


def _parsed(model: str, what: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ManifestError as error:
        raise ProtocolError(f"model '{model}' publishes an invalid {what}: {error}") from error
