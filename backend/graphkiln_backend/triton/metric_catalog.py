"""Names and help texts of graphkiln's own metrics; `docs/metrics.md` is generated from them."""

from __future__ import annotations

from dataclasses import dataclass

_INSTANCE = ("instance",)


@dataclass(frozen=True, slots=True)
class PublishedMetric:
    """A metric of the metrics port.

    Attributes:
        name: Prometheus name; a histogram's without suffix.
        kind: `gauge`, `counter` or `histogram`, and its unit or value.
        says: Help text.
        labels: Labels beside `model` and `version`.
        of_server: Whether it has neither `model` nor `version`.
    """

    name: str
    kind: str
    says: str
    labels: tuple[str, ...] = _INSTANCE
    of_server: bool = False


# Each instance publishes these; of all instances one publishes the last.
METRICS = (
    PublishedMetric(
        "graphkiln_instance_info", "gauge, 1", "what each instance serves with",
        (*_INSTANCE, "engine", "device", "precision"),
    ),
    PublishedMetric("graphkiln_nodes", "gauge", "nodes that each executor really ran", (*_INSTANCE, "executor")),
    PublishedMetric(
        "graphkiln_products", "gauge", "convolutions and matrix products, by the precision that really ran",
        (*_INSTANCE, "precision"),
    ),
    PublishedMetric("graphkiln_load_seconds", "gauge", "from the start of loading until ready"),
    PublishedMetric("graphkiln_warmup_seconds", "gauge", "of these, for warming up"),
    PublishedMetric("graphkiln_batch_size", "histogram, rows", "rows of each run", (*_INSTANCE, "le")),
    PublishedMetric(
        "graphkiln_fallbacks_total", "counter", "configurations that failed before the one that serves"
    ),
    PublishedMetric(
        "graphkiln_failed_requests_total", "counter",
        "requests that it answered with an error, which Triton (24.10) counts as successes", (*_INSTANCE, "code"),
    ),
    PublishedMetric("graphkiln_shared_memory_bytes", "gauge", "size of its region of shared memory"),
    PublishedMetric(
        "graphkiln_self_test_error", "gauge", "relative L2 error on the golden samples; -1 without any"
    ),
    PublishedMetric(
        "graphkiln_self_test_replays_total", "counter", "replays of the golden samples while it serves"
    ),
    PublishedMetric("graphkiln_self_test_failures_total", "counter", "replays that failed"),
    PublishedMetric(
        "graphkiln_self_test_timestamp_seconds", "gauge, seconds since 1970", "when they were last right; 0 without any"
    ),
    PublishedMetric(
        "graphkiln_decoded_images_total", "counter", "images that an instance of `NAME.images` decoded, or found bad"
    ),
    PublishedMetric(
        "graphkiln_decode_seconds_total", "counter, s",
        "time of the processor that they took, to the sample: its rate is how many cores decode",
    ),
    PublishedMetric(
        "graphkiln_restarts_total", "counter", "restarts of the whole server, 0 at first", ("cause",),
        of_server=True,
    ),
    PublishedMetric("graphkiln_triton_info", "gauge, 1", "the Triton that runs", ("version",), of_server=True),
)  # fmt: skip
_SAYS = {metric.name: metric.says for metric in METRICS}


def describe(name: str) -> str:
    """Help text of a metric."""
    return _SAYS[name]
