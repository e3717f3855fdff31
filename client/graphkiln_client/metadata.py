"""What a server publishes about a model: checked, and parsed into values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from graphkiln_backend.graph.contract import GRAPHS, Contracts
from graphkiln_backend.graph.contract import PARAMETER as CONTRACTS
from graphkiln_backend.graph.decoding import parse_json
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ManifestError, ProtocolError
from graphkiln_backend.graph.preprocess import ACCEPT_IMAGES, TENSOR_MODEL, Preprocess, image_model_name
from graphkiln_backend.graph.preprocess import PARAMETER as PREPROCESS
from graphkiln_backend.graph.preprocess import PUBLISHED as IMAGE_MODEL
from graphkiln_backend.graph.task import PARAMETER as TASK
from graphkiln_backend.graph.task import RANKING, Ranking, Task, read_task
from graphkiln_client.connection import Connection
from graphkiln_client.results import Classification

# What a server knows about one model: requested once, and kept until it is known to have changed.


class ModelInfo:
    """A model's metadata, configuration and statistics. Task-safe.

    Args:
        connection: To the server.
        name: Model name.
        version: Version, or empty for the one that the server's version policy prefers.
    """

    def __init__(self, connection: Connection, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._connection = connection
        self._metadata: dict[str, Any] | None = None
        self._config: dict[str, Any] | None = None

    def forget(self) -> None:
        """Has metadata and configuration requested again: another version answers."""
        self._metadata = self._config = None

    async def metadata(self) -> dict[str, Any]:
        """The KServe v2 metadata.

        Raises:
            ClientError: The request failed.
        """
        metadata = self._metadata
        if metadata is None:
            call = self._connection.wire.model_metadata(self.name, self.version)
            self._metadata = metadata = check_metadata(await self._connection.call(call))
        return metadata

    async def config(self) -> dict[str, Any]:
        """The Triton configuration; empty where the server has no such extension.

        Raises:
            ClientError: The request failed.
        """
        config = self._config
        if config is None:
            supported = "model_configuration" in await self._connection.extensions()
            call = self._connection.wire.model_config(self.name, self.version)
            self._config = config = check_config(await self._connection.call(call)) if supported else {}
        return config

    async def statistics(self) -> dict[str, Any]:
        """The statistics of this version, or of the preferred one; requested each time.

        Raises:
            ClientError: The request failed.
        """
        call = self._connection.wire.model_statistics(self.name, self.version)
        versions = versions_in(await self._connection.call(call))
        if not versions:
            raise ProtocolError(f"the server's statistics of '{self.name}' are empty")
        return versions[-1]


def versions_in(statistics: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a response of the statistics extension, one for each version.

    Raises:
        ProtocolError: The response holds something else.
    """
    rows = statistics.get("model_stats", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError("the server's statistics are not a list of versions", body=str(statistics)[:500])
    return rows


T = TypeVar("T")

ALL_CLASSES = 1 << 24  # more than any model has; Triton returns as many as there are

_MOST_ABSENT, _MOST_SPARSE = 1 << 16, 4

# Source: Triton's `TopkClassifications`.
_RANKABLE_TYPES = {
    f"TYPE_{name}"
    for name in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64")
}


def check_metadata(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a model's metadata, whose tensors have a name, a known datatype and a shape (-1 where it may vary).

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
    """Returns a model's configuration, of which the parts that the client reads have their types.

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


def published_spec(model: str, config: Mapping[str, Any]) -> Preprocess:
    """The preprocess spec in a model's configuration.

    Raises:
        InvalidInput: The model publishes none.
        ProtocolError: It cannot be read.
    """
    text = _parameter(config, PREPROCESS)
    if text is None:
        raise InvalidInput(
            f"model '{model}' does not say how images become its input",
            hint=f'add parameters {{ key: "{PREPROCESS}" }} to its config.pbtxt, give model(preprocess=...), '
            "or send tensors with infer()",
        )
    return _parsed(model, "preprocess spec", Preprocess.from_json, text)


def published_image_model(config: Mapping[str, Any], *, expected: bool = False) -> str:
    """The name of the model that takes encoded images for a model, by its configuration; empty where there is none.

    Args:
        config: Of the model that takes tensors.
        expected: Whether one that is asked for counts, too: a server in explicit mode has it, and names it nowhere.
    """
    published = _parameter(config, IMAGE_MODEL) or ""
    if published or not expected or _parameter(config, ACCEPT_IMAGES) != "true":
        return published
    return image_model_name(str(config.get("name", "")))


def published_tensor_model(config: Mapping[str, Any]) -> str:
    """The name of the model for which a model takes encoded images, by its configuration; empty for any other."""
    return _parameter(config, TENSOR_MODEL) or ""


def published_contracts(model: str, config: Mapping[str, Any]) -> Contracts | None:
    """The contracts of a model's versions; None where the server publishes none.

    Raises:
        ProtocolError: They cannot be read.
    """
    text = _parameter(config, CONTRACTS)
    return None if text is None else _parsed(model, "list of contracts", Contracts.from_json, text)


def published_graph(model: str, config: Mapping[str, Any], version: str) -> str:
    """The digest of a version's graph and weights; empty where the server does not say it.

    Raises:
        ProtocolError: It cannot be read.
    """
    graphs = _parsed(model, "list of graphs", partial(parse_json, what="the list"), _parameter(config, GRAPHS) or "{}")
    return str(graphs.get(version, "")) if isinstance(graphs, dict) else ""


def published_ranking(model: str, config: Mapping[str, Any]) -> Ranking | None:
    """The ranking outputs of a model that ranks its classes itself; None for other models.

    Raises:
        ProtocolError: It cannot be read.
    """
    text = _parameter(config, RANKING)
    return None if text is None else _parsed(model, "ranking", Ranking.from_json, text)


def published_task(model: str, config: Mapping[str, Any]) -> Task | None:
    """What a model answers about an image; None where the server does not say.

    Raises:
        ProtocolError: It cannot be read.
    """
    text = _parameter(config, TASK)
    return None if text is None else _parsed(model, "task", read_task, text)


def _parameter(config: Mapping[str, Any], key: str) -> str | None:
    parameter = config.get("parameters", {}).get(key)
    return None if parameter is None else str(parameter.get("string_value", ""))


def _parsed(model: str, what: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ManifestError as error:
        raise ProtocolError(f"model '{model}' publishes an invalid {what}: {error}") from error


def has_labels(config: Mapping[str, Any], output: str) -> bool:
    """Whether the server has labels for an output and can return them: it ranks no 16-bit floats."""
    rows = [row for row in config.get("output", []) if row.get("name") == output]
    return any(row.get("label_filename") and row.get("data_type") in _RANKABLE_TYPES for row in rows)


def parse_labels(output: AnyArray) -> tuple[str, ...]:
    """The labels by class index, from an output of the classification extension with all classes.

    Args:
        output: BYTES `[classes]`, or `[batch, classes]` of which the first row is read.

    Raises:
        ProtocolError: It is no such output.
    """
    elements = output[0].ravel() if output.ndim > 1 and len(output) else output.ravel()
    parsed = [Classification.parse(bytes(element).decode("utf-8", "replace")) for element in elements]
    labels = {entry.index: entry.label for entry in parsed}
    most = max(_MOST_ABSENT, _MOST_SPARSE * len(elements))  # of all classes, hardly one can be missing
    if labels and not 0 <= min(labels) <= max(labels) < most:
        raise ProtocolError(f"the server returned a class of index {min(labels) if min(labels) < 0 else max(labels)}")
    return tuple(labels.get(index, "") for index in range(max(labels, default=-1) + 1))
