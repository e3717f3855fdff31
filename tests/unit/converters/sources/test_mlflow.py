"""Folders that MLflow saved: flavors, signatures, input examples, refusals."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import skops.io  # noqa: F401 - looks at all attributes of all modules: before those of transformers, which are lazy
import torch
import yaml
from onnx import parser
from recipes import recipe
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.recipe import name_of
from graphkiln_converters.sources.base import SourceModel, suggest
from graphkiln_converters.sources.mlflow import fetch, open_source
from graphkiln_converters.torch_libraries import import_torchvision

import_torchvision()
import mlflow  # noqa: E402
import transformers  # noqa: E402
from mlflow.models import ModelSignature, infer_signature  # noqa: E402
from mlflow.types import ColSpec, Schema, TensorSpec  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 3)), columns=["a", "b", "c"])
CLASSES = (TABLE.a > 0).astype(int)
PLAIN: dict[str, Any] = {"pip_requirements": ["mlflow"]}
GRAPH = parser.parse_model("""<ir_version: 9, opset_import: ["": 18]>
g (float[n,4] data, int64[n,1] ids) => (float[n,4] scores) { f = Cast<to=1>(ids) scores = Add(data, f) }""")
PAIR = {"data": np.arange(8, dtype="f4").reshape(2, 4), "ids": np.array([[5], [7]])}


class Pair(torch.nn.Module):
    def forward(self, image: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return image * 2 + ids


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 2), torch.nn.ReLU())


Opened = Callable[..., SourceModel]


@pytest.fixture
def opened() -> Any:
    """Open a folder; models are closed."""
    models = []

    def open_folder(folder: Path, **options: Any) -> SourceModel:
        models.append(open_source(str(folder), recipe(**options)))
        return models[-1]

    yield open_folder
    for model in models:
        model.close()


@pytest.fixture
def graph_folder(tmp_path: Path) -> Path:
    """An ONNX model with a signature and an example."""
    signature = infer_signature(PAIR, {"scores": PAIR["data"]})
    mlflow.onnx.save_model(GRAPH, tmp_path / "onnx", signature=signature, input_example=PAIR, **PLAIN)
    return tmp_path / "onnx"


@pytest.fixture
def table_folder(tmp_path: Path) -> Path:
    """A scikit-learn model with an example of three rows, saved by skops."""
    estimator = make_pipeline(StandardScaler(), LogisticRegression()).fit(TABLE, CLASSES)
    signature = infer_signature(TABLE, estimator.predict(TABLE))
    mlflow.sklearn.save_model(
        estimator, tmp_path / "table", signature=signature, input_example=TABLE[["c", "a", "b"]].head(3), **PLAIN
    )
    return tmp_path / "table"


def change(folder: Path, **values: Any) -> None:
    """Change values of MLmodel."""
    file = folder / "MLmodel"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | values))


def with_signature(folder: Path, inputs: Schema | None, outputs: Schema | None = None) -> None:
    change(folder, signature=ModelSignature(inputs, outputs).to_dict())


def test_a_graph_keeps_the_names_and_types_of_its_example(opened: Opened, graph_folder: Path) -> None:
    model = opened(graph_folder)
    assert [(spec.name, spec.dtype) for spec in model.inputs] == [("data", DType.FP32), ("ids", DType.INT64)]
    for spec in model.inputs:
        assert spec.known is not None
        assert spec.known.dtype == spec.dtype.numpy
        assert spec.known[:2].tolist() == PAIR[spec.name].tolist()
        assert len(spec.known) > 2, "an example alone is too small a proof"
    assert "mlflow-skinny" in model.libraries
    assert any("logged by MLflow" in note for note in model.notes)


def test_an_estimator_gets_the_columns_of_its_example_in_its_order(opened: Opened, table_folder: Path) -> None:
    (spec,) = opened(table_folder).inputs
    assert spec.known is not None
    assert np.allclose(spec.known[:3], TABLE.head(3).to_numpy())


def test_tables_of_float32_are_so_by_the_signature(opened: Opened, table_folder: Path) -> None:
    for kind, table in (("float", np.float32), ("double", np.float64)):
        with_signature(table_folder, Schema([ColSpec(kind, name) for name in TABLE.columns]))
        model: Any = opened(table_folder)
        assert model.table is table


def test_text_and_numbers_have_inputs_by_column(opened: Opened, tmp_path: Path) -> None:
    from sklearn.compose import ColumnTransformer

    table = TABLE.assign(color=np.where(TABLE.b > 0, "red", "blue").astype(object))[["color", "a"]]
    steps = ColumnTransformer([("w", OneHotEncoder(), ["color"]), ("n", StandardScaler(), ["a"])])
    estimator = make_pipeline(steps, LogisticRegression()).fit(table, CLASSES)
    mlflow.sklearn.save_model(
        estimator, tmp_path / "m", signature=infer_signature(table), input_example=table.head(2), **PLAIN
    )
    known = {spec.name: spec.known for spec in opened(tmp_path / "m").inputs}
    assert known["color"] is not None
    assert known["color"][:2].tolist() == table[["color"]].head(2).to_numpy().tolist()
    with_signature(tmp_path / "m", Schema([ColSpec("double", "color"), ColSpec("double", "a")]))
    with pytest.raises(ConversionError, match="input example is damaged, or disagrees"):
        opened(tmp_path / "m")
    change(tmp_path / "m", saved_input_example_info=None)
    with pytest.raises(ConversionError, match="'color' is float64, the model takes text"):
        opened(tmp_path / "m")


@pytest.mark.wide
def test_pickles_need_allow_code(opened: Opened, tmp_path: Path) -> None:
    estimator = LogisticRegression().fit(TABLE.to_numpy(), CLASSES)
    mlflow.sklearn.save_model(estimator, tmp_path / "sk", serialization_format="cloudpickle", **PLAIN)
    mlflow.pytorch.save_model(Net(), tmp_path / "torch", serialization_format="pickle", **PLAIN)
    program = {"serialization_format": "pt2", "input_example": np.zeros((2, 3), "f4")}
    mlflow.pytorch.save_model(Net(), tmp_path / "program", **program, **PLAIN)
    for name, shape in (("sk", {}), ("torch", {"": (3,)}), ("program", {})):
        with pytest.raises(ConversionError, match="can run code"):
            opened(tmp_path / name)
        (spec,) = opened(tmp_path / name, allow_code=True, shapes=shape).inputs
        assert spec.shape == (3,)
    with pytest.raises(ConversionError, match="neither a signature nor an input example"):
        opened(tmp_path / "torch", allow_code=True)


def test_modules_of_several_inputs(opened: Opened, tmp_path: Path) -> None:
    example = {"image": np.ones((2, 6), "f4"), "ids": np.array([[1], [4]])}
    signature = infer_signature(example, np.ones((2, 6), "f4"))
    mlflow.pytorch.save_model(
        Pair(), tmp_path / "m", serialization_format="pickle", signature=signature, input_example=example, **PLAIN
    )
    model = opened(tmp_path / "m", allow_code=True)
    assert {spec.name: (spec.dtype, spec.shape) for spec in model.inputs} == {
        "image": (DType.FP32, (6,)), "ids": (DType.INT64, (1,)),
    }  # fmt: skip
    assert model.run(example)["output"].tolist() == [[3.0] * 6, [6.0] * 6]


def test_a_module_has_the_sizes_of_its_signature(opened: Opened, tmp_path: Path) -> None:
    signature = ModelSignature(Schema([TensorSpec(np.dtype("float32"), (-1, -1, 3))]))
    mlflow.pytorch.save_model(Net(), tmp_path / "m", serialization_format="pickle", signature=signature, **PLAIN)
    (spec,) = opened(tmp_path / "m", allow_code=True).inputs
    assert spec.shape[1] == 3
    assert spec.dynamic == {0: (1, 2 * spec.shape[0])}


@pytest.mark.wide
def test_texts_of_an_example_become_tokens(opened: Opened, tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "day"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    mlflow.transformers.save_model(
        {"model": transformers.BertForSequenceClassification(config).eval(), "tokenizer": tokenizer},
        tmp_path / "m",
        task="text-classification",
        signature=ModelSignature(Schema([ColSpec("string")])),
        input_example=["good day", "bad"],
        **PLAIN,
    )
    ids, mask = opened(tmp_path / "m").inputs
    assert ids.known is not None
    assert mask.known is not None
    assert ids.known[:2, :5].tolist() == [[2, 5, 7, 3, 0], [2, 6, 3, 0, 0]]
    assert mask.known[:2].sum(1).tolist() == [4, 3]
    (tmp_path / "m" / "model" / "model.safetensors").unlink()
    change(tmp_path / "m", model_size_bytes=None)
    with pytest.raises(ConversionError, match="no weights"):
        opened(tmp_path / "m")


FLOAT = np.dtype("float32")
WRONG = {
    "names": (Schema([TensorSpec(FLOAT, (-1, 4), "x"), TensorSpec(np.dtype("int64"), (-1, 1), "ids")]), "are x, ids"),
    "count": (Schema([TensorSpec(FLOAT, (-1, 4), "data")]), "1 inputs, the model 2"),
    "shape": (
        Schema([TensorSpec(FLOAT, (-1, 5), "data"), TensorSpec(np.dtype("int64"), (-1, 1), "ids")]),
        r"\[-1, 5\], the model's \[-1, 4\]",
    ),
    "type": (
        Schema([TensorSpec(np.dtype("float64"), (-1, 4), "data"), TensorSpec(np.dtype("int64"), (-1, 1), "ids")]),
        "'data' is float64, the model's FP32",
    ),
    "columns": (Schema([ColSpec("double", "a")]), "1 columns, the model takes 5"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_signature_that_disagrees_with_a_graph(opened: Opened, graph_folder: Path, fault: str) -> None:
    schema, words = WRONG[fault]
    with_signature(graph_folder, schema)
    with pytest.raises(ConversionError, match=words):
        opened(graph_folder)


def test_outputs_that_disagree(opened: Opened, graph_folder: Path) -> None:
    for tensor, words in (
        (TensorSpec(FLOAT, (-1, 3), "scores"), "output 'scores'"),
        (TensorSpec(np.dtype("int64"), (-1, 4), "scores"), "int64"),
        (TensorSpec(FLOAT, (-1, 4), "labels"), "'labels' is not one of the model's: scores"),
    ):
        with_signature(graph_folder, infer_signature(PAIR).inputs, Schema([tensor]))
        with pytest.raises(ConversionError, match=words):
            opened(graph_folder)


def test_a_signature_of_another_table(opened: Opened, table_folder: Path) -> None:
    for columns, words in ((["a", "b", "x"], "the model's a, b, c"), (["a", "b"], "2 columns, the model takes 3")):
        with_signature(table_folder, Schema([ColSpec("double", name) for name in columns]))
        with pytest.raises(ConversionError, match=words):
            opened(table_folder)


def test_an_example_that_does_not_fit(opened: Opened, graph_folder: Path) -> None:
    (graph_folder / "input_example.json").write_text('{"data": [[1, 2, 3]], "ids": [[1]]}')
    change(graph_folder, signature=None, model_size_bytes=None)
    with pytest.raises(ConversionError, match=r"'data' is \[1, 3\], expected \[-1, 4\]"):
        opened(graph_folder)


def test_an_incomplete_model(opened: Opened, graph_folder: Path, table_folder: Path) -> None:
    for file in (table_folder / "model.skops", next(graph_folder.glob("*.onnx"))):
        whole = file.read_bytes()
        file.write_bytes(whole[:-9])
        with pytest.raises(ConversionError, match="is incomplete"):
            opened(file.parent)
        change(file.parent, model_size_bytes=None)  # as releases before 2.0 wrote it
        with pytest.raises(ConversionError, match=r"not an estimator|cannot be|damaged|not an ONNX"):
            opened(file.parent)
    (graph_folder / "MLmodel").write_text("flavors: [")
    with pytest.raises(ConversionError, match="damaged"):
        opened(graph_folder)


def test_files_outside_of_the_folder_are_not_read(opened: Opened, graph_folder: Path) -> None:
    shutil.copy(next(graph_folder.glob("*.onnx")), graph_folder.parent / "other.onnx")
    change(graph_folder, flavors={"onnx": {"data": "../other.onnx"}})
    with pytest.raises(ConversionError, match=r"'../other.onnx', is not there"):
        opened(graph_folder)


def test_flavors_that_are_not_supported(opened: Opened, graph_folder: Path) -> None:
    change(graph_folder, flavors={"prophet": {}, "python_function": {}})
    with pytest.raises(ConversionError, match=r"prophet, python_function, .*onnx, sklearn, pytorch, transformers"):
        opened(graph_folder)
    change(graph_folder, flavors={"transformers": {"source_model_name": "bert-base-uncased"}})
    with pytest.raises(ConversionError, match="huggingface:bert-base-uncased"):
        opened(graph_folder)
    with pytest.raises(ConversionError, match="there is no file"):
        opened(graph_folder.parent)


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConversionError, match="set MLFLOW_TRACKING_URI"):
        fetch("models:/m/1", tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    before = dict(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for place in (f"127.0.0.1:{silent.getsockname()[1]}", "user:secret@127.0.0.1:1"):
            monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{place}")
            with pytest.raises(ConversionError, match="MLflow at http://127") as caught:
                fetch("models:/m/1", tmp_path)
            assert "secret" not in str(caught.value)
    assert os.environ.keys() - {"MLFLOW_TRACKING_URI"} == before.keys()
    with pytest.raises(ConversionError, match="expected models:/NAME/VERSION"):
        fetch("models:/m", tmp_path)
    assert not [*tmp_path.iterdir()]


def test_names_of_sources(graph_folder: Path) -> None:
    assert name_of("mlflow:models:/digits/3") == "digits"
    assert name_of("mlflow:models:/digits@champion") == "digits"
    assert name_of("mlflow:runs:/0123abc/classifier") == "classifier"
    assert "mlflow:models:/digits/3" in suggest("models:/digits/3", ["mlflow"])
    assert f"mlflow:{graph_folder}" in suggest(str(graph_folder), ["mlflow"])
