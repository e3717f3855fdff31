"""Models of Keras, computed by PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from recipes import recipe

os.environ["KERAS_BACKEND"] = "torch"
import keras

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.keras import open_source

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.keras"


def test_inputs_are_those_of_the_model(path: Path) -> None:
    first, second = keras.Input((None, 3), name="a"), keras.Input((2,), dtype="int32", name="b")
    summed = keras.ops.sum(first, axis=1)
    keras.Model([first, second], [keras.layers.Dense(2)(summed), second]).save(path)
    model = open_source(str(path), recipe())
    assert [(spec.name, spec.dtype, spec.shape) for spec in model.inputs] == [
        ("a", "FP32", (8, 3)),
        ("b", "INT32", (2,)),
    ]
    assert model.inputs[0].dynamic == {0: (1, 16)}
    outputs = model.run({"a": np.ones((4, 8, 3), np.float32), "b": np.ones((4, 2), np.int32)})
    assert [output.shape for output in outputs.values()] == [(4, 2), (4, 2)]


def test_code_needs_allow_code(path: Path) -> None:
    keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x * 2)]).save(path)
    with pytest.raises(ConversionError, match=r"contains code.*--allow-code"):
        open_source(str(path), recipe())
    assert open_source(str(path), recipe(allow_code=True)).inputs


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nonsense"])
def test_other_files_are_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConversionError, match="Keras 3 cannot load"):
        open_source(str(path), recipe())


def test_an_older_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.h5").touch()
    with pytest.raises(ConversionError, match=r"is not a \.keras file"):
        open_source(str(tmp_path / "m.h5"), recipe())
