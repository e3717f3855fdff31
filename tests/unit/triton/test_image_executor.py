"""Requests with encoded images, with a fake Triton and a fake tensor model."""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from fake_triton import InferenceRequest
from PIL import Image

from graphkiln_backend.graph.contract import Contract, ContractChanged
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, InvalidInput, ModelNotReady
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.encoded import Decoder
from graphkiln_backend.triton import image_model as module
from graphkiln_backend.triton.deadly_requests import DeadlyRequests
from graphkiln_backend.triton.executor import Cancelled, Outputs, Result
from graphkiln_backend.triton.image_model import ImageExecutor
from graphkiln_backend.triton.request_notes import DeadlyRequest, RequestNotes

SPEC = Preprocess(color="L", dtype=DType.UINT8)


def gray(value: int, size: tuple[int, int] = (4, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, value).save(file, "PNG")
    return file.getvalue()


def request(*images: bytes, outputs: Sequence[str] = ("y",), parameters: str = "") -> InferenceRequest:
    elements = np.array(images, dtype=object).reshape(-1, 1)
    return InferenceRequest({"IMAGE": elements}, outputs, parameters=parameters)


class FakeModel:
    """Return the brightest pixel of each sample; refuse batches that contain 13."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[str, ...]]] = []

    def __call__(self, samples: AnyArray, outputs: tuple[str, ...]) -> Outputs:
        self.calls.append((samples.shape, outputs))
        if (samples == 13).any():
            raise ModelNotReady("thirteen")
        brightest = samples.reshape(len(samples), -1).max(axis=1)
        return {name: brightest if name == "y" else -brightest.astype(np.int64) for name in outputs}


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with Decoder(SPEC, threads=2) as decoder:
        yield decoder


def executor(decoder: Decoder, model: FakeModel, *, contract: str = "", batching: bool = True) -> ImageExecutor:
    return ImageExecutor(decoder, model, outputs=("y", "z"), batching=batching, contract=contract)


def values(results: Sequence[Result], name: str = "y") -> list[object]:
    return [list(result[name]) if isinstance(result, dict) else type(result) for result in results]


def test_requests_share_a_batch(decoder: Decoder, model: FakeModel) -> None:
    results = executor(decoder, model).execute_batch([request(gray(1)), request(gray(2), gray(3)), request(gray(4))])
    assert values(results) == [[1], [2, 3], [4]]
    assert model.calls == [((4, 1, 4, 4), ("y",))]


def test_damaged_image_fails_its_own_request(decoder: Decoder, model: FakeModel) -> None:
    results = executor(decoder, model).execute_batch([request(gray(1)), request(gray(2), b""), request(gray(4))])
    assert values(results) == [[1], InvalidInput, [4]]
    assert "image 1: 0 bytes is not an image" in str(results[1])


def test_each_request_gets_its_requested_outputs(decoder: Decoder, model: FakeModel) -> None:
    requests = [request(gray(1), outputs=["z"]), request(gray(2), outputs=["z", "y"])]
    first, second = executor(decoder, model).execute_batch(requests)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert [*first] == ["z"]
    assert [*second] == ["y", "z"]
    assert (first["z"][0], second["z"][0]) == (-1, -2)


def test_samples_are_grouped_by_shape(decoder: Decoder, model: FakeModel) -> None:
    requests = [request(gray(1)), request(gray(2, (5, 4))), request(gray(3))]
    assert values(executor(decoder, model).execute_batch(requests)) == [[1], [2], [3]]
    assert [shape for shape, _ in model.calls] == [(2, 1, 4, 4), (1, 1, 4, 5)]


def test_failed_batch_is_computed_request_by_request(decoder: Decoder, model: FakeModel) -> None:
    results = executor(decoder, model).execute_batch([request(gray(1)), request(gray(13)), request(gray(3))])
    assert values(results) == [[1], ModelNotReady, [3]]


def test_request_for_another_contract_is_refused(decoder: Decoder, model: FakeModel) -> None:
    digest = Contract(labels=("a",), output="y").digest
    requests = [request(gray(1), parameters=f'{{"contract": "{name}"}}') for name in (digest, "another")]
    assert values(executor(decoder, model, contract=digest).execute_batch(requests)) == [[1], ContractChanged]


def test_model_without_batches_gets_single_requests(decoder: Decoder, model: FakeModel) -> None:
    results = executor(decoder, model, batching=False).execute_batch([request(gray(1)), request(gray(2))])
    assert values(results) == [[1], [2]]
    assert len(model.calls) == 2


def test_model_of_one_image_gets_no_batch_dimension(decoder: Decoder) -> None:
    shapes = []

    def infer(sample: AnyArray, _outputs: tuple[str, ...]) -> Outputs:
        shapes.append(sample.shape)
        return {"y": sample.max(keepdims=True)}

    single = ImageExecutor(decoder, infer, outputs=["y"], batching=False, stacked=False)
    good, bad = single.execute_batch([request(gray(1)), request(gray(1), gray(2))])
    assert isinstance(good, dict)
    assert shapes == [(1, 4, 4)]
    assert isinstance(bad, InvalidInput)


def test_request_without_images_is_refused(decoder: Decoder, model: FakeModel) -> None:
    (result,) = executor(decoder, model).execute_batch([InferenceRequest({"x": np.zeros(1)})])
    assert "no input 'IMAGE'" in str(result)


def test_unexpected_decoder_error_fails_all_requests(model: FakeModel, decoder: Decoder, logged: list[str]) -> None:
    decoder.close()  # makes decoding two images fail
    results = executor(decoder, model).execute_batch([request(gray(1)), request(gray(2))])
    assert [type(result) for result in results] == [ExecutionError] * 2
    assert "failed unexpectedly" in "\n".join(logged)


def test_batch_is_split_across_instances(decoder: Decoder, model: FakeModel) -> None:
    """Each part waits until the other one is computed, too."""
    together = threading.Barrier(2)

    def infer(samples: AnyArray, outputs: tuple[str, ...]) -> Outputs:
        together.wait(timeout=30)
        return model(samples, outputs)

    with ImageExecutor(decoder, infer, outputs=("y", "z"), batching=True, parts=2) as spread:
        results = spread.execute_batch([request(gray(each)) for each in (1, 2, 3, 4, 5)])
        assert values(results) == [[1], [2], [3], [4], [5]]
        assert sorted(shape[0] for shape, _ in model.calls) == [2, 3]
        together.reset()
        unequal = [request(gray(1), gray(2), gray(3), gray(4)), request(gray(5)), request(gray(6), outputs=["z"])]
        first, second, third = spread.execute_batch(unequal)
        assert values([first, second]) == [[1, 2, 3, 4], [5]]
        assert isinstance(third, dict)
        assert [*third] == ["z"]


def cancelled(image: bytes) -> InferenceRequest:
    return InferenceRequest({"IMAGE": np.array([[image]], dtype=object)}, cancelled=True)


def test_request_cancelled_during_decoding_is_not_computed(
    decoder: Decoder, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CANCELLATION_CHECK_S", -1.0)
    results = executor(decoder, model).execute_batch([request(gray(1)), cancelled(gray(2)), request(gray(3))])
    assert values(results) == [[1], Cancelled, [3]]
    assert [shape for shape, _ in model.calls] == [(2, 1, 4, 4)]
    assert values(executor(decoder, model).execute_batch([cancelled(gray(1))])) == [Cancelled]
    assert len(model.calls) == 1


def test_cancellation_is_not_checked_if_decoding_is_fast(
    decoder: Decoder, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is a round trip to Triton."""
    monkeypatch.setattr(module, "CANCELLATION_CHECK_S", 3600.0)
    one = cancelled(gray(1))
    assert values(executor(decoder, model).execute_batch([one])) == [[1]]
    assert one.cancellation_checks == 0


class Died(BaseException):
    """The process ends here."""


class TestDeadlyImages:
    """Images that ended their instance, or one of the tensor model, are computed alone, and refused the third time."""

    INSTANCE = "m.images_0_0"

    @pytest.fixture
    def restart(self, tmp_path: Path, decoder: Decoder, model: FakeModel) -> Callable[[str], ImageExecutor]:
        """Let the supervisor learn that an instance has ended, and start the next server."""
        known, runs = DeadlyRequests(), itertools.count()
        folder = tmp_path

        def restart(ended: str = f"{self.INSTANCE}.{os.getpid()}") -> ImageExecutor:
            nonlocal folder
            known.learn(folder, ended)
            folder = tmp_path / str(next(runs))
            folder.mkdir()
            known.publish(folder)
            images = executor(decoder, model)
            images.notes = RequestNotes(folder, self.INSTANCE, os.getpid(), "m.images 1")
            return images

        return restart

    def test_third_time(
        self, restart: Callable[..., ImageExecutor], model: FakeModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deadly = gray(2)

        decode_all = Decoder.decode

        def decode(self: Decoder, images: Sequence[Sequence[bytes]]) -> object:
            if [deadly] in images:
                raise Died
            return decode_all(self, images)

        monkeypatch.setattr(Decoder, "decode", decode)
        for batch in ([1, 2], [2]):
            with pytest.raises(Died):
                restart().execute_batch([request(gray(value)) for value in batch])
        images = restart()
        results = images.execute_batch([request(gray(value)) for value in (1, 2, 3, 4)])
        assert values(results) == [[1], DeadlyRequest, [3], [4]]
        assert [shape[0] for shape, _ in model.calls] == [2, 1], "suspects are alone"
        assert values(images.execute_batch([request(gray(1)), request(gray(3))])) == [[1], [3]]
        assert [shape[0] for shape, _ in model.calls] == [2, 1, 2], "it has survived the one"

    def test_instance_of_the_tensor_model(
        self, restart: Callable[..., ImageExecutor], model: FakeModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> Outputs:
            raise ExecutionError("Stub process 'm_0_0' is not healthy.")

        images = restart()
        with monkeypatch.context() as patched:
            patched.setattr(images, "_infer", fail)
            results = images.execute_batch([request(gray(1)), request(gray(2))])
        assert values(results) == [ExecutionError] * 2
        results = restart("m_0_0.1").execute_batch([request(gray(1)), request(gray(2)), request(gray(3))])
        assert values(results) == [[1], [2], [3]]
        assert [shape[0] for shape, _ in model.calls] == [1, 1, 1], "the two are sent alone"
