"""Requests with encoded images, between a Triton and a tensor model that are made up."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

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
from graphkiln_backend.triton.executor import Cancelled, Outputs, Result
from graphkiln_backend.triton.image_model import ImageExecutor

SPEC = Preprocess(color="L", dtype=DType.UINT8)


def gray(value: int, size: tuple[int, int] = (4, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, value).save(file, "PNG")
    return file.getvalue()


def request(*images: bytes, outputs: Sequence[str] = ("y",), parameters: str = "") -> InferenceRequest:
    elements = np.array(images, dtype=object).reshape(-1, 1)
    return InferenceRequest({"IMAGE": elements}, outputs, parameters=parameters)


class FakeModel:
    """Returns the brightest pixel of each sample, and refuses batches with one of 13."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], tuple[str, ...]]] = []

    def __call__(self, samples: AnyArray, outputs: tuple[str, ...]) -> Outputs:
        self.asked.append((samples.shape, outputs))
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


def test_requests_are_computed_as_one_batch(decoder: Decoder, model: FakeModel) -> None:
    results = executor(decoder, model).execute_batch([request(gray(1)), request(gray(2), gray(3)), request(gray(4))])
    assert values(results) == [[1], [2, 3], [4]]
    assert model.asked == [((4, 1, 4, 4), ("y",))]


def test_a_bad_image_fails_its_own_request(decoder: Decoder, model: FakeModel) -> None:
    results = executor(decoder, model).execute_batch([request(gray(1)), request(gray(2), b""), request(gray(4))])
    assert values(results) == [[1], InvalidInput, [4]]
    assert "image 1: 0 bytes is not an image" in str(results[1])


def test_each_request_gets_the_outputs_that_it_asks_for(decoder: Decoder, model: FakeModel) -> None:
    requests = [request(gray(1), outputs=["z"]), request(gray(2), outputs=["z", "y"])]
    first, second = executor(decoder, model).execute_batch(requests)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert [*first] == ["z"]
    assert [*second] == ["y", "z"]
    assert (first["z"][0], second["z"][0]) == (-1, -2)


def test_samples_of_several_shapes_are_computed_apart(decoder: Decoder, model: FakeModel) -> None:
    requests = [request(gray(1)), request(gray(2, (5, 4))), request(gray(3))]
    assert values(executor(decoder, model).execute_batch(requests)) == [[1], [2], [3]]
    assert [shape for shape, _ in model.asked] == [(2, 1, 4, 4), (1, 1, 4, 5)]


def test_a_batch_that_fails_is_computed_one_by_one(decoder: Decoder, model: FakeModel) -> None:
    results = executor(decoder, model).execute_batch([request(gray(1)), request(gray(13)), request(gray(3))])
    assert values(results) == [[1], ModelNotReady, [3]]


def test_requests_for_another_contract_are_refused(decoder: Decoder, model: FakeModel) -> None:
    digest = Contract(labels=("a",), output="y").digest
    requests = [request(gray(1), parameters=f'{{"contract": "{name}"}}') for name in (digest, "another")]
    assert values(executor(decoder, model, contract=digest).execute_batch(requests)) == [[1], ContractChanged]


def test_a_model_without_batches_is_asked_once_for_each_request(decoder: Decoder, model: FakeModel) -> None:
    results = executor(decoder, model, batching=False).execute_batch([request(gray(1)), request(gray(2))])
    assert values(results) == [[1], [2]]
    assert len(model.asked) == 2


def test_a_model_of_one_image_gets_it_without_a_batch(decoder: Decoder) -> None:
    shapes = []

    def ask(sample: AnyArray, _outputs: tuple[str, ...]) -> Outputs:
        shapes.append(sample.shape)
        return {"y": sample.max(keepdims=True)}

    single = ImageExecutor(decoder, ask, outputs=["y"], batching=False, stacked=False)
    good, bad = single.execute_batch([request(gray(1)), request(gray(1), gray(2))])
    assert isinstance(good, dict)
    assert shapes == [(1, 4, 4)]
    assert isinstance(bad, InvalidInput)


def test_a_request_without_images_says_so(decoder: Decoder, model: FakeModel) -> None:
    (result,) = executor(decoder, model).execute_batch([InferenceRequest({"x": np.zeros(1)})])
    assert "no input 'IMAGE'" in str(result)


def test_what_nobody_foresaw_is_every_requests_error(model: FakeModel, decoder: Decoder, logged: list[str]) -> None:
    decoder.close()  # its threads take no more, and of two images one is theirs
    results = executor(decoder, model).execute_batch([request(gray(1)), request(gray(2))])
    assert [type(result) for result in results] == [ExecutionError] * 2
    assert "failed unexpectedly" in "\n".join(logged)


def test_what_waits_together_is_computed_at_the_same_time_in_as_many_parts_as_there_are_instances(
    decoder: Decoder, model: FakeModel
) -> None:
    """Each part waits for the other one to be asked for, too."""
    together = threading.Barrier(2)

    def ask(samples: AnyArray, outputs: tuple[str, ...]) -> Outputs:
        together.wait(timeout=30)
        return model(samples, outputs)

    with ThreadPoolExecutor(2) as pool:
        spread = ImageExecutor(decoder, ask, outputs=("y", "z"), batching=True, asking=pool, parts=2)
        results = spread.execute_batch([request(gray(each)) for each in (1, 2, 3, 4, 5)])
        assert values(results) == [[1], [2], [3], [4], [5]]
        assert sorted(shape[0] for shape, _ in model.asked) == [2, 3]
        together.reset()
        unequal = [request(gray(1), gray(2), gray(3), gray(4)), request(gray(5)), request(gray(6), outputs=["z"])]
        first, second, third = spread.execute_batch(unequal)
        assert values([first, second]) == [[1, 2, 3, 4], [5]]
        assert isinstance(third, dict)
        assert [*third] == ["z"]


def test_of_one_request_there_is_one_part(decoder: Decoder, model: FakeModel) -> None:
    with ThreadPoolExecutor(1) as pool:
        spread = ImageExecutor(decoder, model, outputs=("y",), batching=True, asking=pool, parts=4)
        assert values(spread.execute_batch([request(gray(1), gray(2))])) == [[1, 2]]
    assert len(model.asked) == 1


def test_an_error_in_one_part_is_that_requests_own(decoder: Decoder, model: FakeModel) -> None:
    with ThreadPoolExecutor(2) as pool:
        spread = ImageExecutor(decoder, model, outputs=("y",), batching=True, asking=pool, parts=2)
        results = spread.execute_batch([request(gray(each)) for each in (1, 13, 3, 4)])
    assert values(results) == [[1], ModelNotReady, [3], [4]]


def cancelled(image: bytes) -> InferenceRequest:
    return InferenceRequest({"IMAGE": np.array([[image]], dtype=object)}, cancelled=True)


def test_what_was_cancelled_while_it_was_decoded_is_not_computed(
    decoder: Decoder, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CANCELLATION_CHECK_S", -1.0)
    results = executor(decoder, model).execute_batch([request(gray(1)), cancelled(gray(2)), request(gray(3))])
    assert values(results) == [[1], Cancelled, [3]]
    assert [shape for shape, _ in model.asked] == [(2, 1, 4, 4)]
    assert values(executor(decoder, model).execute_batch([cancelled(gray(1))])) == [Cancelled]
    assert len(model.asked) == 1


def test_a_damaged_image_is_damaged_though_its_request_was_cancelled(
    decoder: Decoder, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CANCELLATION_CHECK_S", -1.0)
    assert values(executor(decoder, model).execute_batch([cancelled(b"")])) == [InvalidInput]


def test_where_decoding_is_quick_nobody_asks_whether_a_request_was_cancelled(
    decoder: Decoder, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a message to Triton and back."""
    monkeypatch.setattr(module, "CANCELLATION_CHECK_S", 3600.0)
    one = cancelled(gray(1))
    assert values(executor(decoder, model).execute_batch([one])) == [[1]]
    assert one.cancellation_checks == 0
