"""Parse and check what a server publishes about a model: metadata, configuration, and the contract of each version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self, TypeVar

from graphkiln_backend.graph.contract import CONTRACTS, GRAPHS, Contract, Contracts
from graphkiln_backend.graph.decoding import parse_json
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError, ProtocolError
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES, IMAGE_MODEL, TENSOR_MODEL, image_model_name
from graphkiln_backend.graph.preprocess import PREPROCESS, Preprocess
from graphkiln_backend.graph.task import RANKING, TASK, Ranking, Task, read_task
from graphkiln_client.results import Classification

T = TypeVar("T")
Labels = tuple[str, ...]

ALL_CLASSES = 1 << 24  # more than any model has; Triton returns as many as there are

# Bounds of the highest class index beside the number of classes that a server returned: hardly one can be missing.
_MOST_ABSENT, _MOST_SPARSE = 1 << 16, 4

# Data types that the classification extension can rank. Source: Triton's `TopkClassifications`.
_RANKABLE_TYPES = {
    f"TYPE_{name}"
    for name in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64")
}


@dataclass(frozen=True, kw_only=True)  # without slots: what is parsed is kept
class ServedVersion:
    """A model version as its server publishes it.

    Attributes:
        model: Model name.
        version: Version number; empty where the server publishes none.
        metadata: KServe v2 metadata.
        config: Triton configuration.
        contract: Images and classes of this version; None where the server publishes no contracts.
        given_preprocess: The caller's, in place of the published one.
        given_labels: The caller's, in place of the published ones.
        labels: By output, as the classification extension returned them.
    """

    model: str
    version: str
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    contract: Contract | None
    given_preprocess: Preprocess | None = None
    given_labels: Labels | None = None
    labels: dict[str, Labels] = field(default_factory=dict, compare=False)

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
        """Read metadata and configuration of a model.

        Args:
            model: Model name.
            pinned: The version that requests name; empty for the server's choice.
            metadata: As `check_metadata` returns it.
            config: As `check_config` returns it.
            preprocess: See `given_preprocess`.
            labels: See `given_labels`.

        Raises:
            ProtocolError: The contracts are malformed.
        """
        version = pinned or newest_version(metadata)
        contracts = published_contracts(model, config)
        # A version without a contract here refuses the empty one: it was loaded since, and all is read again.
        contract = contracts.find(version) or Contract() if contracts and version else None
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
        """Digest of the contract that requests are made for; the server refuses them where another contract holds."""
        return self.contract.digest if self.contract else ""

    @cached_property
    def preprocess(self) -> Preprocess:
        """The preprocess spec.

        Raises:
            InvalidInput: None is published.
            ProtocolError: It is malformed.
        """
        contract = self.contract.preprocess if self.contract else None
        spec = self.given_preprocess or contract or self._parameter(PREPROCESS, "preprocess spec", Preprocess.from_json)
        if spec is None:
            raise InvalidInput(
                f"model '{self.model}' does not say how images become its input",
                hint=f'add parameters {{ key: "{PREPROCESS}" }} to its config.pbtxt, give model(preprocess=...), '
                "or send tensors with infer()",
            )
        return spec

    @cached_property
    def ranking(self) -> Ranking | None:
        """The outputs of a top-k that is embedded in the graph.

        Raises:
            ProtocolError: They are malformed.
        """
        contract = self.contract.ranking if self.contract else None
        return contract or self._parameter(RANKING, "ranking", Ranking.from_json)

    @cached_property
    def task(self) -> Task | None:
        """The image task; None where the server publishes none.

        Raises:
            ProtocolError: It is malformed.
        """
        contract = self.contract.task if self.contract else None
        return contract or self._parameter(TASK, "task", read_task)

    @property
    def class_labels(self) -> Labels:
        """Labels by class index: the given ones, else those of the contract."""
        if self.given_labels is not None:
            return self.given_labels
        return self.contract.labels if self.contract else ()

    def known_labels(self, output: str) -> Labels | None:
        """Labels of an output; None where only the classification extension can return them."""
        if self.given_labels is not None:
            return self.given_labels
        if self.contract and self.contract.labels and self.contract.output == output:
            return self.contract.labels
        return self.labels.get(output) if _has_labels(self.config, output) else ()

    @property
    def image_input(self) -> Mapping[str, Any]:
        """Metadata of the model's only input.

        Raises:
            InvalidInput: The model has several inputs, or none.
        """
        inputs = self.metadata["inputs"]
        if len(inputs) != 1:
            raise InvalidInput(
                f"images need a model with one input, '{self.model}' has {len(inputs)}",
                hint="send tensors with infer()",
            )
        row: Mapping[str, Any] = inputs[0]
        return row

    @property
    def is_batching(self) -> bool:
        """True if the server adds a batch dimension to the shapes of the model's configuration."""
        return int(self.config.get("max_batch_size", 0)) > 0

    @property
    def takes_several(self) -> bool:
        """True if the input has a dimension beside height, width and channels."""
        return len(self.image_input["shape"]) > 3

    @property
    def max_batch_size(self) -> int:
        """Most images in one request: Triton's limit; without one, whatever a variable leading dimension takes."""
        varies = self.takes_several and self.image_input["shape"][0] == -1
        return int(self.config.get("max_batch_size", 0)) or (ALL_CLASSES if varies else 1)

    def image_model(self, *, expected: bool = False) -> str:
        """Name of the model that takes encoded images for this one; empty where there is none.

        Args:
            expected: Also count one that is configured but not published: a server in explicit mode may have loaded it.
        """
        published = _text(self.config, IMAGE_MODEL) or ""
        if published or not expected or _text(self.config, ACCEPT_IMAGES) != "true":
            return published
        return image_model_name(str(self.config.get("name", "")))

    def _parameter(self, key: str, what: str, parse: Callable[[str], T]) -> T | None:
        text = _text(self.config, key)
        return None if text is None else _parsed(self.model, what, parse, text)


def published_tensor_model(config: Mapping[str, Any]) -> str:
    """Name of the model for which a model takes encoded images, by its configuration; empty for any other."""
    return _text(config, TENSOR_MODEL) or ""


def published_contracts(model: str, config: Mapping[str, Any]) -> Contracts | None:
    """The contracts of a model's versions; None where the server publishes none.

    Raises:
        ProtocolError: They are malformed.
    """
    text = _text(config, CONTRACTS)
    return None if text is None else _parsed(model, "list of contracts", Contracts.from_json, text)


def published_graph(model: str, config: Mapping[str, Any], version: str) -> str:
    """Digest of a version's graph and weights; empty where the server publishes none.

    Raises:
        ProtocolError: The digests are malformed.
    """
    graphs = _parsed(model, "list of graphs", partial(parse_json, what="the list"), _text(config, GRAPHS) or "{}")
    return str(graphs.get(version, "")) if isinstance(graphs, dict) else ""


def newest_version(metadata: Mapping[str, Any]) -> str:
    """The version that a server with several prefers. Source: Triton's version policy."""
    versions = metadata.get("versions")
    names = map(str, versions) if isinstance(versions, list) else ()
    return max(filter(str.isdecimal, names), key=int, default="")


def check_metadata(document: dict[str, Any]) -> dict[str, Any]:
    """Return a model's metadata, whose tensors have a name, a known datatype and a shape (-1 where it may vary).

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
    """Return a model's configuration, of which the parts that the client reads have their types.

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
    """The rows of a response of the statistics extension, one for each version.

    Raises:
        ProtocolError: The document is malformed.
    """
    rows = document.get("model_stats", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError("the server's statistics are not a list of versions", body=str(document)[:500])
    return rows


def parse_labels(output: AnyArray) -> Labels:
    """Parse labels by class index from an output of the classification extension with all classes.

    Args:
        output: BYTES `[classes]`, or `[batch, classes]` of which the first row is read.

    Raises:
        ProtocolError: The output is malformed.
    """
    elements = output[0].ravel() if output.ndim > 1 and len(output) else output.ravel()
    parsed = [Classification.parse(bytes(element).decode("utf-8", "replace")) for element in elements]
    labels = {entry.index: entry.label for entry in parsed}
    most = max(_MOST_ABSENT, _MOST_SPARSE * len(elements))
    if labels and not 0 <= min(labels) <= max(labels) < most:
        raise ProtocolError(f"the server returned a class of index {min(labels) if min(labels) < 0 else max(labels)}")
    return tuple(labels.get(index, "") for index in range(max(labels, default=-1) + 1))


def _has_labels(config: Mapping[str, Any], output: str) -> bool:
    """True if the server has labels for an output and can return them: it ranks no 16-bit floats."""
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
