"""Contracts: digests, and publication as JSON."""

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


def test_digests_differ() -> None:
    digests = {contract.digest for contract in (CONTRACT, *OTHERS)}
    assert len(digests) == len(OTHERS) + 1
    assert all(len(digest) == 16 for digest in digests)


def test_digest_is_stable() -> None:
    """Server and client compute it on their own."""
    assert Contract().digest == "0896e9bf548656ca"


def test_digest_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients send it with every request, and the contract may hold a thousand labels."""
    contract = Contract(labels=("a", "b"), output="y")
    first = contract.digest
    monkeypatch.setattr("graphkiln_backend.graph.contract.encode_json", lambda _: pytest.fail("computed again"))
    assert contract.digest == first


def test_older_clients_read_new_contracts() -> None:
    """They refuse unknown keys, and compute the digest of what they read."""
    assert "task" not in Contracts.of({"1": CONTRACT}).to_json()
    assert CONTRACT.digest == "145fb6e87cd0c4a3"


def test_empty_contract() -> None:
    assert not Contract().is_specified
    assert all(contract.is_specified for contract in (CONTRACT, *OTHERS[1:]))


def test_contracts_round_trip() -> None:
    contracts = Contracts.of({"1": CONTRACT, "2": OTHERS[-1], "3": CONTRACT})
    assert len(contracts.contracts) == 2  # equal contracts are shared
    again = Contracts.from_json(contracts.to_json())
    assert again == contracts
    assert [again.find(version) for version in "1234"] == [CONTRACT, OTHERS[-1], CONTRACT, None]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"versions": {"1": "abc"}}', '{"versions": {"1": 2}}', '{"x": 1}'])
def test_invalid_contracts(text: str) -> None:
    with pytest.raises(ManifestError, match=r"contracts|x"):
        Contracts.from_json(text)


def test_contract_changed_has_its_mark() -> None:
    assert ContractChanged.MARK in str(ContractChanged())
