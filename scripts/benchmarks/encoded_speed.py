"""JPEG to top-5 of ResNet-50: decoded by our server, by our client, and by FastAPI with Pillow.

All run the same graph in ONNX Runtime with two threads in total: FastAPI the exported one, or the one that our
conversion quantized; our server the same with the preprocessing inside. In one more row the server chooses the engine.
All servers run from the beginning to the end and take turns, and share the machine's cores with the callers.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from inputs import CACHE, exported_graph, synthetic_photograph
from measurement import Summary, measure, ratio_of
from peers.protocols import PEERS
from peers_speed import NAME, Classify, convert_once, environment, start_peer

from graphkiln.bench.generator import in_turn
from graphkiln.story.server import start_server
from graphkiln_backend.repository.version import GRAPH_FILE
from graphkiln_client import Client, Result

CALLERS = (8, 32)
FASTAPI, CLIENT, SERVER, CHOSEN = "FastAPI, Pillow", "client decodes", "server decodes", "server decodes, engine: auto"
_QUANTIZER = "onnxruntime"  # graphs of others are slow in the engine that FastAPI has
_INSTANCES, _LARGEST_BATCH = 2, 8  # in int8, an image of a batch of 4 takes 9% less time than one alone


def benchmark_encoded(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Measure images per second of each way, in fp32 and int8, for 8 and 32 callers."""
    jpegs = [synthetic_photograph(500, 375, seed) for seed in range(8)]
    rows: list[dict[str, object]] = []
    for precision in ("fp32", "int8"):
        with ExitStack() as stack:
            ways = _start(stack, precision, jpegs)
            requests = {name: in_turn([partial(way, jpeg) for jpeg in jpegs]) for name, way in ways.items()}
            for callers in CALLERS:
                rows += rows_of(f"{precision}, {callers} callers", measure(requests, callers, rounds, seconds))
    return rows


def rows_of(title: str, measured: Mapping[str, Summary]) -> list[dict[str, object]]:
    """Make a row for each way, with its ratios to FastAPI and to decoding in the client, round by round."""
    fastapi, client = measured[FASTAPI].rates, measured[CLIENT].rates
    return [
        {
            "model": title,
            "set-up": name,
            "images/s": round(one.per_second, 1),
            "to FastAPI": ratio_of(one.rates, fastapi).median,
            "spread": ratio_of(one.rates, fastapi).spread,
            "to client": ratio_of(one.rates, client).median,
            "p50 ms": round(one.p50_ms, 1),
            "p99 ms": round(one.p99_ms, 1),
        }
        for name, one in measured.items()
    ]


def _start(stack: ExitStack, precision: str, jpegs: list[bytes]) -> dict[str, Classify]:
    """Start all servers, and check that the answers of each are right."""
    peer = start_peer(PEERS["fastapi"], environment("fastapi"), _peer_graph(precision), jpegs[:2])
    ways: dict[str, Classify] = {FASTAPI: stack.enter_context(peer)}
    store = CACHE / "encoded" / precision
    options = {"input": "encoded", "top_k": 5, "max_batch_size": _LARGEST_BATCH}
    convert_once(store, precision, _INSTANCES, int8_by=_QUANTIZER, **options)
    same_engine = stack.enter_context(_start_graphkiln(store, "onnxruntime"))
    chosen = stack.enter_context(_start_graphkiln(store, "auto"))
    by_client = partial(same_engine.model(NAME, images="tensor").classify, top_k=5)
    by_server = partial(same_engine.model(NAME, images="encoded").classify, top_k=5)
    check_same(by_client, by_server, jpegs)
    by_chosen = partial(chosen.model(NAME, images="encoded").classify, top_k=5)
    return {**ways, CLIENT: by_client, SERVER: by_server, CHOSEN: by_chosen}


@contextmanager
def _start_graphkiln(store: Path, engine: str) -> Iterator[Client]:
    # No replays of golden samples, because a server that others wait for is idle.
    flags = (f"--set={NAME}.engine={engine}", "--cache", str(CACHE / "lowered"), "--replay-interval", "0")
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(store, flags=flags, log=Path(folder) / "log") as server,
        Client(server.http_url) as client,  # over HTTP, like FastAPI's callers
    ):
        yield client


def _peer_graph(precision: str) -> Path:
    """Graph for FastAPI: fp32 `[n, 3, 224, 224]`, normalized, to scores `[n, 1000]`."""
    if precision == "fp32":
        return exported_graph(NAME)
    return convert_once(CACHE / "encoded-peer" / precision, precision, int8_by=_QUANTIZER) / "1" / GRAPH_FILE


def check_same(
    by_client: Callable[[bytes], Result], by_server: Callable[[bytes], Result], jpegs: Sequence[bytes]
) -> None:
    """Compare the answers of both ways, which must be equal bit for bit."""
    for jpeg in jpegs:
        expected, found = by_client(jpeg).outputs, by_server(jpeg).outputs
        if found != expected:
            sys.exit(f"decoded by the server: {found}; expected {expected}")
