"""Rates through the edge beside tritonserver's own ports: plain and with TLS, small and large requests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import trustme
from client_speed import SIZES, compare, write_mean_models
from inputs import add_model, exported_graph

from graphkiln.story.server import LocalServer, free_ports, start_server
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.server.access import Access
from graphkiln_backend.server.edge import Edge, EdgePlan, find_haproxy
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.tls import TlsFiles
from graphkiln_client import Client

_KNOWN = dict.fromkeys(("http-port", "grpc-port", "allow-metrics"), True)


# Size -> served model, input name, shape. The cost of the mean models is negligible: they show the transport alone.
_REQUESTS = {
    **{size: (f"mean{elements}", "X", (1, elements)) for size, elements in SIZES.items()},
    "600 kB, MobileNetV3-small": ("mobilenet", "INPUT_0", (1, 3, 224, 224)),
}


def benchmark_edge(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Measure one tritonserver directly and through two edges, in turn.

    Raises:
        MeasurementError: HAProxy is not installed.
    """
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = write_mean_models(folder)
        add_model(store, "mobilenet", exported_graph("mobilenet_v3_small"))
        server = stack.enter_context(start_server(store, flags=("--edge=off",)))
        files = _issue(folder)
        plain, secured = (_open_edge(stack, server, tls) for tls in (None, files))
        for protocol in ("http", "grpc"):
            clients = {
                "direct": stack.enter_context(Client(getattr(server, f"{protocol}_url"))),
                "edge": stack.enter_context(Client(f"{protocol}://127.0.0.1:{plain[protocol]}")),
                "edge, TLS": stack.enter_context(
                    Client(f"{protocol}s://127.0.0.1:{secured[protocol]}", ca_file=folder / "ca.pem")
                ),
            }
            for name, (model, tensor, shape) in _REQUESTS.items():
                sample = np.random.default_rng(0).normal(size=shape).astype(np.float32)
                requests: dict[str, Callable[[], object]] = {
                    route: partial(client.model(model).infer, {tensor: sample}) for route, client in clients.items()
                }
                rows += compare(f"{name} {protocol}", requests, rounds, seconds, percentile="p50")
    return rows


def _issue(folder: Path) -> TlsFiles:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(str(folder / "key.pem"))
    pair.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    return TlsFiles(certificate=folder / "cert.pem", key=folder / "key.pem")


def _open_edge(stack: ExitStack, server: LocalServer, tls: TlsFiles | None) -> dict[str, int]:
    """Start an edge in front of a running server; return its ports by protocol."""
    program = find_haproxy()
    if program is None:
        raise MeasurementError("HAProxy is not installed", hint="apt-get install haproxy")
    names, ports = ("http", "grpc"), free_ports(2)
    plan = EdgePlan(
        program=program,
        public=_flags(dict(zip(names, ports, strict=True))),
        inner=_flags({name: urlsplit(url).port or 0 for name, url in zip(names, server.urls, strict=True)}),
        access=Access(),
        tls=tls,
    )
    stack.enter_context(Edge(plan)).admit()
    return dict(zip(names, ports, strict=True))


def _flags(ports: Mapping[str, int]) -> TritonFlags:
    return TritonFlags.parse(
        [*(f"--{name}-port={port}" for name, port in ports.items()), "--allow-metrics=false"], _KNOWN
    )
