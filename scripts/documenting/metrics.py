"""docs/metrics.md: what the metrics port publishes, ours by its catalog and Triton's beside it."""

from __future__ import annotations

from collections.abc import Iterable

from documenting.text import code, table
from graphkiln_backend.triton.metric_catalog import METRICS, PublishedMetric

_INTRODUCTION = """# Metrics

What a server publishes on its metrics port (8002), in Prometheus' format: ours, written by `scripts/docs` from
`graphkiln_backend.triton.metric_catalog`, and Triton's, in one table. A test compares it with a running server, in both
directions. [`deploy/prometheus/rules.yml`](../deploy/prometheus/rules.yml) has recording
and alert rules for them, [`deploy/grafana/dashboard.json`](../deploy/grafana/dashboard.json) a dashboard. Those of
`graphkiln score` are in [scoring.md](scoring.md).

Prometheus calls our label `instance` (of a model: `digits_0`) `exported_instance`, because `instance` is the target.

"""
_END = """
With a GPU Triton adds `nv_gpu_*` (utilization, memory, power) and `nv_energy_consumption`, which no test here can
compare.
A summary's quantiles are those of one server, and cannot be added up over several: the dashboard shows the slowest
one's.
"""
_COLUMNS = ("metric", "kind", "labels beside `model`, `version`", "says")
# Triton's: name, kind, labels, meaning. Source: its "Metrics" page, and what its port says of them.
TRITONS: tuple[tuple[str, str, str, str], ...] = (
    (
        "nv_inference_request_success", "counter", "-",
        "requests that were answered, cached ones too, and those that an instance answered with an error",
    ),
    (
        "nv_inference_request_failure", "counter", "`reason`: OTHER, BACKEND, CANCELED, REJECTED",
        (
            "requests that failed before an instance had them. CANCELED: the client gave up; REJECTED: their time was "
            "over. What a full queue, or its own shape, keeps out is not counted"
        ),
    ),
    ("nv_inference_count", "counter", "-", "samples that were computed"),
    ("nv_inference_exec_count", "counter", "-", "batches that were computed"),
    ("nv_inference_request_duration_us", "counter, us", "-", "time of all requests together, the warm-up's too"),
    ("nv_inference_queue_duration_us", "counter, us", "-", "of it, waiting: its rate / 10^6 is how many wait"),
    ("nv_inference_compute_input_duration_us", "counter, us", "-", "of it, preparing inputs"),
    ("nv_inference_compute_infer_duration_us", "counter, us", "-", "of it, in the backend"),
    ("nv_inference_compute_output_duration_us", "counter, us", "-", "of it, handing outputs over"),
    ("nv_inference_pending_request_count", "gauge", "-", "requests that wait now"),
    (
        "nv_inference_request_summary_us", "summary, us", "`quantile`",
        "latency, with `--metrics-config=summary_latencies=true`; Triton (24.10) leaves out models with a cache",
    ),
    ("nv_inference_queue_summary_us", "summary, us", "`quantile`", "waiting; likewise"),
    ("nv_inference_compute_input_summary_us", "summary, us", "`quantile`", "likewise"),
    ("nv_inference_compute_infer_summary_us", "summary, us", "`quantile`", "likewise"),
    ("nv_inference_compute_output_summary_us", "summary, us", "`quantile`", "likewise"),
    ("nv_cache_num_hits_per_model", "counter", "-", "answers from the response cache, with `--cache-config`"),
    ("nv_cache_num_misses_per_model", "counter", "-", "requests that it did not know; likewise"),
    ("nv_cache_hit_duration_per_model", "counter, us", "-", "time of looking up hits; likewise"),
    ("nv_cache_miss_duration_per_model", "counter, us", "-", "time of looking up and inserting misses; likewise"),
    ("nv_cache_hit_summary_per_model", "summary, us", "`quantile`", "likewise, with both options"),
    ("nv_cache_miss_summary_per_model", "summary, us", "`quantile`", "likewise, with both options"),
    ("nv_cache_num_hits", "counter", "none", "of all models together, as are those below"),
    ("nv_cache_num_misses", "counter", "none", "requests that it did not know"),
    ("nv_cache_num_lookups", "counter", "none", "hits and misses"),
    ("nv_cache_num_evictions", "counter", "none", "answers that made room for others"),
    ("nv_cache_num_entries", "gauge", "none", "answers that it holds"),
    ("nv_cache_util", "gauge, 0 to 1", "none", "how full it is"),
    ("nv_cache_lookup_duration", "counter, us", "none", "time of looking up"),
    ("nv_cache_insertion_duration", "counter, us", "none", "time of inserting"),
    ("nv_pinned_memory_pool_total_bytes", "gauge", "none", "pinned memory, with a GPU"),
    ("nv_pinned_memory_pool_used_bytes", "gauge", "none", "of it, in use"),
    ("nv_cpu_utilization", "gauge, 0 to 1", "none", "of the machine, not of the container"),
    ("nv_cpu_memory_total_bytes", "gauge", "none", "of the machine"),
    ("nv_cpu_memory_used_bytes", "gauge", "none", "of the machine"),
)  # fmt: skip


def render() -> str:
    """The page."""
    tritons = ((code(name), *rest) for name, *rest in TRITONS)
    return "".join((_INTRODUCTION, table(_COLUMNS, (*_ours(), *tritons)), _END))


def _ours() -> Iterable[tuple[str, ...]]:
    return ((code(each.name), each.kind, _labels(each), each.says) for each in METRICS)


def _labels(metric: PublishedMetric) -> str:
    return ", ".join(map(code, metric.labels)) + (" only" if metric.of_server else "")
