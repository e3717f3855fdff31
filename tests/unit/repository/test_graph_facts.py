"""What is known of a graph's file holds as long as the file is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.files import stamp_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.repository import graph_facts
from graphkiln_backend.repository.graph_facts import GraphFacts, known_facts, known_sha256, remember_facts
from graphkiln_backend.repository.onnx_file import read_precision, read_replaced_outputs, read_signature
from graphkiln_backend.repository.onnx_reading import graph_sha256

FACTS = GraphFacts(signature=Signature(inputs=(), outputs=()), precision=Precision.BF16)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_facts, "_known", {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no graph at all")
    return path


def test_what_is_known_is_not_read(path: Path) -> None:
    remember_facts(path, stamp_of(path), "ab", FACTS)
    assert read_signature(path) is FACTS.signature
    assert read_precision(path) is Precision.BF16
    assert read_replaced_outputs(path) == ()
    assert graph_sha256(path) == "ab"


def test_another_file_is_not_known(path: Path) -> None:
    remember_facts(path, stamp_of(path), "ab", FACTS)
    path.write_bytes(b"something else!!")
    assert known_facts(path) is None
    assert not known_sha256(path)


def test_the_hash_alone_may_be_known(path: Path) -> None:
    remember_facts(path, stamp_of(path), "ab", None)
    assert known_facts(path) is None
    assert known_sha256(path) == "ab"


def test_the_first_files_of_many_are_forgotten(path: Path) -> None:
    for number in range(100):
        remember_facts(path.with_name(str(number)), (), "ab", FACTS)
    assert known_facts(path.with_name("0")) is None
    assert known_facts(path.with_name("99")) is FACTS
