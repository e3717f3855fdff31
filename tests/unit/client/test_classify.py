"""Classification with a fake server that computes scores from pixels."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport

from graphkiln_backend.graph.contract import Contract, ContractChanged, Contracts
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import (
    ClientError,
    InvalidInput,
    ModelNotReady,
    ProtocolError,
    ServerError,
)
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Detection, Ranking
from graphkiln_client.async_client import AsyncModel, Many
from graphkiln_client.client import run
from graphkiln_client.connection import Connection
from graphkiln_client.published import ALL_CLASSES
from graphkiln_client.tasks import Classify, Result, rank_scores, read_ranking
from graphkiln_client.transports.base import InferRequest, InferResponse

PIXELS = Preprocess(dtype=DType.UINT8, layout="HWC")
LABELS = (b"ant", b"bee", b"cat")
RANKING = Ranking(scores="best", indices="classes", labels=("ant", "bee", "cat"))


def image(*values: int, size: tuple[int, int] = (1, 1)) -> Any:
    """Pixels `[height, width, 3]` with the values in the first pixel."""
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[0, 0, : len(values)] = values
    return pixels


class Pixels(FakeTransport):
    """A model with the first pixel's values as scores, and an output per position."""

    def __init__(
        self,
        shape: tuple[int, ...] = (-1, -1, -1, 3),
        *,
        labels: bool = True,
        ranked: bool = False,
        suspends: bool = False,
        **config: Any,
    ) -> None:
        self.shape = shape
        row = {"data_type": "TYPE_FP32", "label_filename": "labels.txt" if labels else ""}
        parameters = {"preprocess": {"string_value": PIXELS.to_json()}}
        if ranked:
            parameters["ranking"] = {"string_value": RANKING.to_json()}
        names = ("best", "classes") if ranked else ("scores", "map")
        sizes = {"scores": [3], "map": [2, 3], "best": [2], "classes": [2]}
        batch = [-1] if len(shape) == 4 else []
        types = {"classes": "INT64"}
        outputs = [{"name": n, "datatype": types.get(n, "FP32"), "shape": [*batch, *sizes[n]]} for n in names]
        super().__init__(
            {
                "model_metadata": {
                    "inputs": [{"name": "pixels", "datatype": "UINT8", "shape": list(shape)}],
                    "outputs": outputs,
                },
                "model_config": {
                    "max_batch_size": 8,
                    "output": [{"name": name, **row} for name in names],
                    "parameters": parameters,
                    **config,
                },
                "infer": self.infer,
            },
            suspends=suspends,
        )

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        del timeout_s
        pixels = np.asarray(request.inputs["pixels"])
        batch = pixels if pixels.ndim == 4 else pixels[np.newaxis]
        scores = batch[:, 0, 0, :].astype(np.float32)
        outputs: dict[str, Any] = {"scores": scores, "map": np.stack([scores, -scores], axis=1)}
        best = np.argsort(-scores, axis=-1, kind="stable")[:, :2]
        outputs |= {"best": np.take_along_axis(scores, best, axis=-1), "classes": best}
        if any(output.class_count for output in request.outputs.values()):
            texts = [b"%d:%d:%s" % (9 - index, index, label) for index, label in enumerate(LABELS)]
            outputs = dict.fromkeys(outputs, np.array([texts], object))
        if pixels.ndim == 3:
            outputs = {name: array[0] for name, array in outputs.items()}
        wanted = {name: outputs[name] for name in request.outputs}
        return InferResponse(model=request.model, version="7", outputs=wanted)

    def batches(self) -> list[int]:
        """Batch sizes of the requests, without those for labels."""
        plain = [r for r in self.inferred() if not any(output.class_count for output in r.outputs.values())]
        return [len(np.asarray(request.inputs["pixels"])) for request in plain]


def model(transport: FakeTransport, **options: Any) -> AsyncModel:
    return AsyncModel(Connection(transport, 10.0, 0), "m", "", **options)


def classify(transport: FakeTransport, *images: Any, **options: Any) -> list[Result | ClientError]:
    task = Classify(**{"top_k": 3, "softmax": False, "ranked": (), **options})
    return run(model(transport).answer(images, task))


def top(results: list[Result | ClientError]) -> list[str]:
    return [result.top.label for result in results if isinstance(result, Result)]


class TestResults:
    def test_every_output_is_ranked(self) -> None:
        result = run(model(Pixels()).classify(image(1, 7, 5), top_k=2))
        assert [(c.label, c.score) for c in result.outputs["scores"]] == [("bee", 7), ("cat", 5)]
        assert [(c.label, c.position) for c in result.outputs["map"]] == [
            ("bee", (0,)),
            ("cat", (0,)),
            ("ant", (1,)),
            ("cat", (1,)),
        ]

    def test_result_fields(self) -> None:
        transport = Pixels()
        result = run(model(transport).classify(image(1, 7, 5)))
        assert (result.model, result.version, result.source) == ("m", "7", "ndarray(1, 1, 3)")
        assert result.request_id == transport.inferred()[0].request_id
        assert result.latency_ms > 0

    def test_softmax(self) -> None:
        result = run(model(Pixels()).classify(image(1, 2, 3), top_k=1, softmax=True, outputs=["scores"]))
        assert result.top.score == pytest.approx(np.exp(3) / np.exp([1, 2, 3]).sum())


class TestLabels:
    def test_labels_are_requested_once_per_output(self) -> None:
        transport = Pixels()
        one = model(transport)
        for _ in range(3):
            assert run(one.classify(image(0, 0, 9))).top.label == "cat"
        asked = [request for request in transport.inferred() if any(o.class_count for o in request.outputs.values())]
        assert [list(request.outputs) for request in asked] == [["scores"], ["map"]]
        assert asked[0].outputs["scores"].class_count == ALL_CLASSES


class TestBatches:
    def test_one_request_per_shape_in_order(self) -> None:
        transport = Pixels()
        images = [image(1), image(0, 1, size=(2, 2)), image(0, 0, 1), image(1, size=(2, 2))]
        assert top(classify(transport, *images)) == ["ant", "bee", "cat", "ant"]
        assert transport.batches() == [2, 2]

    def test_unreadable_image_has_error_in_place(self) -> None:
        transport = Pixels()
        first, second, third = classify(transport, image(1), b"no image", image(0, 1))
        assert isinstance(second, InvalidInput)
        assert top([first, third]) == ["ant", "bee"]
        assert transport.batches() == [2]

    def test_failed_request_affects_only_its_images(self) -> None:
        transport = Pixels(labels=False)
        transport.responses["infer"] = [ServerError("out of memory"), transport.infer]
        first, second, third = classify(transport, image(1), image(1, size=(2, 2)), image(0, 1))
        assert isinstance(first, ServerError)
        assert isinstance(third, ServerError)
        assert isinstance(second, Result)

    def test_model_without_batch_dimension(self) -> None:
        transport = Pixels((-1, -1, 3), max_batch_size=0)
        assert run(model(transport).classify(image(0, 5))).top.label == "bee"
        assert np.asarray(transport.inferred()[0].inputs["pixels"]).shape == (1, 1, 3)

    @pytest.mark.parametrize(
        ("shape", "limit", "expected"),
        [
            ((-1, 4, 4, 3), 8, 8),
            ((-1, 4, 4, 3), 0, ALL_CLASSES),
            ((1, 4, 4, 3), 0, 1),
            ((-1, 4, 3), 0, 1),
        ],
    )
    def test_batch_size_is_limited_by_model(self, shape: tuple[int, ...], limit: int, expected: int) -> None:
        images: list[Any] = [b""] * 20
        classifier, task = model(Pixels(shape, max_batch_size=limit)), Classify(top_k=1, softmax=False, ranked=())
        (first, *_) = run(classifier.batches(images, task, Many(batch_size=20)))
        assert len(first) == min(expected, 20)


class TestRanking:
    def test_embedded_ranking(self) -> None:
        transport = Pixels(ranked=True)
        result = run(model(transport).classify(image(1, 7, 5)))
        assert [(c.index, c.label, c.score) for c in result.classifications] == [(1, "bee", 7), (2, "cat", 5)]
        assert list(transport.inferred()[0].outputs) == ["best", "classes"]
        assert list(result.outputs) == ["best"], "indices are no output of their own"

    def test_softmax_with_embedded_ranking_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="softmax needs all scores") as caught:
            run(model(Pixels(ranked=True)).classify(image(1), softmax=True))
        assert "--softmax --top-k" in caught.value.hint

    def test_named_outputs_are_plain_scores(self) -> None:
        result = run(model(Pixels(ranked=True)).classify(image(1, 7, 5), outputs=["best"]))
        assert [c.index for c in result.classifications] == [0, 1], "places in the output, not classes"


class TestRefusals:
    @pytest.mark.parametrize("top_k", [0, -1])
    def test_invalid_top_k(self, top_k: int) -> None:
        transport = Pixels()
        with pytest.raises(InvalidInput, match="top_k must be at least 1"):
            run(model(transport).classify(image(1), top_k=top_k))
        assert transport.requests == []

    @pytest.mark.parametrize("count", [0, 2])
    def test_model_with_other_inputs(self, count: int) -> None:
        transport = Pixels()
        transport.responses["model_metadata"]["inputs"] *= count
        with pytest.raises(InvalidInput, match=f"one input, 'm' has {count}") as caught:
            classify(transport, image(1))
        assert "infer()" in caught.value.hint

    def test_detector_outputs_are_ranked_only_by_name(self) -> None:
        task = Detection(boxes="b", scores="s", classes="c", counts="n")
        preprocess = {"string_value": PIXELS.to_json()}
        transport = Pixels(
            labels=False, parameters={"preprocess": preprocess, "task": {"string_value": encode_json(task)}}
        )
        with pytest.raises(InvalidInput, match="cannot classify: its task is detection"):
            run(model(transport).classify(image(1)))
        assert run(model(transport).classify(image(1), outputs=["scores"])).top.index == 0

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [({"scores": (3, 3), "map": (3, 2, 3)}, "for 1 images"), ({"scores": (1, 3)}, "lacks output 'map'")],
        ids=["another number of samples", "without an output"],
    )
    def test_wrong_response(self, shapes: dict[str, tuple[int, ...]], message: str) -> None:
        transport = Pixels(labels=False)
        outputs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        transport.responses["infer"] = InferResponse(model="m", version="7", outputs=outputs)
        with pytest.raises(ProtocolError, match=message):
            run(model(transport).classify(image(1)))

    def test_model_without_preprocess_spec(self) -> None:
        transport = Pixels(parameters={})
        with pytest.raises(InvalidInput, match="publishes no preprocess spec"):
            classify(transport, image(1))
        assert run(model(transport, preprocess=PIXELS).classify(image(1))).top.label == "ant"

    def test_url_without_fetch_urls(self) -> None:
        (error,) = classify(Pixels(), "https://example.invalid/cat.png")
        assert isinstance(error, InvalidInput)
        assert "fetch_urls=True" in error.hint


class TestRankScores:
    @pytest.mark.parametrize("scores", [np.array([b"cat"], object), np.array(["cat"])])
    def test_strings_cannot_be_ranked(self, scores: Any) -> None:
        with pytest.raises(InvalidInput, match="cannot be ranked"):
            rank_scores(scores, 1, (), softmax=False)


class TestReadRanking:
    @pytest.mark.parametrize(
        "indices",
        [np.array([0, 1, 2]), np.array([0.0, 1.0]), np.array([-1, 0]), np.array([[0, 1]]), np.array([True, False])],
    )
    def test_invalid_class_indices(self, indices: Any) -> None:
        with pytest.raises(ProtocolError, match="class indices"):
            read_ranking(np.array([1.0, 2.0]), indices, 2, ())


BGR = Preprocess(dtype=DType.UINT8, layout="HWC", color="BGR")
CONTRACTS = {
    "1": Contract(preprocess=PIXELS, labels=("ant", "bee", "cat"), output="scores"),
    "2": Contract(preprocess=BGR, labels=("Ameise", "Biene", "Katze"), output="scores"),
}


class Versions(Pixels):
    """A server with versions of different contracts, which rejects requests for other contracts."""

    def __init__(self, *live: str) -> None:
        super().__init__(labels=False)
        self.contracts = dict(CONTRACTS)
        self.deploy(*live)

    def deploy(self, *live: str) -> None:
        self.live = live
        self.responses["model_metadata"] = {**self.responses["model_metadata"], "versions": list(live)}
        known = {version: self.contracts[version] for version in live}
        parameters = {"contracts": {"string_value": Contracts.of(known).to_json()}}
        self.responses["model_config"] = {"max_batch_size": 8, "output": [], "parameters": parameters}

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        response = super().infer(request, timeout_s)
        response.version = request.version or self.live[-1]
        if request.contract != self.contracts[response.version].digest:
            raise InvalidInput(f"the server returned 400: {ContractChanged.MARK} than this version's", status=400)
        return response


class OtherBackend(Versions):
    """A server whose backend ignores the contract of a request, as Triton's own backends do."""

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        response = Pixels.infer(self, request, timeout_s)
        response.version = request.version or self.live[-1]
        return response


def test_more_images_than_a_request_takes_are_errors() -> None:
    transport = Pixels((-1, -1, 3), max_batch_size=0)
    for answer in classify(transport, image(9), image(0, 9)):
        assert isinstance(answer, InvalidInput)
        assert "takes 1 images at once, got 2" in answer.message
    assert not transport.inferred()


class Upgraded(Pixels):
    """A server without contracts, whose version 8 has the labels in reverse order."""

    live = "7"

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        response = super().infer(request, timeout_s)
        response.version = self.live
        if self.live == "8" and any(output.class_count for output in request.outputs.values()):
            texts = [b"%d:%d:%s" % (9 - index, index, label) for index, label in enumerate(LABELS[::-1])]
            response.outputs = dict.fromkeys(response.outputs, np.array([texts], object))
        return response


def classified(one: AsyncModel, *values: int) -> tuple[str, str]:
    result = run(one.classify(image(*values), outputs=["scores"]))
    return result.version, result.top.label


class TestVersions:
    @pytest.mark.parametrize(("version", "top"), [("1", "ant"), ("2", "Katze"), ("", "Katze")])
    def test_versions_have_own_labels_and_preprocess(self, version: str, top: str) -> None:
        transport = Versions("1", "2")
        one = AsyncModel(Connection(transport, 10.0, 0), "m", version)
        assert classified(one, 9, 1, 2) == (version or "2", top)
        assert run(one.preprocess()) == CONTRACTS[version or "2"].preprocess
        assert len(transport.inferred()) == 1

    @pytest.mark.parametrize("server", [Versions, OtherBackend])
    def test_new_version_is_detected(self, server: type[Versions]) -> None:
        transport = server("1")
        one = model(transport)
        assert classified(one, 9, 1, 2) == ("1", "ant")
        transport.deploy("1", "2")
        assert classified(one, 9, 1, 2) == ("2", "Katze")
        transport.deploy("1")  # rolled back: the client knows the contracts of both
        assert classified(one, 9, 1, 2) == ("1", "ant")
        assert len(transport.inferred()) == 5

    def test_new_version_without_contracts(self) -> None:
        transport = Upgraded()
        one = model(transport)
        assert classified(one, 0, 0, 9) == ("7", "cat")
        transport.live = "8"
        assert classified(one, 0, 0, 9) == ("8", "ant")

    def test_new_version_without_contracts_and_concurrent_requests(self) -> None:
        """The first response of the new version must not hide it from the requests beside it."""
        transport = Upgraded(suspends=True)
        one = model(transport)

        async def ask() -> tuple[str, str]:
            result = await one.classify(image(0, 0, 9), outputs=["scores"])
            return result.version, result.top.label

        async def ask_all() -> list[tuple[str, str]]:
            assert await ask() == ("7", "cat")
            transport.live = "8"
            return await asyncio.gather(ask(), ask(), ask())

        assert asyncio.run(ask_all()) == [("8", "ant")] * 3

    def test_replaced_version_with_same_number(self) -> None:
        transport = Versions("1")
        one = model(transport)
        assert classified(one, 9, 1, 2) == ("1", "ant")
        transport.contracts["1"] = CONTRACTS["2"]
        transport.deploy("1")
        assert classified(one, 9, 1, 2) == ("1", "Katze")

    def test_contract_that_never_matches(self) -> None:
        transport = Versions("1")
        transport.contracts["1"] = CONTRACTS["2"]  # published, but never served
        with pytest.raises(ModelNotReady, match="rejected 5 requests") as caught:
            classified(model(transport), 9)
        assert "name, version" in caught.value.hint
        assert len(transport.inferred()) == 5
        assert transport.delays_s == [pytest.approx(0.05 * attempt) for attempt in range(5)]

    def test_input_is_prepared_again_for_new_version(self) -> None:
        """Triton rejects inputs by its configuration before the backend compares contracts."""
        transport = Versions("1")
        one = model(transport)
        assert classified(one, 9) == ("1", "ant")
        good, refused = transport.responses["infer"], InvalidInput("expected [8,8,3]", status=400)
        transport.responses["infer"] = [refused, good]
        transport.deploy("1", "2")
        assert classified(one, 0, 0, 9) == ("2", "Ameise")

    def test_invalid_input_is_an_error(self) -> None:
        transport = Versions("1")
        transport.responses["infer"] = InvalidInput("expected [8,8,3]", status=400)
        with pytest.raises(InvalidInput, match=r"expected \[8,8,3\]"):
            classified(model(transport), 9)
        assert len(transport.inferred()) == 1


class TestBackendThatIgnoresContracts:
    def test_answer_of_another_contract_is_discarded(self) -> None:
        transport = OtherBackend("1", "2")
        read = transport.responses["model_metadata"]
        transport.responses["model_metadata"] = [{**read, "versions": ["1"]}, read]  # 2 replaces 1 after the reading
        assert classified(model(transport), 9, 1, 2) == ("2", "Katze")
        assert len(transport.inferred()) == 2

    def test_answer_of_an_equal_contract_is_good(self) -> None:
        transport = OtherBackend("1")
        transport.contracts["2"] = CONTRACTS["1"]
        transport.deploy("1", "2")
        transport.responses["model_metadata"]["versions"] = ["1"]
        assert classified(model(transport), 9, 1, 2) == ("2", "ant")
        assert len(transport.inferred()) == 1

    def test_pinned_version(self) -> None:
        transport = OtherBackend("1", "2")
        assert classified(AsyncModel(Connection(transport, 10.0, 0), "m", "1"), 9, 1, 2) == ("1", "ant")
        assert len(transport.inferred()) == 1

    def test_version_that_is_never_published(self) -> None:
        transport = OtherBackend("1")
        transport.live = ("2",)
        with pytest.raises(ModelNotReady, match="versions of other contracts"):
            classified(model(transport), 9)
        assert len(transport.inferred()) == 5
