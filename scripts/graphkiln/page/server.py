"""The server behind the page: its models, metrics and model stores.

The metrics are counters since the start of the server. The browser computes rates from the difference of two readings.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, GraphkilnError, ModelNotReady
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.task import is_classification
from graphkiln_backend.graph.text import fault_in_served_name
from graphkiln_backend.repository.version import read_manifest
from graphkiln_backend.repository.version_folders import is_version
from graphkiln_backend.server.ports import fetch_metrics
from graphkiln_client import AsyncClient, AsyncModel
from graphkiln_client.published import ServedVersion, published_tensor_model

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_COUNTERS = {
    "nv_inference_request_success": "answered",
    "nv_inference_request_failure": "failed",
    "graphkiln_failed_requests_total": "failed",
    "nv_inference_count": "samples",
    "nv_inference_exec_count": "batches",
    "nv_inference_request_duration_us": "request_us",
    "nv_inference_queue_duration_us": "queue_us",
    "nv_inference_pending_request_count": "waiting",
}
_QUANTILES = {"0.5": "p50_us", "0.99": "p99_us"}
_SUMMARY = "nv_inference_request_summary_us"
_BATCHES = "graphkiln_batch_size_bucket"
_CANCELLED = {"CANCELED", "CANCELLED"}  # spelling of Triton and of model instances
_INFO = "graphkiln_instance_info"
_PROVEN = "graphkiln_version_proven"
_REFUSED = "graphkiln_version_refused"
_ROLLOUT = "graphkiln_rollout_"
_FACTS = {
    "graphkiln_self_test_error": "self_test_error",
    "graphkiln_self_test_timestamp_seconds": "self_test_at_s",
    "graphkiln_self_test_failures_total": "self_test_failures",
    "graphkiln_self_test_replays_total": "self_test_replays",
    "graphkiln_load_seconds": "load_s",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of Prometheus' text format; its value may be NaN."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str) -> Iterator[Sample]:
    """Parse samples. Source: Prometheus, "Exposition formats", text format 0.0.4."""
    for name, label_text, value in _SAMPLE.findall(text):
        labels = {key: _ESCAPED.sub(_unescaped, escaped) for key, escaped in _LABEL.findall(label_text)}
        try:
            yield Sample(name, labels, float(value))
        except ValueError:
            continue


def read_metrics(url: str) -> str:
    """Read the metrics of a server.

    Raises:
        ConnectionFailed: The server does not respond with metrics.
    """
    try:
        return fetch_metrics(url)
    except (OSError, ValueError) as error:
        raise ConnectionFailed(
            f"the metrics cannot be read: {error}", hint="check that the server is running"
        ) from error


def traffic(samples: Iterator[Sample]) -> list[dict[str, Any]]:
    """Sum up the counters of each version since it was loaded.

    Returns:
        Rows of `model`, `version`, the counters (durations in microseconds), `p50_us` and `p99_us` if the server has
        them, and `sizes`: number of batches by maximum size. `failed` excludes cancelled requests; `answered` includes
        requests that an instance answered with an error.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"sizes": defaultdict(float)})
    for sample in samples:
        key = sample.labels.get("model", ""), sample.labels.get("version", "")
        if name := _counter_name(sample):
            rows[key][name] = rows[key].get(name, 0.0) + sample.value
        elif sample.name == _BATCHES:
            rows[key]["sizes"][sample.labels.get("le", "")] += sample.value
    return [{"model": model, "version": version, **rows[model, version]} for model, version in sorted(rows)]


def placements(samples: Iterator[Sample]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return engine, device, precision, backend, seat and self-tests of each version; the worst of its instances.

    Versions of other backends have no engine.
    """
    facts: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"instances": 0})
    for sample in samples:
        row = facts[sample.labels.get("model", ""), sample.labels.get("version", "")]
        if sample.name == _INFO:
            row |= {key: sample.labels.get(key, "") for key in ("engine", "device", "precision")}
            row["instances"] += 1
        elif sample.name == _PROVEN:
            row |= {key: sample.labels.get(key, "") for key in ("backend", "seat")}
            row["proven"] = bool(sample.value)
        elif name := _FACTS.get(sample.name):
            worst = min if name == "self_test_at_s" else max
            row[name] = worst(row.get(name, sample.value), sample.value)
    return {key: row for key, row in facts.items() if row["instances"] or "proven" in row}


def rollouts(samples: Iterator[Sample]) -> dict[str, dict[str, Any]]:
    """Return the rollout of each model that has one.

    Returns:
        Model name -> `version` (the candidate), `serving`, `phase`, `by`, `share`, the counts, `lower` and `upper`
        bound of the share of equal decisions, `limit`, and `latency` in milliseconds by role and quantile.
    """
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"latency": defaultdict(dict)})
    for sample in samples:
        if not sample.name.startswith(_ROLLOUT):
            continue
        name = sample.name.removeprefix(_ROLLOUT).removesuffix("_total")
        labels = sample.labels
        row = found[labels.get("model", "")]
        if name == "info":
            row |= {key: labels.get(key, "") for key in ("version", "serving", "phase", "by")}
        elif name == "agreement":
            row[labels.get("bound", "")] = sample.value
        elif name == "latency_seconds":
            row["latency"][labels.get("role", "")][labels.get("quantile", "")] = 1000 * sample.value
        else:
            row["limit" if name == "agreement_limit" else name] = sample.value
    return {model: row for model, row in found.items() if "phase" in row}


def refusals(samples: Iterator[Sample]) -> dict[tuple[str, str], str]:
    """Return why versions are refused, by model and version."""
    return {
        (sample.labels.get("model", ""), sample.labels.get("version", "")): sample.labels.get("reason", "")
        for sample in samples
        if sample.name == _REFUSED
    }


def _counter_name(sample: Sample) -> str:
    """Return the key of a sample in a row of `traffic`, or an empty string."""
    if math.isnan(sample.value) or {sample.labels.get("reason"), sample.labels.get("code")} & _CANCELLED:
        return ""
    if sample.name == _SUMMARY:
        return _QUANTILES.get(sample.labels.get("quantile", ""), "")
    return _COUNTERS.get(sample.name, "")


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


_SHOWN = ("sha256", "digest", "verification", "weights")
_HIDDEN = {"..", "."}


class Stores:
    """Reads the model stores of a server."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def manifest(self, model: str, version: str) -> Manifest | None:
        """Read the manifest of a version; None if there is none.

        Raises:
            ManifestError: The manifest is damaged.
        """
        folder = self._find(model, version)
        return read_manifest(folder) if folder else None

    def proof(self, model: str, version: str) -> dict[str, Any] | None:
        """Return the proof in a version's manifest as plain data; None without a manifest.

        Leaves out the recipe and the command, which contain paths of the machine that converted the model.

        Raises:
            ManifestError: The manifest is damaged.
        """
        manifest = self.manifest(model, version)
        if manifest is None:
            return None
        facts: Mapping[str, Any] = encode(manifest)
        provenance = {key: facts["provenance"][key] for key in ("source", "versions", "metrics")}
        made = manifest.conversion
        conversion = {"notes": list(made.notes), "output_errors": dict(made.output_errors)} if made else {}
        return {**{key: facts[key] for key in _SHOWN}, "provenance": provenance, **conversion}

    def golden(self, model: str, version: str) -> GoldenSamples | None:
        """Read the golden samples of a version; None if there are none.

        Raises:
            ManifestError: The samples are damaged.
        """
        folder, manifest = self._find(model, version), self.manifest(model, version)
        if folder is None or manifest is None or manifest.golden is None:
            return None
        return GoldenSamples.read(folder / manifest.golden.file)

    def _find(self, model: str, version: str) -> Path | None:
        """Find the folder of a version; the names come from a URL and are checked."""
        if fault_in_served_name(model) or model in _HIDDEN or not is_version(version):
            return None
        candidates = (store / model / version for store in self._folders)
        return next((folder for folder in candidates if folder.is_dir()), None)


T = TypeVar("T")
_PORT = re.compile(r":\d+$")


@dataclass(kw_only=True)
class ShownServer:
    """A running server.

    Attributes:
        connect: Opens a client with an admin key, which may be empty.
        everywhere: True if the server listens on all addresses of its machine.
        metrics_url: URL of the metrics for this machine; empty if they are disabled.
    """

    connect: Callable[[str], AsyncClient]
    stores: Stores
    url: str
    everywhere: bool = False
    metrics_url: str = ""
    _client: AsyncClient | None = None

    @property
    def client(self) -> AsyncClient:
        """Client without an admin key."""
        if self._client is None:
            self._client = self.connect("")
        return self._client

    def url_for(self, host: str) -> str:
        """Return the server's URL for a browser that opened the page at `host`, with or without a port."""
        scheme, _, authority = self.url.partition("://")
        return f"{scheme}://{_PORT.sub('', host)}:{authority.rpartition(':')[2]}" if self.everywhere else self.url

    def model(self, name: str, version: str) -> AsyncModel:
        """Open a version, which takes decoded images."""
        return self.client.model(name, version, images="tensor")

    async def traffic(self) -> list[dict[str, Any]]:
        """Return the counters of each version; see the function `traffic`.

        Raises:
            ModelNotReady: The server publishes no metrics.
            ConnectionFailed: The server does not respond.
        """
        return await self._read_metrics(lambda text: traffic(parse_metrics(text)))

    async def placements(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """Return the placement of each version; empty if the metrics cannot be read."""
        return (await self.versions())[0]

    async def versions(
        self,
    ) -> tuple[
        Mapping[tuple[str, str], Mapping[str, Any]], Mapping[str, Mapping[str, Any]], Mapping[tuple[str, str], str]
    ]:
        """Return placements and refusals of versions, and rollouts in between; empty if metrics cannot be read."""
        with suppress(ClientError):
            return await self._read_metrics(
                lambda text: (
                    placements(parse_metrics(text)),
                    rollouts(parse_metrics(text)),
                    refusals(parse_metrics(text)),
                )
            )
        return {}, {}, {}

    async def precision(self, name: str, version: str) -> str:
        """Return the precision of a version; empty if the metrics cannot be read."""
        return str((await self.placements()).get((name, version), {}).get("precision", ""))

    async def close(self) -> None:
        """Close the connections."""
        if self._client:
            await self._client.close()

    async def _read_metrics(self, read: Callable[[str], T]) -> T:
        """Read the metrics in a thread: a server with 1,000 models publishes megabytes."""
        if not self.metrics_url:
            raise ModelNotReady("the server publishes no metrics", hint="start it without --allow-metrics=false")
        return await asyncio.to_thread(lambda: read(read_metrics(self.metrics_url)))


# The list of models, and the description of one version.

_READY = "READY"


async def list_models(server: ShownServer, admin_key: str) -> list[dict[str, Any]]:
    """List the loaded and refused model versions; with the admin key, all versions in the repository index.

    Returns:
        Rows of `name`, `version`, `state`, `reason`, the `rollout` of the model or None, and the facts of `placements`
        if known.

    Raises:
        Unauthorized: The key is wrong.
        ClientError: The request failed.
    """
    rows = await _list_index(server, admin_key) if admin_key else await _list_loaded(server)
    placements, rollouts, refusals = await server.versions()
    listed = {(row["name"], row["version"]) for row in rows}
    for (name, version), reason in refusals.items():
        if (name, version) not in listed:
            rows.append({"name": name, "version": version, "state": "REFUSED", "reason": reason})
    rows.sort(key=lambda row: (row["name"], row["version"].zfill(20)))
    return [
        {**row, "rollout": rollouts.get(row["name"]), **placements.get((row["name"], row["version"]), {})}
        for row in rows
    ]


async def describe_version(server: ShownServer, name: str, version: str) -> dict[str, Any]:
    """Describe a version with fresh data from the server and the store.

    Returns:
        `inputs`, `outputs`, `max_batch_size`, `kind` of task (empty for a model without images), `preprocess`,
        `labels`, `proof`, `proof_problem`, `image_model`, and the facts of `placements`.

    Raises:
        ClientError: The request failed.
    """
    served = await read_published(server.model(name, version))
    placed = await server.placements()
    return {
        "name": name,
        "version": version,
        "inputs": served.metadata["inputs"],
        "outputs": served.metadata["outputs"],
        "platform": served.metadata.get("platform", ""),
        "max_batch_size": served.config.get("max_batch_size", 0),
        "image_model": served.image_model(),
        "tensor_model": published_tensor_model(served.config),
        **_image_facts(served),
        **_proof(server, name, version),
        **placed.get((name, version), {}),
    }


async def read_published(model: AsyncModel) -> ServedVersion:
    """Read what the server publishes about a version.

    Raises:
        ClientError: The request failed.
    """
    return ServedVersion.read(model.name, model.version, await model.metadata(), await model.config())


def kind_of(served: ServedVersion) -> str:
    """Return the task of a version (`classification`, `detection`, ...); empty for a model without images.

    Raises:
        ProtocolError: The published metadata is malformed.
    """
    if not _takes_images(served):
        return ""
    task = served.task
    return "classification" if task is None or is_classification(task) else task.kind


def _takes_images(served: ServedVersion) -> bool:
    try:
        return bool(served.preprocess)
    except ClientError:
        return False


def _image_facts(served: ServedVersion) -> dict[str, Any]:
    kind = kind_of(served)
    labels = served.contract.labels if served.contract else ()
    ranking = served.ranking
    return {
        "kind": kind,
        "preprocess": encode(served.preprocess) if kind else None,
        "labels": list(labels or (ranking.labels if ranking else ())),
    }


def _proof(server: ShownServer, name: str, version: str) -> dict[str, Any]:
    try:
        return {"proof": server.stores.proof(name, version), "proof_problem": ""}
    except GraphkilnError as error:
        return {"proof": None, "proof_problem": str(error)}


async def _list_loaded(server: ShownServer) -> list[dict[str, Any]]:
    rows = [(str(row.get("name", "")), str(row.get("version", ""))) for row in await server.client.statistics()]
    return [{"name": name, "version": version, "state": _READY, "reason": ""} for name, version in sorted(rows)]


async def _list_index(server: ShownServer, admin_key: str) -> list[dict[str, Any]]:
    async with server.connect(admin_key) as client:
        models = await client.models()
    return [
        {"name": row.name, "version": row.version, "state": row.state or "UNLOADED", "reason": row.reason}
        for row in models
    ]
