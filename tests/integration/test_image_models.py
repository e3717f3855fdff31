"""Encoded images as input of a served model, over every transport: the same bits as with the tensor."""

from __future__ import annotations

import base64
import gzip
import http.client
import io
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from PIL import Image
from running import Server, Serving, settled
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.system.admin_key import HTTP_HEADER, find_key
from graphkiln_client import Client, Model

pytestmark = pytest.mark.server

ACCEPTS = 'parameters { key: "accept_images" value { string_value: "true" } }\n'
# Two instances, which share images that are decoded together.
INSTANCES = "instance_group { count: 2 kind: KIND_CPU }\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Iterator[Server]:
    """Server of the example model on two cores, which accepts images."""
    folder = tmp_path_factory.mktemp("encoded")
    shutil.copytree(digits, folder / "store" / "digits")
    with (folder / "store" / "digits" / "config.pbtxt").open("a") as config:
        config.write(ACCEPTS + INSTANCES)
    with Serving(folder, "--model-store", folder / "store") as running:
        running.wait_ready()
        yield running


@pytest.fixture
def images(repository: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((repository / "docs" / "digits").glob("*.png"))]


@pytest.fixture
def expected(server: Server, images: list[bytes]) -> list[bytes]:
    """Scores of each image from the tensor prepared by the client."""
    with Client(server.url) as client:
        model = client.model("digits")
        spec = model.preprocess
        return [
            model.infer({"INPUT_0": load_sample(image, spec)[np.newaxis]})["OUTPUT_0"].tobytes() for image in images
        ]


def elements(*images: bytes) -> np.ndarray:
    return np.array(images, dtype=object).reshape(-1, 1)


def scores(model: Model, *images: bytes) -> np.ndarray:
    return model.infer({"IMAGE": elements(*images)})["OUTPUT_0"]


def post(server: Server, content: bytes) -> bytes:
    """Post a body with one header, as `curl --data-binary @FILE`; return the scores behind the JSON."""
    headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
    request = Request(f"{server.url}/v2/models/digits.images/infer", content, headers)
    with urlopen(request, timeout=30) as response:
        return response.read()[int(response.headers["Inference-Header-Content-Length"]) :]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient_gets_the_same_scores(
    server: Server, images: list[bytes], expected: list[bytes], protocol: str
) -> None:
    module, port = (
        (tritonclient.http, server.http_port) if protocol == "http" else (tritonclient.grpc, server.grpc_port)
    )
    client = module.InferenceServerClient(f"127.0.0.1:{port}")
    for image, right in zip(images, expected, strict=True):
        tensor = module.InferInput("IMAGE", [1, 1], "BYTES")
        tensor.set_data_from_numpy(elements(image))
        assert client.infer("digits.images", [tensor]).as_numpy("OUTPUT_0").tobytes() == right
    client.close()


def test_request_body_is_an_image(server: Server, images: list[bytes], expected: list[bytes]) -> None:
    assert [post(server, image) for image in images] == expected
    with pytest.raises(HTTPError) as refused:
        post(server, b"hello")
    assert refused.value.code == 400
    assert b"image 0: 5 bytes is not an image" in refused.value.read()


def test_images_in_shared_memory(server: Server, images: list[bytes], expected: list[bytes]) -> None:
    encoded = serialize_byte_tensor(elements(images[0])).item()
    name = f"/graphkiln-test-{server.http_port}"
    region = shared_memory.create_shared_memory_region("encoded", name, len(encoded))
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    admin = {HTTP_HEADER: find_key("127.0.0.1", server.http_port)}
    try:
        shared_memory.set_shared_memory_region(region, [np.frombuffer(encoded, np.uint8)])
        client.register_system_shared_memory("encoded", name, len(encoded), headers=admin)
        tensor = tritonclient.http.InferInput("IMAGE", [1, 1], "BYTES")
        tensor.set_shared_memory("encoded", len(encoded))
        assert client.infer("digits.images", [tensor]).as_numpy("OUTPUT_0").tobytes() == expected[0]
        client.unregister_system_shared_memory("encoded", headers=admin)
    finally:
        shared_memory.destroy_shared_memory_region(region)
        client.close()


def test_damaged_images_among_good_ones_fail_alone(server: Server, images: list[bytes], expected: list[bytes]) -> None:
    """Concurrent requests, which are decoded and computed together."""
    with Client(server.url) as client:
        model = client.model("digits.images")

        def ask(number: int) -> bool | str:
            image, right = images[number % len(images)], expected[number % len(images)]
            if number % 5 == 4:
                with pytest.raises(InvalidInput, match=r"image 1: .*cannot be decoded") as refused:
                    scores(model, image, image[:-40])
                return str(refused.value)[:0]
            np.testing.assert_allclose(scores(model, image)[0], np.frombuffer(right, np.float32), rtol=1e-5, atol=1e-6)
            return True

        with ThreadPoolExecutor(8) as callers:
            answers = list(callers.map(ask, range(60)))
    assert (answers.count(True), answers.count("")) == (48, 12)


def test_a_request_of_several_images_keeps_their_order(
    server: Server, images: list[bytes], expected: list[bytes]
) -> None:
    with Client(server.grpc_url) as client:
        got = scores(client.model("digits.images"), *images)
    np.testing.assert_allclose(got, [np.frombuffer(right, np.float32) for right in expected], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("url", ["url", "grpc_url"])
def test_classify_of_encoded_images_has_the_same_results(
    server: Server, repository: Path, url: str, tmp_path: Path
) -> None:
    paths = sorted((repository / "docs" / "digits").glob("*.png"))
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"hello")
    with Client(getattr(server, url)) as client:
        before = settled(client.model("digits.images"))["inference_count"]
        by_form = {
            form: [client.model("digits", images=form).classify(path, top_k=10) for path in paths]
            for form in ("encoded", "tensor", "auto")
        }
        sent = settled(client.model("digits.images"))["inference_count"] - before
        assert sent == 2 * len(paths)  # these images are smaller than their tensors
        told = [[(result.model, result.source, result.outputs) for result in each] for each in by_form.values()]
        assert told[0] == told[1] == told[2]
        for form in ("encoded", "auto"):
            many = list(client.model("digits", images=form).classify_many([*paths, bad], on_error="return"))
            assert [isinstance(each, InvalidInput) for each in many] == [False] * len(paths) + [True]
        for form in ("encoded", "tensor", "auto"):
            with pytest.raises(InvalidInput, match="on behalf of 'digits'"):
                client.model("digits.images", images=form).classify(paths[0])


def test_wrong_shared_memory_regions(server: Server, images: list[bytes], expected: list[bytes]) -> None:
    """Offsets and several images work; anything wrong is the error of its request."""
    one, two = (serialize_byte_tensor(elements(*images[:count])).item() for count in (1, 2))
    name, size = f"/graphkiln-odd-{server.http_port}", 1 << 16
    region = shared_memory.create_shared_memory_region("odd", name, size)
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    admin = {HTTP_HEADER: find_key("127.0.0.1", server.http_port)}

    def ask(content: bytes, count: int, byte_size: int, offset: int = 0) -> bytes:
        shared_memory.set_shared_memory_region(region, [np.frombuffer(content, np.uint8)], offset)
        tensor = tritonclient.http.InferInput("IMAGE", [count, 1], "BYTES")
        tensor.set_shared_memory("odd", byte_size, offset)
        scores: bytes = client.infer("digits.images", [tensor]).as_numpy("OUTPUT_0").tobytes()
        return scores

    try:
        client.register_system_shared_memory("odd", name, size, headers=admin)
        assert ask(one, 1, len(one), 1000) == expected[0]
        assert len(ask(two, 2, len(two))) == 2 * len(expected[0])
        for content, count, byte_size, words in (
            (one + bytes(100), 1, len(one) + 100, "unexpected number of string elements"),
            (two, 1, len(two), "unexpected number of string elements 2"),
            (one, 1, len(one) - 10, "incomplete string data"),
            (one, 1, 3, "incomplete string length"),
            (one, 1, 0, "Invalid offset"),
            (one, 1, size + 1, "Invalid offset"),
            (one, 2, len(one), "expected 2 string elements"),
            (bytes(4), 1, 4, "image 0: 0 bytes is not an image"),
            (b"\xff" * 4 + images[0], 1, len(images[0]) + 4, "incomplete string data"),
            (images[0], 1, len(images[0]), "incomplete string data"),
        ):
            with pytest.raises(InferenceServerException, match=words):
                ask(content, count, byte_size)
        client.unregister_system_shared_memory("odd", headers=admin)
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
            ask(one, 1, len(one))
        client.register_system_shared_memory("odd", name, size, headers=admin)
        assert ask(one, 1, len(one)) == expected[0]
        client.unregister_system_shared_memory("odd", headers=admin)
    finally:
        shared_memory.destroy_shared_memory_region(region)
        client.close()


def test_various_bodies(server: Server, images: list[bytes], expected: list[bytes]) -> None:
    """Any content type, chunks, compression; base64 and a header that contradicts the body are errors with a reason."""

    def ask(body: Any, headers: dict[str, str], *, chunked: bool = False) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        with closing(connection):
            connection.request("POST", "/v2/models/digits.images/infer", body, headers, encode_chunked=chunked)
            response = connection.getresponse()
            return response.status, response.read()

    image, length = images[0], "Inference-Header-Content-Length"
    in_pieces = (image[:20], image[20:])
    for status, content in (
        ask(image, {length: "0", "Content-Type": "image/png"}),
        ask(image, {length: "0", "Content-Type": "application/json"}),
        ask(iter(in_pieces), {length: "0", "Transfer-Encoding": "chunked"}, chunked=True),
        ask(gzip.compress(image), {length: "0", "Content-Encoding": "gzip"}),
    ):
        assert status == 200
        assert content.endswith(expected[0])
    tensor = {"name": "IMAGE", "shape": [1, 1], "datatype": "BYTES", "data": [base64.b64encode(image).decode()]}
    for status, content, words in (
        (*ask(image, {length: str(len(image) + 1)}), b"inference header size should be in range"),
        (*ask(b"", {length: "0"}), b"image 0: 0 bytes is not an image in a known format: it is empty"),
        (*ask(gzip.compress(image), {length: "0"}), b"it is compressed by gzip"),
        (*ask(json.dumps({"inputs": [tensor]}), {}), b"it is base64 text (decode it first"),
    ):
        assert (status, words in content) == (400, True), content
    assert b"failed to parse the request JSON buffer" in ask(image, {})[1]
    assert post(server, image) == expected[0]


@pytest.mark.slow
def test_request_cancelled_while_decoding_is_not_computed(server: Server) -> None:
    """Eight images of 64 megapixels take seconds to decode; the client hangs up at once."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((8000, 8000)).save(file, "JPEG")
    with Client(server.url) as client:
        model = client.model("digits")
        before = settled(model)["inference_count"]
        words = 'model="digits.images"', 'code="CANCELLED"'
        counted = {name: value for name, value in server.metrics().items() if all(word in name for word in words)}
        assert counted
        errors: list[Exception] = []
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as stock:
            tensor = tritonclient.grpc.InferInput("IMAGE", [8, 1], "BYTES")
            tensor.set_data_from_numpy(elements(*[file.getvalue()] * 8))
            computed = server.computed_s()
            call = stock.async_infer("digits.images", [tensor], lambda result, error: errors.append(error or result))
            server.wait_computing(computed)
            call.cancel()
            server.wait_until(lambda: bool(errors))
        server.wait_until(lambda: sum(server.metrics()[name] for name in counted) == sum(counted.values()) + 1)
        assert settled(model)["inference_count"] == before
