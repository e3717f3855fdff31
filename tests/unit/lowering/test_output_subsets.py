"""Smaller graphs for requests of some outputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from fake_session import FakeSession, spec
from lowered import ORT, artifacts_of, lower_version
from onnx import helper

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession
from graphkiln_backend.graph.errors import LoweringError, SignatureError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.output_subsets import SubsetSession, build_subset
from graphkiln_backend.lowering.proven_session import ProvenSession

GOOD = np.array([[0, 1]], np.int64)
BAD = np.array([[7, 7]], np.int64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.add(tmp_path, "m", zoo.good_and_fragile())


@pytest.fixture
def lowered(folder: Path, cache: ArtifactCache) -> Iterator[ProvenSession]:
    lowered = lower_version(folder, ORT, cache)
    with lowered.session:
        yield lowered


def test_requested_subset_is_computed_alone(lowered: ProvenSession, logged: list[str]) -> None:
    session = lowered.session
    with pytest.raises(SignatureError):
        session.run({"x": BAD}, ["good"])  # the whole graph computes the other output, too
    session.settle()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(session.run({"x": BAD}, ["good"])["good"], BAD + 1)
    np.testing.assert_array_equal(session.run({"x": GOOD}, ["fragile"])["fragile"], GOOD)
    np.testing.assert_array_equal(session.run({"x": GOOD})["good"], GOOD + 1)
    assert logged[0] == "output good alone: served by a smaller graph"


def test_replaced_file_is_not_read_again(lowered: ProvenSession, folder: Path, logged: list[str]) -> None:
    (folder / "model.onnx").write_bytes(zoo.sum_and_difference().SerializeToString())
    session = lowered.session
    for _ in range(2):
        np.testing.assert_array_equal(session.run({"x": GOOD}, ["good"])["good"], GOOD + 1)
        session.settle()  # type: ignore[attr-defined]
    assert "cannot build a graph for output good alone" in logged[0]


def test_subset_that_saves_little_is_not_built(tmp_path: Path, logged: list[str], cache: ArtifactCache) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), *(helper.make_node("Neg", [a], [b]) for a, b in CHAIN)]
    outputs = [zoo.value("y", ("batch", 2)), zoo.value("y30", ("batch", 2))]
    folder = zoo.add(tmp_path, "chain", zoo.model(nodes, [zoo.value("x", ("batch", 2))], outputs))
    lowered = lower_version(folder, ORT, cache)
    with lowered.session as session:
        session.run({"x": np.ones((1, 2), np.float32)}, ["y30"])
    assert logged[-1:] == ["output y30 alone: served by the whole graph"]


CHAIN = [("y" if number == 1 else f"y{number - 1}", f"y{number}") for number in range(1, 31)]


NAMES = tuple("abcdefg")


def session_of(names: tuple[str, ...]) -> FakeSession:
    signature = Signature(inputs=(spec("x", "batch"),), outputs=tuple(spec(name, "batch") for name in names))
    return FakeSession(signature, lambda feeds: dict.fromkeys(names, feeds["x"]))


class Parts:
    """Fake builder of subset sessions."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, ...]] = []
        self.sessions: list[Any] = []
        self.may_build = threading.Event()
        self.may_build.set()
        self.error: Exception | None = None
        self.worth_it = True

    def build(self, outputs: tuple[str, ...]) -> Any:
        self.requested.append(outputs)
        assert self.may_build.wait(10)
        if self.error:
            raise self.error
        if not self.worth_it:
            return None
        self.sessions.append(session_of(outputs))
        return self.sessions[-1]


FEEDS = {"x": np.zeros(1, np.float32)}


class TestSession:
    @pytest.fixture
    def parts(self) -> Parts:
        return Parts()

    @pytest.fixture
    def whole(self) -> Any:
        return session_of(NAMES)

    @pytest.fixture
    def session(self, whole: Any, parts: Parts) -> Iterator[SubsetSession]:
        with SubsetSession(whole, parts.build) as session:
            yield session
            parts.may_build.set()

    @staticmethod
    def request(session: SubsetSession, *names: str) -> dict[str, Any]:
        outputs = session.run(FEEDS, names)
        session.settle()
        return outputs

    def test_first_request_does_not_wait(self, session: SubsetSession, whole: Any, parts: Parts) -> None:
        parts.may_build.clear()
        for _ in range(3):
            assert list(session.run(FEEDS, ["a"])) == ["a"]
        assert len(whole.outputs) == 3
        parts.may_build.set()
        session.settle()
        session.run(FEEDS, ["a"])
        assert len(whole.outputs) == 3
        assert parts.sessions[0].outputs == [("a",)]

    def test_one_subset_is_built_at_a_time(self, session: SubsetSession, parts: Parts) -> None:
        parts.may_build.clear()
        for name in "abc":
            session.run(FEEDS, [name])
        parts.may_build.set()
        session.settle()
        assert parts.requested == [("a",)]
        self.request(session, "b")
        assert parts.requested == [("a",), ("b",)]

    def test_number_of_subsets_is_bounded(self, session: SubsetSession, whole: Any, parts: Parts) -> None:
        for name in NAMES:
            self.request(session, name)
        assert parts.requested == [("a",), ("b",), ("c",), ("d",)]
        assert list(session.run(FEEDS, ["g"])) == ["g"]
        assert whole.outputs[-1] == ("g",)

    def test_subset_that_saves_little_is_served_by_the_whole_graph(
        self, session: SubsetSession, whole: Any, parts: Parts, logged: list[str]
    ) -> None:
        parts.worth_it = False
        for _ in range(3):
            self.request(session, "a", "b")
        assert parts.requested == [("a", "b")]
        assert len(whole.outputs) == 3
        assert logged == ["outputs a, b alone: served by the whole graph"]

    @pytest.mark.parametrize("error", [LoweringError("refused", attempts=()), OSError("the disk is full")])
    def test_failed_subset_is_logged_once_and_served_by_the_whole_graph(
        self, session: SubsetSession, whole: Any, parts: Parts, logged: list[str], error: Exception
    ) -> None:
        parts.error = error
        for _ in range(3):
            self.request(session, "a")
        assert parts.requested == [("a",)]
        assert len(whole.outputs) == 3
        assert logged == [f"cannot build a graph for output a alone: {error}"]

    def test_close_waits_for_a_build_and_closes_all_sessions_once(self, whole: Any, parts: Parts) -> None:
        session = SubsetSession(whole, parts.build)
        self.request(session, "a")
        parts.worth_it = False
        self.request(session, "b")
        parts.worth_it = True
        parts.may_build.clear()
        session.run(FEEDS, ["c"])
        threading.Timer(0.05, parts.may_build.set).start()
        session.close()
        assert [part.closed for part in parts.sessions] == [1, 1]
        assert whole.closed == 1


@pytest.mark.parametrize("self_test", [True, False])
def test_subset_with_wrong_outputs_is_closed(
    folder: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, *, self_test: bool
) -> None:
    artifacts, samples = artifacts_of(folder, cache), np.array([[0, 1], [1, 2]], np.int64)
    right = {"good": samples + 1, "fragile": samples.astype(np.float32)}
    wrong = GoldenSamples(inputs={"x": samples}, source_outputs=right, graph_outputs={**right, "good": samples + 5})
    artifacts.version = replace(artifacts.version, golden=wrong)
    closed: list[bool] = []
    close = OnnxRuntimeSession.close
    monkeypatch.setattr(OnnxRuntimeSession, "close", lambda self: (closed.append(True), close(self))[0])

    def build(*outputs: str) -> Any:
        graph, requirements = artifacts.prepare_graph(ORT), Requirements(self_test=self_test)
        return build_subset(
            outputs,
            graph=graph,
            engine=OnnxRuntimeEngine(),
            config=ORT,
            artifacts=artifacts,
            requirements=requirements,
        )

    if self_test:
        with pytest.raises(VerificationError):
            build("good")
        assert closed == [True]
    else:
        build("good").close()
    build("fragile").close()
