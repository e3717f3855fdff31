"""Contracts: what tells them apart, and how they are published."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.contract import Contract, ContractChanged, Contracts
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Embedding, Ranking

CONTRACT = Contract(preprocess=Preprocess(resize=8), labels=("größe", "b"), output="y")
OTHERS = [
    Contract(),
    Contract(preprocess=Preprocess(resize=8, color="BGR"), labels=("größe", "b"), output="y"),
    Contract(preprocess=Preprocess(resize=8), labels=("b", "größe"), output="y"),
    Contract(preprocess=Preprocess(resize=8), labels=("größe", "b"), output="z"),
    Contract(preprocess=Preprocess(resize=8), ranking=Ranking(scores="y", indices="i")),
    Contract(preprocess=Preprocess(resize=8), task=Embedding(vectors="y")),
]


def test_a_digest_tells_one_from_every_other() -> None:
    digests = {contract.digest for contract in (CONTRACT, *OTHERS)}
    assert len(digests) == len(OTHERS) + 1
    assert all(len(digest) == 16 for digest in digests)


def test_the_digest_is_the_same_everywhere() -> None:
    """Server and client compute it on their own."""
    assert Contract().digest == "0896e9bf548656ca"


def test_it_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients send it with every request, and the contract may hold a thousand labels."""
    contract = Contract(labels=("a", "b"), output="y")
    first = contract.digest
    monkeypatch.setattr("graphkiln_backend.graph.contract.encode_json", lambda _: pytest.fail("computed again"))
    assert contract.digest == first


def test_what_older_clients_read_is_as_they_know_it() -> None:
    """They refuse unknown keys, and compute the digest of what they read."""
    assert "task" not in Contracts.of({"1": CONTRACT}).to_json()
    assert CONTRACT.digest == "145fb6e87cd0c4a3"


def test_a_task_is_read_as_it_was_published() -> None:
    contracts = Contracts.of({"1": OTHERS[-1]})
    found = Contracts.from_json(contracts.to_json()).find("1")
    assert found == OTHERS[-1]


def test_the_empty_one_says_nothing() -> None:
    assert not Contract().says_something
    assert all(contract.says_something for contract in (CONTRACT, *OTHERS[1:]))


def test_are_read_as_they_were_published() -> None:
    contracts = Contracts.of({"1": CONTRACT, "2": OTHERS[1], "3": CONTRACT})
    assert len(contracts.contracts) == 2  # versions that agree share one
    again = Contracts.from_json(contracts.to_json())
    assert again == contracts
    assert [again.find(version) for version in "1234"] == [CONTRACT, OTHERS[1], CONTRACT, None]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"versions": {"1": "abc"}}', '{"versions": {"1": 2}}', '{"x": 1}'])
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(ManifestError, match=r"contracts|x"):
        Contracts.from_json(text)


def test_a_refusal_is_recognized_by_its_words() -> None:
    assert ContractChanged.MARK in str(ContractChanged())
