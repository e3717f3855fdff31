"""Configurations of both servers, Triton's statistics, and the rows."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import serving_speed
from inputs import DIGITS
from servers import Load
from serving_speed import BARE, CPP, OURS, VARIANTS, Sample, read_statistics, rows_of

STAGES = {stage: {"ns": 3_000, "count": 2} for stage in ("queue", "compute_input", "compute_infer", "compute_output")}
STATISTICS = {"model_stats": [{"inference_stats": {"success": {"count": 2}, **STAGES}, "inference_count": 5,
                               "execution_count": 3}]}  # fmt: skip


@pytest.fixture
def url() -> Iterator[str]:
    """Serve statistics."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v2/models/m/stats"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(STATISTICS).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def sample(rate: float, queue_us: float = 10.0) -> Sample:
    load = Load(per_second=rate, p50_ms=1e3 / rate, p99_ms=2e3 / rate)
    stages = dict.fromkeys(("queue", "compute_input", "compute_infer", "compute_output"), queue_us)
    return Sample(load=load, server_us=stages, batch=1.0, cpu_ms=3.0)


def test_statistics_are_read(url: str) -> None:
    found = read_statistics(url, "m")
    assert found["queue"] == found["compute_output"] == 3_000
    assert (found["requests"], found["rows"], found["executions"]) == (2, 5, 3)


def test_ratios_are_of_each_round_to_the_last_server() -> None:
    rows = rows_of("m, HTTP, 1", "g", {OURS: [sample(90), sample(50), sample(80)], CPP: [sample(100)] * 3})
    assert [(row["set-up"], row["ratio"], row["spread"]) for row in rows] == [(OURS, 0.8, 0.25), (CPP, 1.0, 0.0)]
    assert rows[0]["requests/s"] == 80
    assert rows[0]["queue us"] == rows[0]["infer us"] == 10
    assert rows[0]["load by"] == rows[1]["load by"] == "g"


def test_a_bare_session_is_called_in_process() -> None:
    bare = Sample(load=sample(100).load, server_us={}, batch=1.0, cpu_ms=0.0)
    row = rows_of("m", "g", {OURS: [sample(90)], BARE: [bare]})[1]
    assert (row["set-up"], row["load by"], row["queue us"]) == (BARE, "in process", 0)


@pytest.mark.parametrize("ours", [True, False])
def test_both_servers_get_the_same_models_instances_and_threads(
    ours: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serving_speed, "exported_graph", lambda _: DIGITS / "1" / "model.onnx")
    store = serving_speed.variant_store(tmp_path / "store", VARIANTS, ours=ours)
    assert sorted(folder.name for folder in store.iterdir()) == sorted(variant.name for variant in VARIANTS)
    for variant in VARIANTS:
        text = (store / variant.name / "config.pbtxt").read_text()
        key = "threads" if ours else "intra_op_thread_count"
        assert f'backend: "{"graphkiln" if ours else "onnxruntime"}"' in text
        assert f"count: {variant.instances} " in text
        assert f'key: "{key}" value {{ string_value: "{variant.threads}" }}' in text
        assert ('string_value: "openvino"' in text) == (ours and "openvino" in variant.name)
