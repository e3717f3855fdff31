"""The server that the page shows, as its views use it: the client, the metrics, the stores."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graphkiln.page.stores import Stores
from graphkiln_backend.graph.errors import ClientError, ConnectionFailed, ModelNotReady
from graphkiln_backend.server.ports import fetch_metrics
from graphkiln_client import AsyncClient, AsyncModel
from graphkiln_client.published import ServedVersion

# The metrics of a running server, as the page's charts take them: counters by model version, never reset here.
#
# A rate is the difference of two readings. The browser makes it, so that the page keeps no state.

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
_GIVEN_UP = {"CANCELED", "CANCELLED"}  # as Triton and instances call requests whose clients hung up
_INFO = "graphkiln_instance_info"
_FACTS = {
    "graphkiln_self_test_error": "self_test_error",
    "graphkiln_self_test_timestamp_seconds": "self_test_at_s",
    "graphkiln_self_test_failures_total": "self_test_failures",
    "graphkiln_self_test_replays_total": "self_test_replays",
    "graphkiln_load_seconds": "load_s",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of Prometheus' text format.

    Attributes:
        name: Of the metric.
        labels: By name.
        value: May be NaN.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str) -> Iterator[Sample]:
    """The samples of a text. Source: Prometheus, "Exposition formats", text format 0.0.4."""
    for name, labels, value in _SAMPLE.findall(text):
        found = {key: _ESCAPED.sub(_unescaped, escaped) for key, escaped in _LABEL.findall(labels)}
        try:
            yield Sample(name, found, float(value))
        except ValueError:
            continue


def read_metrics(url: str) -> str:
    """The text that a server publishes.

    Raises:
        ConnectionFailed: Nobody answers, or what answers is no metrics port.
    """
    try:
        return fetch_metrics(url)
    except (OSError, ValueError) as error:
        raise ConnectionFailed(f"the metrics cannot be read: {error}", hint="is the server running?") from error


def traffic(samples: Iterator[Sample]) -> list[dict[str, Any]]:
    """What each version has done since it was loaded, by name and version.

    Returns:
        Rows of `model`, `version`, the counters (durations in microseconds, `failed` without clients that cancelled;
        of `answered`, those too that an instance answered with an error, which are among `failed`),
        `p50_us` and `p99_us` where the server has them, and `sizes`: how many batches had at most so many rows.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"sizes": defaultdict(float)})
    for sample in samples:
        key = sample.labels.get("model", ""), sample.labels.get("version", "")
        if name := _name_of(sample):
            rows[key][name] = rows[key].get(name, 0.0) + sample.value
        elif sample.name == _BATCHES:
            rows[key]["sizes"][sample.labels.get("le", "")] += sample.value
    return [{"model": model, "version": version, **rows[model, version]} for model, version in sorted(rows)]


def placements(samples: Iterator[Sample]) -> dict[tuple[str, str], dict[str, Any]]:
    """By model and version: with what it is served, and what its self-tests said; the worst of its instances."""
    facts: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"instances": 0})
    for sample in samples:
        row = facts[sample.labels.get("model", ""), sample.labels.get("version", "")]
        if sample.name == _INFO:
            row |= {key: sample.labels.get(key, "") for key in ("engine", "device", "precision")}
            row["instances"] += 1
        elif name := _FACTS.get(sample.name):
            worst = min if name == "self_test_at_s" else max
            row[name] = worst(row.get(name, sample.value), sample.value)
    return {key: row for key, row in facts.items() if row["instances"]}


def _name_of(sample: Sample) -> str:
    """What a sample is called in a row of `traffic`; empty for one that is not part of it."""
    if math.isnan(sample.value) or {sample.labels.get("reason"), sample.labels.get("code")} & _GIVEN_UP:
        return ""
    if sample.name == _SUMMARY:
        return _QUANTILES.get(sample.labels.get("quantile", ""), "")
    return _COUNTERS.get(sample.name, "")


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


T = TypeVar("T")
_MOST_MODELS = 64  # whose metadata is kept; one more is requested anew
_KEPT_S = 10.0  # A version may be replaced in its place, by whomever
_PORT = re.compile(r":\d+$")


@dataclass(kw_only=True)
class ShownServer:
    """One running server.

    Attributes:
        connect: Opens a client; with an admin key, or with an empty one for what needs none.
        stores: What the server serves from.
        url: Where people reach the server over HTTP.
        everywhere: Whether that is at every address of its machine.
        metrics_url: Of its metrics, as this machine reaches them; empty where they are switched off.
        now: A clock, in seconds.
    """

    connect: Callable[[str], AsyncClient]
    stores: Stores
    url: str
    everywhere: bool = False
    metrics_url: str = ""
    now: Callable[[], float] = time.monotonic
    _client: AsyncClient | None = None
    _models: OrderedDict[tuple[str, str], tuple[AsyncModel, float]] = field(default_factory=OrderedDict)

    @property
    def client(self) -> AsyncClient:
        """A client without an admin key."""
        if self._client is None:
            self._client = self.connect("")
        return self._client

    def url_for(self, host: str) -> str:
        """The server as somebody reaches it who reached the page.

        Args:
            host: What he called the page, with its port or without it: `192.0.2.1:8003`.
        """
        scheme, _, authority = self.url.partition("://")
        return f"{scheme}://{_PORT.sub('', host)}:{authority.rpartition(':')[2]}" if self.everywhere else self.url

    def model(self, name: str, version: str) -> AsyncModel:
        """A version; what was read of it is kept for some seconds."""
        model, until = self._models.pop((name, version), (None, 0.0))
        if model is None or until < self.now():
            model, until = self.client.model(name, version, images="tensor"), self.now() + _KEPT_S
        self._models[name, version] = model, until
        if len(self._models) > _MOST_MODELS:
            self._models.popitem(last=False)
        return model

    def forget(self, name: str, version: str = "") -> None:
        """Has everything of a model, or of one version, requested anew: it was loaded or unloaded."""
        for key in [key for key in self._models if key[0] == name and version in ("", key[1])]:
            del self._models[key]

    async def served(self, name: str, version: str) -> ServedVersion:
        """What the server publishes about a version.

        Raises:
            ClientError: The request failed.
        """
        model = self.model(name, version)
        return ServedVersion.read(name, version, await model.metadata(), await model.config())

    async def traffic(self) -> list[dict[str, Any]]:
        """See `metrics.traffic`.

        Raises:
            ModelNotReady: The server publishes no metrics.
            ConnectionFailed: It does not answer.
        """
        return await self._of_metrics(lambda text: traffic(parse_metrics(text)))

    async def placements(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """See `metrics.placements`; empty where nobody tells."""
        with suppress(ClientError):
            return await self._of_metrics(lambda text: placements(parse_metrics(text)))
        return {}

    async def precision(self, name: str, version: str) -> str:
        """What a version computes in; empty where nobody tells."""
        return str((await self.placements()).get((name, version), {}).get("precision", ""))

    async def close(self) -> None:
        """Closes its connections."""
        if self._client:
            await self._client.close()

    async def _of_metrics(self, read: Callable[[str], T]) -> T:
        """What is read of the metrics, beside the event loop: a server of 1,000 models has megabytes of them."""
        if not self.metrics_url:
            raise ModelNotReady("the server publishes no metrics", hint="start it without --allow-metrics=false")
        return await asyncio.to_thread(lambda: read(read_metrics(self.metrics_url)))
