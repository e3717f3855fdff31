"""A process that answers inferences with their inputs, `X` as `Y`, over HTTP and gRPC: for tests that fork."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from fake_kserve import FakeKserve
from tritonclient.grpc import service_pb2 as pb

_PAUSE_S = 0.002  # so that requests of several threads overlap
_SPEC = [{"name": "X", "datatype": "FP32", "shape": [-1]}]
_METADATA = {"name": "m", "inputs": _SPEC, "outputs": [{**_SPEC[0], "name": "Y"}]}


@contextmanager
def echo_servers() -> Iterator[dict[str, str]]:
    """Start the process; yields its URLs by protocol, `http` and `grpc`."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        http, rpc = process.stdout.readline().split()
        yield {"http": f"http://127.0.0.1:{http}", "grpc": f"grpc://127.0.0.1:{rpc}"}
        process.stdin.close()


def _infer(message: bytes, _: Any) -> bytes:
    request = pb.ModelInferRequest.FromString(message)
    time.sleep(_PAUSE_S)
    (tensor,) = request.inputs
    return pb.ModelInferResponse(  # type: ignore[no-any-return]
        model_name=request.model_name,
        model_version="1",
        id=request.id,
        outputs=[{"name": "Y", "datatype": tensor.datatype, "shape": tensor.shape}],
        raw_output_contents=request.raw_input_contents,
    ).SerializeToString()


class _Service:
    def service(self, details: Any) -> Any:
        """Implement grpcio's hook for every call."""
        extensions = pb.ServerMetadataResponse(extensions=["binary_tensor_data"]).SerializeToString()
        others = {"ServerMetadata": extensions, "ServerLive": pb.ServerLiveResponse(live=True).SerializeToString()}
        name = details.method.rpartition("/")[2]
        answer = _infer if name == "ModelInfer" else lambda *_: others[name]
        return grpc.unary_unary_rpc_method_handler(answer)


def _serve() -> None:
    document = {"extensions": ["binary_tensor_data"], **_METADATA}
    with FakeKserve(lambda arrays: {"Y": arrays["X"]}, document) as http:
        http.delay_s = _PAUSE_S
        server = grpc.server(ThreadPoolExecutor(16), handlers=[_Service()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        print(http.address.port, port, flush=True)
        sys.stdin.read()
        server.stop(0)


if __name__ == "__main__":
    _serve()
