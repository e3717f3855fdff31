"""Unusual images on a real server: decoded by server or client, every task gives the same bits."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import tritonclient.grpc
from light_boxes import SPEC, write_store
from odd_images import damaged_files, drawn, odd_files, saved
from PIL import Image, ImageOps
from running import Server, Serving

from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_backend.images.decoding import load_sample, open_image
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

MODELS = {"detector": "detect", "segmenter": "segment", "embedder": "embed"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server of a detector, a segmenter and an embedding, which accept images."""
    folder = tmp_path_factory.mktemp("odd")
    store = write_store(folder)
    for model in MODELS:
        with (store / model / "config.pbtxt").open("a") as config:
            config.write(ACCEPT_IMAGES_LINE)
    with Serving(folder, "--model-store", store) as running:
        running.wait_ready()
        yield running


def comparable(answer: Any) -> Any:
    """Convert results to values that `==` compares to the last bit."""
    if isinstance(answer, np.ndarray):
        return answer.tobytes()
    if isinstance(answer, ClientError):
        return type(answer)
    if isinstance(answer, tuple):
        return [(each.to_dict(), each.box, each.score) for each in answer]
    return answer.classes.shape, answer.classes.tobytes()


def answers(client: Client, model: str, form: Any, files: list[bytes]) -> list[Any]:
    """Ask for one image after the other: in a batch the last bits may differ."""
    ask = getattr(client.model(model, images=form), f"{MODELS[model]}_many")
    return [comparable(answer) for file in files for answer in ask([file], on_error="return")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("url", ["url", "grpc_url"])
def test_every_transport_gives_the_same(server: Server, model: str, url: str) -> None:
    files = odd_files()
    with Client(getattr(server, url)) as client:
        told = {form: answers(client, model, form, [*files.values()]) for form in ("encoded", "tensor", "auto")}
    for place, name in enumerate(files):
        assert told["encoded"][place] == told["tensor"][place], name
        assert told["auto"][place] == told["tensor"][place], name
        assert not isinstance(told["tensor"][place], type), f"{name} was refused"


def test_answers_are_in_pixels_of_the_upright_image(server: Server) -> None:
    """Its size from Pillow, its light box from numpy."""
    files = odd_files()
    with Client(server.url) as client:
        for name, content in files.items():
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
            for form in ("encoded", "tensor"):
                areas = client.model("segmenter", images=form).segment(content)
                assert areas.classes.shape == (upright.height, upright.width), name
                for found in client.model("detector", images=form).detect(content):
                    assert 0 <= found.box.x1 < found.box.x2 <= upright.width, name
                    assert 0 <= found.box.y1 < found.box.y2 <= upright.height, name
        for number in range(1, 9):
            pixels = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(files[f"EXIF {number} JPEG"]))))
            rows, columns = np.nonzero(pixels.mean(2) > 0.4 * 255)
            (found,) = client.model("detector", images="encoded").detect(files[f"EXIF {number} JPEG"])
            expected = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            box = found.box.x1, found.box.y1, found.box.x2, found.box.y2
            np.testing.assert_allclose(box, expected, atol=2.5, err_msg=str(number))  # a cell of the input is 1.9


@pytest.mark.parametrize("model", MODELS)
def test_damaged_images_fail_alone_over_every_transport(server: Server, model: str) -> None:
    good, bad = saved(drawn(), "PNG"), damaged_files()
    mixed = [part for content in bad.values() for part in (good, content)]
    with Client(server.url) as client:
        for form in ("encoded", "tensor", "auto"):
            ask = getattr(client.model(model, images=form), f"{MODELS[model]}_many")
            found = [*ask(mixed, on_error="return")]
            refused = dict(zip(bad, found[1::2], strict=True))
            assert {name: type(each) for name, each in refused.items()} == dict.fromkeys(bad, InvalidInput), form
            assert not any(isinstance(each, ClientError) for each in found[::2]), form


@pytest.mark.parametrize("model", MODELS)
def test_three_hundred_images_in_one_call(server: Server, model: str) -> None:
    """Many sizes, some without a light pixel: in order, and equal to single requests but for rounding."""
    images = [drawn(20 + number % 37, 16 + number % 23) for number in range(290)]
    images += [Image.new("RGB", (20 + number, 30)) for number in range(10)]
    files = [saved(image, "PNG") for image in images]
    with Client(server.url) as client:
        by_form = {
            form: [*getattr(client.model(model, images=form), f"{MODELS[model]}_many")(files)]
            for form in ("encoded", "tensor")
        }
        assert [*map(comparable, by_form["encoded"])] == answers(client, model, "tensor", files)
    assert [*map(comparable, by_form["encoded"])] == [*map(comparable, by_form["tensor"])]
    if model == "detector":
        assert [len(each) for each in by_form["encoded"]] == [1] * 290 + [0] * 10


def raw_vector(server: Server, content: bytes) -> bytes:
    """Post an image as the body, as `curl --data-binary @FILE`; return the output behind the JSON."""
    headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
    request = Request(f"{server.url}/v2/models/embedder.images/infer", content, headers)
    with urlopen(request, timeout=30) as response:
        told, body = int(response.headers["Inference-Header-Content-Length"]), response.read()
    start = told
    for output in json.loads(body[:told])["outputs"]:
        end = start + output["parameters"]["binary_data_size"]
        if output["name"] == "vector":
            return body[start:end]
        start = end
    raise AssertionError(body[:told])


def test_raw_bodies_tritonclient_shared_memory_and_decoded_images_give_the_same_bits(server: Server) -> None:
    stock = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    with Client(server.url) as client, client.shared_memory() as shared:
        tensors = client.model("embedder", images="tensor")
        for name, content in odd_files().items():
            sample = load_sample(content, SPEC)[np.newaxis]
            expected = tensors.infer({tensors.metadata["inputs"][0]["name"]: sample})["vector"].tobytes()
            assert raw_vector(server, content) == expected, name
            tensor = tritonclient.grpc.InferInput("IMAGE", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[content]], dtype=object))
            assert stock.infer("embedder.images", [tensor]).as_numpy("vector").tobytes() == expected, name
            answer = tensors.embed(content).tobytes()
            for form in ("encoded", "tensor"):
                assert shared.model("embedder", images=form).embed(content).tobytes() == answer, name
            assert tensors.embed(open_image(content)).tobytes() == answer, name
    stock.close()
