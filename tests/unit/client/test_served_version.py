"""What is published about the version that answers."""

from __future__ import annotations

from typing import Any

import pytest
from fake_transport import FakeTransport

from graphkiln_backend.graph.contract import Contract, ContractChanged, Contracts
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking
from graphkiln_client.connection import Connection
from graphkiln_client.metadata import ModelInfo
from graphkiln_client.runner import run
from graphkiln_client.served_version import ServedVersion, StaleVersion, is_contract_changed, read_served_version

RGB, BGR = Preprocess(resize=8), Preprocess(resize=8, color="BGR")
ONE = Contract(preprocess=RGB, labels=("a", "b"), output="y")
LABELED = [{"name": name, "data_type": "TYPE_FP32", "label_filename": "f"} for name in "yz"]


def parameters(**values: Any) -> dict[str, Any]:
    return {"parameters": {key: {"string_value": value.to_json()} for key, value in values.items()}}


def read(version: str = "", answered: str = "", versions: Any = ("1", "2"), **config: Any) -> ServedVersion:
    rows = list(versions) if isinstance(versions, tuple) else versions
    responses = {"model_metadata": {"versions": rows}, "model_config": config}
    connection = Connection(FakeTransport(responses), 10.0, 0)
    return run(read_served_version(ModelInfo(connection, "m", version), answered))


def published(**contracts: Contract) -> dict[str, Any]:
    return parameters(contracts=Contracts.of({name.removeprefix("v"): each for name, each in contracts.items()}))


class TestReading:
    @pytest.mark.parametrize(
        ("version", "answered", "versions", "expected"),
        [
            ("", "", ["1", "2"], "2"),
            ("", "", ["9", "10"], "10"),
            ("", "1", ["1", "2"], "1"),
            ("1", "2", ["1", "2"], "1"),
            ("", "", None, ""),
            ("", "", ["x", 3], "3"),
            ("", "", [], ""),
        ],
    )
    def test_the_version_that_is_addressed_or_answered_or_the_newest(
        self, version: str, answered: str, versions: Any, expected: str
    ) -> None:
        assert read(version, answered, versions).version == expected

    def test_its_contract(self) -> None:
        config = published(v1=ONE, v2=Contract(preprocess=BGR))
        assert read("1", **config).contract == ONE
        assert read(**config).preprocess == BGR

    def test_a_version_that_was_not_published_yet(self) -> None:
        """Its digest fits no version that says something: the server refuses, and all is read again."""
        found = read(versions=["3"], **published(v1=ONE))
        assert found.contract == Contract()
        assert found.digest == Contract().digest

    @pytest.mark.parametrize("version", ["01", "1/x", " 1", "+1", "\u0661", "x"])
    def test_what_triton_takes_for_a_version_and_is_none(self, version: str) -> None:
        with pytest.raises(InvalidInput, match=r"is no version of 'm' \(they are numbers: 1, 2\)"):
            read(version, **published(v1=ONE))
        assert read(version).version == version, "a server of another kind may have such versions"

    def test_a_server_that_publishes_none(self) -> None:
        found = read(**parameters(preprocess=RGB, ranking=Ranking(scores="s", indices="i")))
        assert (found.contract, found.digest, found.preprocess) == (None, "", RGB)
        assert found.ranking == Ranking(scores="s", indices="i")

    def test_what_cannot_be_read(self) -> None:
        with pytest.raises(ProtocolError, match="'m' publishes an invalid list of contracts"):
            read(parameters={"contracts": {"string_value": "{"}})


class TestServedVersion:
    def test_what_the_version_says_comes_before_what_is_said_of_the_model(self) -> None:
        ranking = Ranking(scores="s", indices="i")
        config = published(v2=Contract(preprocess=BGR, ranking=ranking))
        config["parameters"] |= parameters(preprocess=RGB, ranking=Ranking(scores="x", indices="x"))["parameters"]
        found = read(**config)
        assert (found.preprocess, found.ranking) == (BGR, ranking)

    def test_what_nobody_says(self) -> None:
        with pytest.raises(InvalidInput, match="does not say how images become its input"):
            _ = read(**published(v2=Contract())).preprocess
        assert read().ranking is None

    def test_labels_of_the_output_that_they_name(self) -> None:
        found = read("1", output=LABELED, **published(v1=ONE))
        assert found.known_labels("y") == ("a", "b")
        assert found.known_labels("z") is None  # the server has a file for it
        assert found.known_labels("other") == ()
        found.labels["z"] = ("c",)
        assert found.known_labels("z") == ("c",)

    def test_a_response_of_another_version(self) -> None:
        read().check("2")
        read().check("")
        read(versions=None).check("7")
        read("2").check("02")
        with pytest.raises(StaleVersion) as caught:
            read().check("3")
        assert caught.value.answered == "3"

    def test_labels_that_were_asked_for_make_no_other_version(self) -> None:
        one, other = read(), read()
        one.labels["y"] = ("a",)
        assert one == other


def test_a_refusal_is_recognized_however_it_is_wrapped() -> None:
    assert is_contract_changed(InvalidInput(f"the server returned 400: {ContractChanged()}"))
    assert not is_contract_changed(InvalidInput("the server returned 400: wrong shape"))
