"""Names and help texts of graphkiln's own metrics; `docs/metrics.md` is generated from them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTANCE = ("instance",)


@dataclass(frozen=True, slots=True)
class PublishedMetric:
    """A metric of the metrics port.

    Attributes:
        name: Prometheus name; that of a histogram without suffix.
        kind: `gauge`, `counter` or `histogram`, with its unit or value.
        description: Help text.
        labels: Labels besides `model` and `version`.
        of_server: The metric has neither `model` nor `version`.
    """

    name: str
    kind: str
    description: str
    labels: tuple[str, ...] = _INSTANCE
    of_server: bool = False


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")

# Each instance writes its own metrics (`triton.metrics`). The supervisor adds those without the label `instance`, and
# those of versions that other backends compute (`instance="server"`).
METRICS = (
    PublishedMetric(
        "graphkiln_instance_info", "gauge, 1", "engine, device and precision of each instance",
        (*_INSTANCE, "engine", "device", "precision"),
    ),
    PublishedMetric(
        "graphkiln_nodes", "gauge", "nodes by the executor that really ran them", (*_INSTANCE, "executor")
    ),
    PublishedMetric(
        "graphkiln_products", "gauge", "convolutions and matrix products, by the precision that really ran",
        (*_INSTANCE, "precision"),
    ),
    PublishedMetric("graphkiln_load_seconds", "gauge", "from the start of loading until ready"),
    PublishedMetric("graphkiln_warmup_seconds", "gauge", "the part of the load time for warming up"),
    PublishedMetric("graphkiln_batch_size", "histogram, rows", "rows of each run", (*_INSTANCE, "le")),
    PublishedMetric(
        "graphkiln_fallbacks_total", "counter", "configurations that failed before the one that serves"
    ),
    PublishedMetric(
        "graphkiln_failed_requests_total", "counter",
        "requests answered with an error, which Triton (24.10) counts as successes", (*_INSTANCE, "code"),
    ),
    PublishedMetric(
        "graphkiln_shared_memory_bytes", "gauge", "size of the region that an instance shares with tritonserver"
    ),
    PublishedMetric(
        "graphkiln_version_proven", "gauge, 1 or 0",
        "1 for a version whose golden samples were right before it was served, 0 for one without any",
        ("backend", "seat"),
    ),
    PublishedMetric(
        "graphkiln_version_refused", "gauge, 1", "a version of the stores that is not served, and why", ("reason",)
    ),
    PublishedMetric(
        "graphkiln_self_test_error", "gauge", "relative L2 error on the golden samples; -1 without any"
    ),
    PublishedMetric("graphkiln_self_test_replays_total", "counter", "replays of the golden samples while serving"),
    PublishedMetric("graphkiln_self_test_failures_total", "counter", "replays that failed"),
    PublishedMetric(
        "graphkiln_self_test_timestamp_seconds", "gauge, seconds since 1970",
        "when the golden samples were last right; 0 without any",
    ),
    PublishedMetric(
        "graphkiln_decoded_images_total", "counter", "images that an instance of `NAME.images` decoded or refused"
    ),
    PublishedMetric(
        "graphkiln_decode_seconds_total", "counter, s",
        "processor time of decoding and preprocessing; its rate is the number of busy cores",
    ),
    PublishedMetric(
        "graphkiln_rollout_info", "gauge, 1",
        "a rollout of the version, and for a day after its end: loading, shadow, traffic, promoted or aborted, by the "
        "user or by the server (gates, failures); `serving` is the version that serves",
        ("phase", "by", "serving"),
    ),
    PublishedMetric(
        "graphkiln_rollout_share", "gauge, 0 to 1",
        "share of the requests that are compared (shadow), or that the version answers (traffic)", (),
    ),
    PublishedMetric(
        "graphkiln_rollout_compared_total", "counter",
        "requests that both versions answered, like all counts since the last change of the rollout", (),
    ),
    PublishedMetric("graphkiln_rollout_disagreed_total", "counter", "requests with another decision", ()),
    PublishedMetric(
        "graphkiln_rollout_undecided_total", "counter", "requests whose decision is within the noise of the policy", ()
    ),
    PublishedMetric(
        "graphkiln_rollout_answered_total", "counter", "requests of users that the version answered (traffic)", ()
    ),
    PublishedMetric(
        "graphkiln_rollout_dropped_total", "counter", "copies that were not sent: earlier ones were under way", ()
    ),
    PublishedMetric(
        "graphkiln_rollout_failed_total", "counter",
        "requests on which the version failed; users got the answer of the serving version", (),
    ),
    PublishedMetric(
        "graphkiln_rollout_agreement", "gauge, 0 to 1",
        "bounds of the share of equal decisions, which hold at all times together", ("bound",),
    ),
    PublishedMetric(
        "graphkiln_rollout_agreement_limit", "gauge, 0 to 1", "share that `--agree` asks for; 0.99 without it", ()
    ),
    PublishedMetric(
        "graphkiln_rollout_latency_seconds", "gauge, s",
        "time of the compared requests in the serving version and in the candidate", ("role", "quantile"),
    ),
    PublishedMetric(
        "graphkiln_recorded_requests_total", "counter", "requests in finished files of the record, with `--record`"
    ),
    PublishedMetric(
        "graphkiln_record_dropped_total", "counter",
        "requests that were chosen for the record and are not in it: too many at once, or a fault of its disk",
    ),
    PublishedMetric(
        "graphkiln_restarts_total", "counter", "restarts of the whole server", ("cause",), of_server=True
    ),
    PublishedMetric(
        "graphkiln_triton_info", "gauge, 1", "version of tritonserver, while it serves", ("version",), of_server=True
    ),
)  # fmt: skip
_BY_NAME = {metric.name: metric for metric in METRICS}


def describe(name: str) -> str:
    """Help text of a metric."""
    return _BY_NAME[name].description


def kind_of(name: str) -> str:
    """`gauge`, `counter` or `histogram`."""
    return _BY_NAME[name].kind.partition(",")[0]


def sample_line(name: str, value: float, **labels: str) -> str:
    """Line of a value in Prometheus' text format."""
    written = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
    return f"{name}{{{written}}} {value!r}\n"


def family_of(line: str) -> str:
    """Name of the metric of a line; that of a histogram without suffix."""
    name = line.partition("{")[0]
    return name if name in _BY_NAME else _OF_HISTOGRAMS.sub("", name)
