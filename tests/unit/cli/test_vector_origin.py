"""What made vectors: written, read, compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from commands import FakeClient

from graphkiln.cli.vector_origin import Origin, identify
from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.errors import InvalidInput, ManifestError
from graphkiln_backend.graph.preprocess import Preprocess

ORIGIN = Origin(model="m", version="3", contract="ab")
CONTRACT = Contract(preprocess=Preprocess(resize=4, crop=(4, 4)))


def test_is_read_as_it_was_written() -> None:
    for origin in (ORIGIN, Origin(model="m", version="", contract="")):
        written = {key.encode(): value.encode() for key, value in origin.to_metadata().items()}
        assert Origin.from_metadata(written) == origin


def test_a_file_of_somebody_else() -> None:
    with pytest.raises(ManifestError, match=r"graphkiln\.model"):
        Origin.from_metadata({b"pandas": b"{}"})


@pytest.mark.parametrize("change", [{"model": "n"}, {"version": "4"}, {"contract": "ac"}])
def test_another_one_is_refused(change: dict[str, str]) -> None:
    ORIGIN.check(Origin(model="m", version="3", contract="ab"))
    other = Origin(**{"model": "m", "version": "3", "contract": "ab", **change})
    with pytest.raises(InvalidInput, match="cannot be compared") as caught:
        ORIGIN.check(other)
    assert str(ORIGIN) in str(caught.value)
    assert str(other) in str(caught.value)


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


def test_weights_that_were_replaced_under_one_number_are_refused() -> None:
    client = FakeClient()
    client.fake_model.versions = ["3"]
    client.fake_model.config = {"parameters": {"graphs": {"string_value": '{"3": "aa"}'}}}
    before = identify(cast(Any, client), "m", "3")[1]
    assert before.graph == "aa"
    client.fake_model.config = {"parameters": {"graphs": {"string_value": '{"3": "bb"}'}}}
    with pytest.raises(
        InvalidInput, match=r"version 3 \(graph aa\), the image's would be by 'm' version 3 \(graph bb\)"
    ):
        before.check(identify(cast(Any, client), "m", "3")[1])


def test_where_one_side_says_nothing_of_its_graph_the_rest_decides() -> None:
    for one, other in (("", "aa"), ("aa", "")):
        Origin(model="m", version="3", contract="ab", graph=one).check(replace(ORIGIN, graph=other))
    with pytest.raises(InvalidInput):
        replace(ORIGIN, version="4", graph="aa").check(ORIGIN)
