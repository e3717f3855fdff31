"""Contracts of versions, published in the configuration of their model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.manifest import Labels, Manifest, sha256_of
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Embedding, Ranking
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.repository.publication import check_published, complete_contract, labels_file_of, publish
from graphkiln_backend.repository.version import ModelVersion, read_version

RGB, BGR = Preprocess(resize=8), Preprocess(resize=8, color="BGR")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ZIFFERN = ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m"


@pytest.fixture
def add(model: Path, digits: Path) -> Any:
    """Add a version with labels and preprocessing."""

    def add(
        number: int, labels: tuple[str, ...] = DIGITS, preprocess: Preprocess | None = RGB, **changes: Any
    ) -> Contract:
        folder = shutil.copytree(digits / "1", model / str(number))
        path = folder / "labels.txt"
        path.unlink()
        if labels:
            path.write_text("\n".join(labels) + "\n")
        manifest = replace(
            Manifest.read(folder / "manifest.json"),
            preprocess=preprocess,
            labels=Labels(file=path.name, sha256=sha256_of(path), count=len(labels)) if labels else None,
            **changes,
        )
        manifest.write(folder / "manifest.json")
        return read_version(folder).contract

    return add


@pytest.fixture
def bare(model: Path, digits: Path) -> Any:
    def bare(number: int) -> None:
        (model / str(number)).mkdir()
        shutil.copy(digits / "1" / "model.onnx", model / str(number))

    return bare


def config(text: str = "") -> Any:
    return text_format.Parse(f'name: "m" output {{ name: "OUTPUT_0" }} {text}', pb.ModelConfig())


def published(model: Path, text: str = "") -> Any:
    message = config(text)
    publish(message, model)
    return message


def contracts_of(message: Any) -> Contracts:
    return Contracts.from_json(message.parameters["contracts"].string_value)


def statement(key: str, value: Any) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value.to_json())} }} }}'


def check(message: Any, model: Path, number: int) -> None:
    check_published(message, model, number, read_version(model / str(number)))


class TestPublish:
    def test_contract_of_each_version(self, model: Path, add: Any) -> None:
        one, two = add(1), add(2, ZIFFERN, BGR)
        contracts = contracts_of(published(model))
        assert (one.labels, two.labels, two.preprocess) == (DIGITS, ZIFFERN, BGR)
        assert (contracts.find("1"), contracts.find("2")) == (one, two)

    def test_graph_digest_of_each_version(self, model: Path, add: Any, bare: Any) -> None:
        add(1), add(2), bare(3)
        path = model / "2" / "manifest.json"
        replace(Manifest.read(path), weights={"a.bin": "1" * 64}).write(path)
        graphs = json.loads(published(model, statement("graphs", RGB)).parameters["graphs"].string_value)
        manifests = {number: Manifest.read(model / number / "manifest.json") for number in ("1", "2")}
        assert graphs == {number: manifest.graph_digest for number, manifest in manifests.items()}
        assert len({*graphs.values()}) == 2

    def test_values_of_the_served_version_are_published(self, model: Path, add: Any) -> None:
        add(1), add(2, ZIFFERN, BGR)
        message = published(model, statement("preprocess", RGB))  # as version 1 had it written
        assert message.parameters["preprocess"].string_value == BGR.to_json()
        assert message.output[0].label_filename == "2/labels.txt"

    def test_differing_values_are_not_published(self, model: Path, add: Any, logged: list[str]) -> None:
        one, two = add(1), add(2, ZIFFERN, BGR)
        message = published(model, f"version_policy {{ all {{}} }} {statement('preprocess', RGB)}")
        assert "preprocess" not in message.parameters
        assert message.output[0].label_filename == ""
        assert len(logged) == 1
        assert "the versions of m have different labels" in logged[0]
        assert contracts_of(message).find("1") == one
        assert contracts_of(message).find("2") == two

    def test_versions_that_are_not_served_are_ignored(self, model: Path, add: Any) -> None:
        add(1), add(2, ZIFFERN, BGR)
        message = published(model, "version_policy { specific { versions: 1 } }")
        assert message.parameters["preprocess"].string_value == RGB.to_json()
        assert message.output[0].label_filename == "1/labels.txt"

    def test_version_without_labels(self, model: Path, add: Any) -> None:
        add(1), add(2, (), None)
        message = published(model, statement("preprocess", RGB) + ' output { name: "z" label_filename: "z.txt" }')
        assert "preprocess" not in message.parameters
        assert [output.label_filename for output in message.output] == ["", "z.txt"]
        assert contracts_of(message).find("2") == Contract()

    def test_labels_of_other_tasks_have_no_output(self, model: Path, add: Any) -> None:
        task = Embedding(vectors="OUTPUT_0")
        contract = add(1, task=task)
        message = published(model)
        assert message.parameters["task"].string_value == encode_json(task)
        assert contracts_of(message).find("1") == contract
        assert (contract.labels, contract.output, message.output[0].label_filename) == (DIGITS, "", "")
        assert labels_file_of(model / "1") is None
        check(message, model, 1)

    def test_wrong_task_in_the_config(self, model: Path, add: Any) -> None:
        add(1, task=Embedding(vectors="OUTPUT_0"))
        message = config('parameters { key: "task" value { string_value: "{\\"kind\\": \\"classification\\"}" } }')
        with pytest.raises(RepositoryError, match="a task that version 1 does not have"):
            check(message, model, 1)

    def test_manifest_overrides_the_config(self, model: Path, add: Any, logged: list[str]) -> None:
        add(1)
        message = published(model, statement("preprocess", BGR))
        assert message.parameters["preprocess"].string_value == RGB.to_json()
        assert "config.pbtxt of m gives a preprocess that no version has" in logged[0]

    def test_bare_graphs_use_the_config(self, model: Path, bare: Any) -> None:
        bare(1)
        text = statement("preprocess", BGR) + ' output { name: "z" label_filename: "z.txt" }'
        assert published(model, text) == config(text)

    def test_damaged_versions_are_left_out(self, model: Path, add: Any, logged: list[str]) -> None:
        one = add(1)
        add(2)
        (model / "2" / "labels.txt").write_text("swapped\n")
        (model / "3").mkdir()
        (model / "3" / "manifest.json").write_text("{")
        assert contracts_of(published(model)).versions == {"1": one.digest}
        assert len(logged) == 2


class TestCheckPublished:
    def test_published_contracts_match(self, model: Path, add: Any) -> None:
        add(1), add(2, ZIFFERN, BGR), add(3, (), None)
        message = published(model, "version_policy { all {} }")
        for number in (1, 2, 3):
            check(message, model, number)

    def test_version_replaced_after_publication(self, model: Path, add: Any) -> None:
        add(1)
        message = published(model)
        shutil.rmtree(model / "1")
        add(1, ZIFFERN)
        with pytest.raises(RepositoryError, match="is not the one that was published") as caught:
            check(message, model, 1)
        assert "start the server again" in caught.value.hint

    def test_version_added_after_publication(self, model: Path, add: Any) -> None:
        add(1)
        message = published(model)
        add(2)
        with pytest.raises(RepositoryError, match="is not the one that was published"):
            check(message, model, 2)

    def test_bare_graph_beside_manifests(self, model: Path, add: Any, bare: Any) -> None:
        """A version whose manifest is not copied yet must not get the labels of another."""
        add(1), bare(2)
        with pytest.raises(RepositoryError, match="version 2 of 'm' has no manifest") as caught:
            check(published(model), model, 2)
        assert "graphkiln convert" in caught.value.hint


class TestWithoutPublication:
    """A server without completed configurations: config.pbtxt applies to all versions."""

    @pytest.mark.parametrize("key", ["preprocess", "labels"])
    def test_config_contradicts_a_version(self, model: Path, add: Any, key: str) -> None:
        add(1), add(2, ZIFFERN, BGR)
        message = config(statement("preprocess", RGB) if key == "preprocess" else "")
        if key == "labels":
            message.output[0].label_filename = "1/labels.txt"
        check(message, model, 1)
        with pytest.raises(RepositoryError, match=f"gives .*{key}.* that version 2 does not have") as caught:
            check(message, model, 2)
        assert "--model-control-mode=none" in caught.value.hint
        assert "another --name" in caught.value.hint

    def test_spelling_of_an_earlier_release(self, model: Path, add: Any) -> None:
        add(1)
        text = '{"resize": 8, "color": "RGB"}'
        check(config(f'parameters {{ key: "preprocess" value {{ string_value: {json.dumps(text)} }} }}'), model, 1)


class TestLabelsFile:
    def test_labels_file_of_the_model(self, model: Path, add: Any, bare: Any) -> None:
        add(1, ()), bare(2)
        assert (labels_file_of(model / "1"), labels_file_of(model / "2")) == (None, None)
        (model / "labels.txt").write_text("of the model\n")
        assert labels_file_of(model / "2") == "labels.txt"


# Manifests take precedence over the configuration.

SPEC, OTHER = Preprocess(crop=(8, 8)), Preprocess(crop=(9, 9))
RANKING = Ranking(scores="y", indices="i")


def written_config(folder: Path, **said: Preprocess | Ranking) -> ModelConfigProto:
    written = ModelConfigProto()
    for name in ("y", "z"):
        written.output.add(name=name, label_filename=f"{name}.txt")
        (folder / f"{name}.txt").write_text(f"first of {name}\n")
    for key, value in said.items():
        written.parameters[key].string_value = value.to_json()
    return written


def version(folder: Path, contract: Contract | None = None) -> ModelVersion:
    return ModelVersion(graph_path=folder / "x", manifest=None, golden=None, contract=contract or Contract())


def test_contract_of_a_bare_graph(tmp_path: Path) -> None:
    written = written_config(tmp_path, preprocess=SPEC, ranking=RANKING)
    assert complete_contract(version(tmp_path), written, tmp_path) == Contract(
        preprocess=SPEC, labels=("first of y",), output="y", ranking=RANKING
    )


def test_manifest_takes_precedence(tmp_path: Path) -> None:
    own = Contract(preprocess=OTHER, labels=("own",), output="z")
    assert complete_contract(version(tmp_path, own), written_config(tmp_path, preprocess=SPEC), tmp_path) == own
