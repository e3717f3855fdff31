"""References of the soak's models: a slightly wrong answer must not pass; faults of the store."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.repository.version import read_version
from graphkiln_client.tasks import Classification, Result
from soaking.faults import Field, bad_version, put_other_contract
from soaking.models import DIGIT_LABELS, MODELS, MODELS_BY_NAME, SoakModel, build_store, difference, digit_labels
from soaking.traffic import IMAGES, Ledger, Versions, WrongAnswer, check, expected_scores


@pytest.mark.parametrize("model", [model for model in MODELS if model.graph], ids=lambda model: model.name)
def test_graphs_compute_their_reference(model: SoakModel) -> None:
    assert model.graph
    for version in model.versions:
        session = onnxruntime.InferenceSession(model.graph(version).SerializeToString())
        feeds = model.feeds(np.random.default_rng(0), min(4, model.largest_batch))
        run = dict(feeds)
        if "text" in run:
            run["text"] = np.vectorize(bytes.decode, otypes=[object])(feeds["text"])
        names = [output.name for output in session.get_outputs()]
        outputs = dict(zip(names, session.run(None, run), strict=True))
        if "echo" in outputs:
            outputs["echo"] = np.vectorize(str.encode, otypes=[object])(outputs["echo"])
        assert difference(model.reference(version, feeds), outputs) == ""


def test_other_rows_shapes_and_versions_are_differences() -> None:
    model = MODELS_BY_NAME["scaled"]
    feeds = model.feeds(np.random.default_rng(0), 3)
    expected = model.reference(1, feeds)
    assert difference(expected, {"y": expected["y"]}) == ""
    assert "is" in difference(expected, {"y": expected["y"][::-1]})
    assert "shape" in difference(expected, {"y": expected["y"][:2]})
    assert "outputs" in difference(expected, {})
    assert difference(expected, model.reference(2, feeds))


def test_a_version_that_should_not_be_live_is_a_wrong_answer() -> None:
    versions, model = Versions(), MODELS_BY_NAME["scaled"]
    feeds = model.feeds(np.random.default_rng(0), 2)
    versions.check(model, "", feeds, (dict(model.reference(2, feeds)), 2))
    with pytest.raises(WrongAnswer, match="should not be live"):
        versions.check(model, "", feeds, (dict(model.reference(9, feeds)), 9))
    with pytest.raises(WrongAnswer, match="in place of 1"):
        versions.check(model, "1", feeds, (dict(model.reference(2, feeds)), 2))
    with pytest.raises(WrongAnswer, match="version any"):
        versions.check(model, "", feeds, (dict(model.reference(9, feeds)), None))


def test_a_withdrawn_version_is_not_requested_but_may_answer() -> None:
    versions, model = Versions(), MODELS_BY_NAME["scaled"]
    versions.add("scaled", 21)
    versions.announce("scaled", 21)
    asked = {versions.to_ask("scaled", random.Random(seed)) for seed in range(100)}
    assert asked == {"", "1", "2", "21"}
    versions.withdraw("scaled", 21)
    asked = {versions.to_ask("scaled", random.Random(seed)) for seed in range(100)}
    assert "21" not in asked
    feeds = model.feeds(np.random.default_rng(0), 1)
    versions.check(model, "", feeds, (dict(model.reference(21, feeds)), 21))


def test_a_swapped_label_is_a_wrong_answer() -> None:
    scores = expected_scores(IMAGES[0])
    best = np.argsort(-scores)[:3]

    def result(labels: tuple[str, ...], added: float = 0.0) -> Result:
        entries = tuple(
            Classification(index=int(index), label=labels[index], score=float(scores[index]) + added) for index in best
        )
        return Result(
            source="x", model="digits", version="1", request_id="", latency_ms=1.0, outputs={"OUTPUT_0": entries}
        )

    check(IMAGES[0], result(DIGIT_LABELS), 3)
    with pytest.raises(WrongAnswer, match="instead of"):
        check(IMAGES[0], result(DIGIT_LABELS[::-1]), 3)
    with pytest.raises(WrongAnswer, match="other scores"):
        check(IMAGES[0], result(DIGIT_LABELS, 0.1), 3)


class FakeService:
    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.loaded: list[str] = []

    def load(self, model: str) -> str:
        self.loaded.append(model)
        return self.refusal


def field(store: Path, service: Any, *, explicit: bool) -> Field:
    return Field(
        service=service,
        folder=store.parent,
        store=store,
        versions=Versions(),
        ledger=Ledger(),
        chance=random.Random(1),
        explicit=explicit,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_store(tmp_path / "store")
    return tmp_path / "store"


def test_a_bad_version_must_be_refused(store: Path) -> None:
    inject = bad_version("scaled", Path.mkdir)
    service = FakeService("HTTP 400: no")
    with inject(field(store, service, explicit=True)):
        assert (store / "scaled" / "9").exists()
        service.refusal = ""
    assert not (store / "scaled" / "9").exists()
    assert service.loaded == ["scaled", "scaled"], "the restored store must be loaded again"
    with (
        pytest.raises(MeasurementError, match="loaded a bad version"),
        inject(field(store, FakeService(), explicit=True)),
    ):
        pass


def test_a_version_of_another_contract_is_complete(store: Path) -> None:
    put_other_contract(store / "digits" / "51", 51)
    contract = read_version(store / "digits" / "51").contract
    assert contract
    assert contract.labels == digit_labels(51) != DIGIT_LABELS
