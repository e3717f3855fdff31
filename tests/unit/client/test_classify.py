"""Classification by models of every kind, on a server that computes scores from pixels."""

from __future__ import annotations

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
from graphkiln_client.remote_model import ALL_CLASSES
from graphkiln_client.tasks import Classify, Result, rank_scores, read_ranking
from graphkiln_client.transports.base import InferRequest, InferResponse

PIXELS = Preprocess(dtype=DType.UINT8, layout="HWC")
LABELS = (b"ant", b"bee", b"cat")
RANKING = Ranking(scores="best", indices="classes", labels=("ant", "bee", "cat"))


def image(*values: int, size: tuple[int, int] = (1, 1)) -> Any:
    """Pixels `[height, width, 3]`, of which the first has these values."""
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[0, 0, : len(values)] = values
    return pixels


class Pixels(FakeTransport):
    """A model whose scores are the first pixel's three values, beside an output per position."""

    def __init__(
        self, shape: tuple[int, ...] = (-1, -1, -1, 3), *, labels: bool = True, ranked: bool = False, **config: Any
    ) -> None:
        self.shape = shape
        row = {"data_type": "TYPE_FP32", "label_filename": "labels.txt" if labels else ""}
        parameters = {"preprocess": {"string_value": PIXELS.to_json()}}
        if ranked:
            parameters["ranking"] = {"string_value": RANKING.to_json()}
        names = ("best", "classes") if ranked else ("scores", "map")
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1, 3]} for name in names]
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
            }
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
        """Sizes of the requests that were no question for labels."""
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

    def test_it_tells_who_answered_what(self) -> None:
        transport = Pixels()
        result = run(model(transport).classify(image(1, 7, 5)))
        assert (result.model, result.version, result.source) == ("m", "7", "ndarray(1, 1, 3)")
        assert result.request_id == transport.inferred()[0].request_id
        assert result.latency_ms > 0

    def test_softmax_makes_probabilities_of_all_classes(self) -> None:
        result = run(model(Pixels()).classify(image(1, 2, 3), top_k=1, softmax=True, outputs=["scores"]))
        assert result.top.score == pytest.approx(np.exp(3) / np.exp([1, 2, 3]).sum())


class TestLabels:
    def test_they_are_requested_once_for_each_output(self) -> None:
        transport = Pixels()
        one = model(transport)
        for _ in range(3):
            assert run(one.classify(image(0, 0, 9))).top.label == "cat"
        asked = [request for request in transport.inferred() if any(o.class_count for o in request.outputs.values())]
        assert [list(request.outputs) for request in asked] == [["scores"], ["map"]]
        assert asked[0].outputs["scores"].class_count == ALL_CLASSES

    def test_given_ones_come_first(self) -> None:
        transport = Pixels()
        one = model(transport, labels=["x", "y"])
        assert [c.label for c in run(one.classify(image(3, 2, 1), outputs=["scores"])).classifications] == [
            "x",
            "y",
            "",
        ]
        assert len(transport.inferred()) == 1


class TestBatches:
    def test_images_of_one_shape_are_one_request(self) -> None:
        transport = Pixels()
        results = classify(transport, image(1), image(0, 1), image(0, 0, 1))
        assert top(results) == ["ant", "bee", "cat"]
        assert transport.batches() == [3]
        assert len({result.request_id for result in results if isinstance(result, Result)}) == 1

    def test_each_shape_is_a_request_and_the_order_is_kept(self) -> None:
        transport = Pixels()
        images = [image(1), image(0, 1, size=(2, 2)), image(0, 0, 1), image(1, size=(2, 2))]
        assert top(classify(transport, *images)) == ["ant", "bee", "cat", "ant"]
        assert transport.batches() == [2, 2]

    def test_an_image_that_cannot_be_read_has_its_error_there(self) -> None:
        transport = Pixels()
        first, second, third = classify(transport, image(1), b"no image", image(0, 1))
        assert isinstance(second, InvalidInput)
        assert top([first, third]) == ["ant", "bee"]
        assert transport.batches() == [2]

    def test_a_failed_request_is_the_error_of_its_images_only(self) -> None:
        transport = Pixels(labels=False)
        transport.responses["infer"] = [ServerError("out of memory"), transport.infer]
        first, second, third = classify(transport, image(1), image(1, size=(2, 2)), image(0, 1))
        assert isinstance(first, ServerError)
        assert isinstance(third, ServerError)
        assert isinstance(second, Result)

    def test_a_model_without_a_batch_dimension_takes_the_image_itself(self) -> None:
        transport = Pixels((-1, -1, 3), max_batch_size=0)
        assert run(model(transport).classify(image(0, 5))).top.label == "bee"
        assert np.asarray(transport.inferred()[0].inputs["pixels"]).shape == (1, 1, 3)

    @pytest.mark.parametrize(
        ("shape", "limit", "expected"),
        [
            ((-1, 4, 4, 3), 8, 8),
            ((-1, 4, 4, 3), 0, ALL_CLASSES),
            ((1, 4, 4, 3), 0, 1),
            ((4, 4, 3), 0, 1),
            ((-1, 4, 3), 0, 1),
        ],
    )
    def test_as_many_as_the_model_takes(self, shape: tuple[int, ...], limit: int, expected: int) -> None:
        images: list[Any] = [b""] * 20
        classifier, task = model(Pixels(shape, max_batch_size=limit)), Classify(top_k=1, softmax=False, ranked=())
        (first, *_) = run(classifier.batches(images, task, Many(batch_size=20)))
        assert len(first) == min(expected, 20)


class TestRanking:
    def test_a_graph_that_ranks_itself(self) -> None:
        transport = Pixels(ranked=True)
        result = run(model(transport).classify(image(1, 7, 5)))
        assert [(c.index, c.label, c.score) for c in result.classifications] == [(1, "bee", 7), (2, "cat", 5)]
        assert list(transport.inferred()[0].outputs) == ["best", "classes"]
        assert list(result.outputs) == ["best"], "indices are no output of their own"

    def test_labels_of_ones_own(self) -> None:
        assert run(model(Pixels(ranked=True), labels=("x", "y", "z")).classify(image(0, 7))).top.label == "y"

    def test_there_is_no_softmax_over_some_of_the_scores(self) -> None:
        with pytest.raises(InvalidInput, match="softmax needs all scores") as caught:
            run(model(Pixels(ranked=True)).classify(image(1), softmax=True))
        assert "--softmax --top-k" in caught.value.hint

    def test_outputs_by_name_are_plain_scores_again(self) -> None:
        result = run(model(Pixels(ranked=True)).classify(image(1, 7, 5), outputs=["best"]))
        assert [c.index for c in result.classifications] == [0, 1], "places in the output, not classes"


class TestRefusals:
    @pytest.mark.parametrize("top_k", [0, -1])
    def test_top_k_of_nothing(self, top_k: int) -> None:
        transport = Pixels()
        with pytest.raises(InvalidInput, match="top_k must be at least 1"):
            run(model(transport).classify(image(1), top_k=top_k))
        assert transport.requests == []

    @pytest.mark.parametrize("count", [0, 2])
    def test_a_model_with_other_inputs(self, count: int) -> None:
        transport = Pixels()
        transport.responses["model_metadata"]["inputs"] *= count
        with pytest.raises(InvalidInput, match=f"one input, 'm' has {count}") as caught:
            classify(transport, image(1))
        assert "infer()" in caught.value.hint

    def test_corners_of_boxes_are_ranked_only_by_name(self) -> None:
        task = Detection(boxes="b", scores="s", classes="c", counts="n")
        preprocess = {"string_value": PIXELS.to_json()}
        transport = Pixels(
            labels=False, parameters={"preprocess": preprocess, "task": {"string_value": encode_json(task)}}
        )
        with pytest.raises(InvalidInput, match="cannot classify: its task is detection"):
            run(model(transport).classify(image(1)))
        assert run(model(transport).classify(image(1), outputs=["scores"])).top.index == 0

    def test_a_response_with_another_number_of_samples(self) -> None:
        transport = Pixels(labels=False)
        outputs = {"scores": np.zeros((3, 2)), "map": np.zeros((3, 2))}
        transport.responses["infer"] = InferResponse(model="m", version="7", outputs=outputs)
        with pytest.raises(ProtocolError, match="for 1 images"):
            run(model(transport).classify(image(1)))

    def test_a_response_that_lacks_an_output(self) -> None:
        transport = Pixels(labels=False)
        transport.responses["infer"] = InferResponse(model="m", version="7", outputs={"scores": np.zeros((1, 2))})
        with pytest.raises(ProtocolError, match="lacks output 'map'"):
            run(model(transport).classify(image(1)))

    def test_a_model_that_does_not_say_how_images_become_inputs(self) -> None:
        transport = Pixels(parameters={})
        with pytest.raises(InvalidInput, match="publishes no preprocess spec"):
            classify(transport, image(1))
        assert run(model(transport, preprocess=PIXELS).classify(image(1))).top.label == "ant"

    def test_a_url_where_none_may_be_fetched(self) -> None:
        (error,) = classify(Pixels(), "https://example.invalid/cat.png")
        assert isinstance(error, InvalidInput)
        assert "fetch_urls=True" in error.hint


class TestRankScores:
    def test_a_scalar_is_one_class(self) -> None:
        (answer,) = rank_scores(np.array(2.5), 5, (), softmax=False)
        assert (answer.index, answer.score, answer.position) == (0, 2.5, ())

    @pytest.mark.parametrize("scores", [np.array([b"cat"], object), np.array(["cat"])])
    def test_strings_cannot_be_ranked(self, scores: Any) -> None:
        with pytest.raises(InvalidInput, match="cannot be ranked"):
            rank_scores(scores, 1, (), softmax=False)


class TestReadRanking:
    @pytest.mark.parametrize(
        "indices",
        [np.array([0, 1, 2]), np.array([0.0, 1.0]), np.array([-1, 0]), np.array([[0, 1]]), np.array([True, False])],
    )
    def test_what_are_no_class_indices(self, indices: Any) -> None:
        with pytest.raises(ProtocolError, match="class indices"):
            read_ranking(np.array([1.0, 2.0]), indices, 2, ())


BGR = Preprocess(dtype=DType.UINT8, layout="HWC", color="BGR")
CONTRACTS = {
    "1": Contract(preprocess=PIXELS, labels=("ant", "bee", "cat"), output="scores"),
    "2": Contract(preprocess=BGR, labels=("Ameise", "Biene", "Katze"), output="scores"),
}


class Versions(Pixels):
    """A server with versions of different contracts, of which the newest answers; it refuses other contracts."""

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


def classified(one: AsyncModel, *values: int) -> tuple[str, str]:
    result = run(one.classify(image(*values), outputs=["scores"]))
    return result.version, result.top.label


class TestVersions:
    @pytest.mark.parametrize(("version", "top"), [("1", "ant"), ("2", "Katze"), ("", "Katze")])
    def test_each_has_its_own_labels_and_preprocess(self, version: str, top: str) -> None:
        transport = Versions("1", "2")
        one = AsyncModel(Connection(transport, 10.0, 0), "m", version)
        assert classified(one, 9, 1, 2) == (version or "2", top)
        assert run(one.preprocess()) == CONTRACTS[version or "2"].preprocess
        assert len(transport.inferred()) == 1

    def test_a_version_that_comes_while_the_client_lives(self) -> None:
        transport = Versions("1")
        one = model(transport)
        assert classified(one, 9, 1, 2) == ("1", "ant")
        transport.deploy("1", "2")
        assert classified(one, 9, 1, 2) == ("2", "Katze")
        transport.deploy("1")  # rolled back
        assert classified(one, 9, 1, 2) == ("1", "ant")
        assert len(transport.inferred()) == 5

    def test_a_version_that_comes_to_a_server_without_contracts(self) -> None:
        """Nothing is refused there: only the number of the version that answers tells that labels may be others."""

        class Upgraded(Pixels):
            live = "7"

            def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
                response = super().infer(request, timeout_s)
                response.version = self.live
                if self.live == "8" and any(output.class_count for output in request.outputs.values()):
                    texts = [b"%d:%d:%s" % (9 - index, index, label) for index, label in enumerate(LABELS[::-1])]
                    response.outputs = dict.fromkeys(response.outputs, np.array([texts], object))
                return response

        transport = Upgraded()
        one = model(transport)
        assert classified(one, 0, 0, 9) == ("7", "cat")
        transport.live = "8"
        assert classified(one, 0, 0, 9) == ("8", "ant")

    def test_a_version_that_is_replaced_under_its_number(self) -> None:
        transport = Versions("1")
        one = model(transport)
        assert classified(one, 9, 1, 2) == ("1", "ant")
        transport.contracts["1"] = CONTRACTS["2"]
        transport.deploy("1")
        assert classified(one, 9, 1, 2) == ("1", "Katze")

    def test_a_version_that_another_server_behind_the_address_serves(self) -> None:
        transport = Versions("1")
        transport.contracts["1"] = CONTRACTS["2"]  # what is published is not what answers, for ever
        with pytest.raises(ModelNotReady, match="rejected 5 requests") as caught:
            classified(model(transport), 9)
        assert "name, version" in caught.value.hint
        assert len(transport.inferred()) == 5
        assert transport.delays_s == [pytest.approx(0.05 * attempt) for attempt in range(5)]

    def test_an_input_that_another_version_takes_is_prepared_again(self) -> None:
        """Triton refuses what does not fit its configuration before our backend sees it."""
        transport = Versions("1")
        one = model(transport)
        assert classified(one, 9) == ("1", "ant")
        good, refused = transport.responses["infer"], InvalidInput("expected [8,8,3]", status=400)
        transport.responses["infer"] = [refused, good]
        transport.deploy("1", "2")
        assert classified(one, 0, 0, 9) == ("2", "Ameise")

    def test_an_input_that_is_wrong_for_every_version_is_an_error(self) -> None:
        transport = Versions("1")
        transport.responses["infer"] = InvalidInput("expected [8,8,3]", status=400)
        with pytest.raises(InvalidInput, match=r"expected \[8,8,3\]"):
            classified(model(transport), 9)
        assert len(transport.inferred()) == 1

    def test_a_server_that_cannot_be_asked_again(self) -> None:
        transport = Versions("1")
        one = model(transport)
        assert classified(one, 9) == ("1", "ant")
        transport.responses["infer"] = InvalidInput("expected [8,8,3]", status=400)
        transport.responses["model_metadata"] = ServerError("it broke")
        with pytest.raises(InvalidInput, match="expected"):
            classified(one, 9)
