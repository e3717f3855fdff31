"""Other clients against our server: `clients/` has them as their users would write them."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zoo
from environments import make_environment
from PIL import Image
from running import Server, Serving, run_here

from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_backend.system.admin_key import find_key

pytestmark = pytest.mark.server

CLIENTS = Path(__file__).parent / "clients"


def shown_by(*command: str | Path) -> bytes:
    finished = subprocess.run(
        list(map(str, command)), capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False
    )
    assert finished.returncode == 0, finished.stderr.decode()
    return finished.stdout


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_plain_tritonclient(server: Server, protocol: str) -> None:
    address = (server.url if protocol == "http" else server.grpc_url).rpartition("/")[2]
    shown = shown_by(sys.executable, CLIENTS / "plain_tritonclient.py", protocol, address)
    assert shown.count(b"b'") == 2
    assert shown.count(b":") == 4, "score, index and label"


def test_curl_with_a_raw_body(server: Server, tmp_path: Path) -> None:
    tensor = tmp_path / "tensor.bin"
    tensor.write_bytes(np.zeros((1, 1, 32, 32), np.float32).tobytes())
    answer = shown_by(CLIENTS / "raw_body.sh", server.url, tensor)
    header, scores = answer[:-40], np.frombuffer(answer[-40:], np.float32)  # raw in, raw out
    assert json.loads(header)["outputs"][0]["shape"] == [1, 10]
    assert scores.sum() == pytest.approx(1, abs=1e-5)


def test_grpc_from_generated_stubs(server: Server) -> None:
    address = server.grpc_url.rpartition("/")[2]
    assert shown_by(sys.executable, CLIENTS / "generated_stubs.py", address).strip() == b"[1, 10] 40"


@pytest.fixture(scope="module")
def every_type_store(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Identities of all types, and a model that accepts encoded images."""
    store = tmp_path_factory.mktemp("every type")
    halves = ("FP16", "BF16")  # types that JSON does not have
    models = {"types": [name for name in zoo.DTYPES if name not in halves], **{name: [name] for name in halves}}
    for model, names in models.items():
        zoo.add(store, model, zoo.identities(names), "max_batch_size: 4")
    shutil.copytree(digits, store / "digits")
    with (store / "digits" / "config.pbtxt").open("a") as config:
        config.write(ACCEPT_IMAGES_LINE)
    return store


@pytest.fixture(scope="module")
def every_type(every_type_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Serving(tmp_path_factory.mktemp("log"), "--model-store", every_type_store) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="session")
def kserve_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python with KServe's SDK, which requires numpy 2 and a web framework."""
    return make_environment(tmp_path_factory.mktemp("kserve"), "kserve==0.21.0") / "python"


@pytest.fixture
def digits_api(every_type_store: Path, tmp_path: Path) -> Iterator[ModuleType]:
    """The package that a generator makes of the document of `digits`."""
    document = run_here("openapi", every_type_store / "digits")
    (tmp_path / "digits.json").write_text(document.stdout)
    programs = make_environment(tmp_path / "generator", "openapi-python-client==0.29.1")
    generate = [programs / "openapi-python-client", "generate", "--path", "digits.json", "--meta", "none"]
    generated = subprocess.run(
        [*generate, "--output-path", "digits_api", "--fail-on-warning"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},  # it formats by its own ruff
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert generated.returncode == 0, generated.stdout + generated.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        yield importlib.import_module("digits_api")
    for name in [name for name in sys.modules if name.split(".")[0] == "digits_api"]:
        del sys.modules[name]


def answers(*command: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown_by(*command))
    return found


@pytest.mark.slow
def test_kserve_sdk(every_type: Server, kserve_python: Path, repository: Path) -> None:
    """By both clients of the SDK, as values and as bytes; what differs from "same" is the SDK's own limit."""
    address = every_type.grpc_url.rpartition("/")[2]
    picture = repository / "docs" / "digits" / "seven.png"
    found = answers(kserve_python, CLIENTS / "kserve_sdk.py", every_type.url, address, picture)
    for protocol in ("REST", "gRPC"):
        assert found.pop(f"{protocol} picture") == 7
        assert found.pop(f"{protocol} model") is True
        assert found.pop(f"{protocol} unknown model") is False
        for case in ("FP16", "FP16, NaN and infinity"):
            assert found.pop(f"{protocol} values: {case}").startswith("InvalidInput: "), "the SDK sends FP16 as bytes"
    assert found.pop("gRPC live") is True
    assert found.pop("gRPC ready") is True
    # findings/kserve-*.sh: it expects a body of health, and sends `null` for NaN and beside empty bytes.
    assert found.pop("REST live").startswith("JSONDecodeError: ")
    assert found.pop("REST ready").startswith("JSONDecodeError: ")
    assert "non-number" in found.pop("REST values: NaN and infinity")
    assert "only one of the following fields" in found.pop("REST binary: empty")
    assert found == dict.fromkeys(found, "same")
    assert len(found) == 14


@pytest.mark.wide
def test_all_of_tritonclient(every_type: Server) -> None:
    """Each transport, in JSON, as bytes, in a stream and in shared memory."""
    addresses = every_type.url.rpartition("/")[2], every_type.grpc_url.rpartition("/")[2]
    key = find_key("127.0.0.1", every_type.http_port)
    found = answers(sys.executable, CLIENTS / "every_tritonclient.py", *addresses, key)
    for client in ("HTTP", "HTTP aio"):
        assert "FP16 data via JSON is not supported" in found.pop(f"{client}, JSON: FP16")
        assert "must be sent as binary data" in found.pop(f"{client}, JSON: BF16")
    assert found == dict.fromkeys(found, "same")
    assert len(found) == 39


@pytest.mark.slow
def test_client_generated_from_openapi(every_type: Server, digits_api: ModuleType, repository: Path) -> None:
    """It classifies a picture, decoded by the document's own preprocessing, and encoded."""
    models, api, types = (importlib.import_module(f"digits_api.{name}") for name in ("models", "api.default", "types"))
    infer, infer_image, model_metadata, image_model_ready = (
        importlib.import_module(f"{api.__name__}.{name}")
        for name in ("infer", "infer_image", "model_metadata", "image_model_ready")
    )
    picture = repository / "docs" / "digits" / "seven.png"
    with digits_api.Client(every_type.url) as client:
        assert model_metadata.sync(client=client).inputs[0].shape == [-1, 1, 32, 32]
        assert image_model_ready.sync_detailed(client=client).status_code == 200

        with Image.open(picture) as image:
            gray = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.BILINEAR), np.float32)
        pixels = ((gray / 255 - 0.5) / 0.5).ravel().tolist()
        request = models.InferRequest([models.Input0("INPUT_0", "FP32", [1, 1, 32, 32], pixels)], id="mine")
        answer = infer.sync(client=client, body=request)
        assert (answer.id, answer.outputs[0].shape) == ("mine", [1, 10])
        assert np.argmax(answer.outputs[0].data) == 7
        best = models.RequestedOutputParameters(classification=1)
        request.outputs = [models.RequestedOutput(models.RequestedOutputName.OUTPUT_0, best)]
        (found,) = infer.sync(client=client, body=request).outputs
        assert found.data[0].endswith(":7:seven")

        encoded = infer_image.sync_detailed(client=client, body=types.File(io.BytesIO(picture.read_bytes())))
        scores = encoded.content[int(encoded.headers["Inference-Header-Content-Length"]) :]
        np.testing.assert_allclose(np.frombuffer(scores, np.float32), answer.outputs[0].data, rtol=1e-5)
        refused = infer_image.sync(client=client, body=types.File(io.BytesIO(b"no image")))
        assert "8 bytes is not an image" in refused.error
