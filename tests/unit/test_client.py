"""Pictures, results and the wire format, without a server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf.internal import encoder
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tritonclient.grpc import service_pb2

from graphkiln.client import Client
from graphkiln.client.image import load_sample
from graphkiln.client.results import Classification, Result
from graphkiln.client.transports import grpc as grpc_transport
from graphkiln.client.transports import http
from graphkiln.client.transports.base import InferRequest, from_bytes, raw_buffer
from graphkiln.graph.dtypes import DType
from graphkiln.graph.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    Overloaded,
    ProtocolError,
    ServerError,
)
from graphkiln.graph.preprocess import Preprocess

RAW = Preprocess(dtype=DType.UINT8, layout="HWC")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


class TestImage:
    def test_resizes_and_crops_as_pillow_does(self) -> None:
        image = Image.effect_noise((90, 60), 80).convert("RGB")
        sample = load_sample(image, Preprocess(resize=30, crop=(24, 24), dtype=DType.UINT8, layout="HWC"))
        expected = image.resize((45, 30), Image.Resampling.BILINEAR).crop((10, 3, 34, 27))
        np.testing.assert_array_equal(sample, np.asarray(expected))

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"])
    @pytest.mark.parametrize("color", ["RGB", "L"])
    def test_takes_every_mode(self, mode: str, color: Any) -> None:
        image = Image.new(mode, (4, 5))
        sample = load_sample(image, Preprocess(color=color, dtype=DType.UINT8, layout="HWC"))
        assert sample.shape == (5, 4, 1 if color == "L" else 3)

    def test_sixteen_bits_are_scaled_not_clipped(self) -> None:
        image = Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16))
        np.testing.assert_array_equal(load_sample(image, RAW)[0, :, 0], [0, 1, 128, 255])

    def test_exif_turns_the_picture_upright(self) -> None:
        image = Image.new("RGB", (2, 1))
        image.putpixel((0, 0), (255, 0, 0))
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was turned: rotate clockwise to see it upright
        sample = load_sample(encoded(image, exif=exif), RAW)
        np.testing.assert_array_equal(sample[:, 0, 0], [255, 0])

    def test_bgr_is_rgb_backwards(self) -> None:
        image = Image.new("RGB", (1, 1), (1, 2, 3))
        sample = load_sample(image, Preprocess(color="BGR", dtype=DType.UINT8, layout="HWC"))
        np.testing.assert_array_equal(sample.ravel(), [3, 2, 1])

    @pytest.mark.parametrize(
        ("picture", "words"),
        [
            (b"", "not an image"),
            (b"GIF89a but not really", "cannot be decoded|not an image"),
            (encoded(Image.effect_noise((50, 50), 80))[:300], "cannot be decoded"),
            ("nowhere.jpg", r"no file nowhere\.jpg"),
            (Path(__file__).parent, "cannot be decoded"),
            (np.zeros((3, 4, 5), np.uint8), "expected uint8 pixels"),
            (np.zeros((3, 4, 3), np.float32), "expected uint8 pixels"),
            (np.zeros((0, 4, 3), np.uint8), "expected uint8 pixels"),
        ],
    )
    def test_what_is_no_picture(self, picture: Any, words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            load_sample(picture, RAW)

    def test_a_decompression_bomb_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        with pytest.raises(InvalidInput, match="too large"):
            load_sample(encoded(Image.new("L", (300, 300))), RAW)


class TestResults:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0.5:3:cat", Classification(index=3, label="cat", score=0.5)),
            ("3.630257:499", Classification(index=499, label="", score=3.630257)),
            ("-1e-05:0:a:b", Classification(index=0, label="a:b", score=-1e-5)),
        ],
    )
    def test_parses_tritons_form(self, text: str, expected: Classification) -> None:
        assert Classification.parse(text) == expected

    @given(st.text(max_size=30))
    def test_never_fails_but_by_a_protocol_error(self, text: str) -> None:
        with contextlib.suppress(ProtocolError):
            Classification.parse(text)

    def test_json_has_no_nan(self) -> None:
        answer = Classification(index=0, label="", score=float("nan"))
        result = Result(source="s", model="m", version="1", request_id="", latency_ms=1.0, classifications=(answer,))
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["classifications"][0]["score"] is None


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.array([[True, False]]),
    np.array([b"a", b"", b"\xff\x00"], np.object_),
    np.array([["x", "\u00e4"]], np.object_),
    np.zeros((0, 3), np.int64),
    np.array(7, np.uint8).reshape(()),
    np.arange(4, dtype=np.float16)[::2],
]


class TestWireFormat:
    @pytest.mark.parametrize("array", ARRAYS)
    def test_the_bytes_are_those_of_tritonclient(self, array: np.ndarray) -> None:
        request = InferRequest(model="m", version="", inputs={"X": array}, outputs={"Y": 3}, request_id="7")
        body, header_length = http.encode_request(request)
        datatype = DType.from_numpy(array.dtype).value
        tensor = triton_http.InferInput("X", list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        wanted = triton_http.InferRequestedOutput("Y", binary_data=True, class_count=3)
        theirs, their_length = triton_http.InferenceServerClient.generate_request_body(
            [tensor], outputs=[wanted], request_id="7"
        )
        assert json.loads(body[:header_length]) == json.loads(theirs[: their_length or len(theirs)])
        assert body[header_length:] == theirs[their_length or len(theirs) :]

    @pytest.mark.parametrize("array", ARRAYS)
    def test_the_grpc_message_is_that_of_tritonclient(self, array: np.ndarray) -> None:
        request = InferRequest(model="m", version="2", inputs={"X": array}, outputs={"Y": 3}, request_id="7")
        datatype = DType.from_numpy(array.dtype).value
        tensor = triton_grpc.InferInput("X", list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        theirs = service_pb2.ModelInferRequest(model_name="m", model_version="2", id="7")
        theirs.inputs.add(name="X", datatype=datatype, shape=array.shape)
        theirs.raw_input_contents.append(tensor._get_content() or b"")
        theirs.outputs.add(name="Y").parameters["classification"].int64_param = 3
        assert service_pb2.ModelInferRequest.FromString(grpc_transport.encode_request(request)) == theirs

    @given(number=st.integers(0, 2**40))
    def test_a_length_is_written_as_protocol_buffers_do(self, number: int) -> None:
        assert grpc_transport._varint(number) == encoder._VarintBytes(number)

    @pytest.mark.parametrize("array", ARRAYS)
    def test_there_and_back(self, array: np.ndarray) -> None:
        back = from_bytes(bytes(raw_buffer(array)), DType.from_numpy(array.dtype).value, array.shape)
        expected = np.array([w.encode() if isinstance(w, str) else w for w in array.ravel()], array.dtype)
        np.testing.assert_array_equal(back.ravel(), expected)
        assert back.shape == array.shape

    @given(
        raw=st.binary(max_size=40), shape=st.lists(st.integers(-2, 5), max_size=3), name=st.sampled_from(list(DType))
    )
    def test_garbage_is_a_protocol_error(self, raw: bytes, shape: list[int], name: DType) -> None:
        with contextlib.suppress(ProtocolError):
            assert from_bytes(raw, name.value, tuple(shape)).ndim == len(shape)

    @given(body=st.binary(max_size=80), length=st.none() | st.integers(0, 100))
    def test_a_garbage_response_is_a_protocol_error(self, body: bytes, length: int | None) -> None:
        with pytest.raises(ProtocolError):
            http.decode_response(body, length)


class TestHttpErrors:
    @pytest.mark.parametrize(
        ("status", "kind"),
        [(400, InvalidInput), (404, ModelNotFound), (429, Overloaded), (500, ServerError), (504, DeadlineExceeded)],
    )
    def test_status_to_error(self, status: int, kind: type[Exception]) -> None:
        with self.client(lambda _: httpx.Response(status, json={"error": "because"})) as client:
            with pytest.raises(kind, match="because") as caught:
                client.model("m").infer({"X": np.zeros(1, np.float32)})
            assert caught.value.status == status  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("raised", "kind"),
        [
            (httpx.ConnectError("refused"), ConnectionFailed),
            (httpx.ReadTimeout("slow"), DeadlineExceeded),
            (httpx.RemoteProtocolError("cut"), ConnectionFailed),
        ],
    )
    def test_transport_errors_are_translated(self, raised: Exception, kind: type[Exception]) -> None:
        def fail(_: httpx.Request) -> httpx.Response:
            raise raised

        with self.client(fail) as client, pytest.raises(kind):
            client.ready()

    def test_a_broken_spec_is_the_servers_fault(self) -> None:
        config = {"parameters": {"preprocess": {"string_value": '{"resize": "big"}'}}}
        with self.client(lambda _: httpx.Response(200, json=config)) as client:
            model = client.model("m")
            with pytest.raises(ProtocolError, match="broken preprocess spec"):
                _ = model.preprocess

    def test_a_model_without_a_spec_says_what_to_do(self) -> None:
        with self.client(lambda _: httpx.Response(200, json={})) as client:
            model = client.model("m")
            with pytest.raises(InvalidInput, match="does not say how pictures"):
                _ = model.preprocess

    def client(self, handler: Any) -> Client:
        client = Client("http://test")
        transport = client._transport
        assert isinstance(transport, http.HttpTransport)
        transport._client.close()
        transport._client = httpx.Client(base_url="http://test", transport=httpx.MockTransport(handler))
        return client


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match="use http://HOST:PORT or grpc://HOST:PORT"):
        Client("ftp://somewhere")


def test_the_command_line_imports_nothing_heavy() -> None:
    program = "import sys; import graphkiln.cli.main; print(' '.join(sys.modules))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    heavy = {"numpy", "onnxruntime", "torch", "tritonclient", "httpx", "grpc", "PIL", "rich"}
    assert not heavy & set(shown.stdout.split())
