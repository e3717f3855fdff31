"""What made vectors: written, read, compared."""

from __future__ import annotations

from typing import Any, cast

from commands import FakeClient

from graphkiln.cli.vector_file import Origin, identify
from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.preprocess import Preprocess

ORIGIN = Origin(model="m", version="3", contract="ab")
CONTRACT = Contract(preprocess=Preprocess(resize=4, crop=(4, 4)))


def test_the_newest_version_is_pinned_with_its_contract() -> None:
    client = FakeClient()
    client.fake_model.versions = ["9", "10"]
    said = Contracts.of({"9": Contract(), "10": CONTRACT}).to_json()
    client.fake_model.config = {"parameters": {"contracts": {"string_value": said}}}
    _, origin = identify(cast(Any, client), "m", "")
    assert origin == Origin(model="m", version="10", contract=CONTRACT.digest)
    assert client.models_opened[-1] == ("m", "10")
    assert identify(cast(Any, client), "m", "9")[1] == Origin(model="m", version="9", contract=Contract().digest)


def test_of_a_server_that_says_neither() -> None:
    assert identify(cast(Any, FakeClient()), "m", "")[1] == Origin(model="m", version="", contract="")
