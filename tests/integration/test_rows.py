"""No response depends on the other requests of its batch, whatever the configuration of a bare graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import zoo
from drop_in import drop_in
from onnx import parser
from running import Serving

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_client import Client


def graph(
    body: str, inputs: str = "float[n,4] x", weights: str = "", *, opset: int = 18, output: str = "float[n,d] y"
) -> onnx.ModelProto:
    head = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> g'
    model = parser.parse_model(f"{head} ({inputs}) => ({output}) {{ {body} }}")
    generator = np.random.default_rng(3)
    for name, shape in (weight.split(":") for weight in weights.split()):
        array = generator.normal(size=[int(size) for size in shape.split(",")]).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


STATISTICS = "o = Constant<value = float[4] {1,1,1,1}>() z = Constant<value = float[4] {0,0,0,0}>()"
ROWS_ONE = "s = Constant<value = int64[2] {-1,1}>()"
MIXING = {
    "softmax over the first axis": graph("y = Softmax<axis: int = 0>(x)"),
    "mean over the first axis": graph(
        "a = Constant<value = int64[1] {0}>() m = ReduceMean(x, a) y = Sub(x, m)",
    ),
    "attention across rows": graph("k = Transpose(x) s = MatMul(x, k) a = Softmax(s) y = MatMul(a, x)"),
    "time first": graph(
        "o, h, c = LSTM<hidden_size: int = 5>(x, w, r) a = Constant<value = int64[1] {1}>() y = Squeeze(o, a)",
        "float[n,b,4] x",
        "w:1,20,4 r:1,20,5",
        output="float[n,b,5] y",
    ),
    "one scale for all": graph("q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)"),
    "a largest number behind a reshape": graph(
        ROWS_ONE + "h = Reshape(x, s) a = Constant<value = int64[1] {0}>() m = ReduceMax(h, a) y = Sub(x, m)"
    ),
    "the largest integer of all": graph(
        ROWS_ONE + "h = Reshape(x, s) a = Constant<value = int64[1] {0}>() m = ReduceMax(h, a) d = Sub(x, m)"
        "y = Cast<to: int = 1>(d)",
        "int64[n,4] x",
    ),
    "along a dimension that varies": graph(
        "s = Constant<value = int64[2] {-1,2}>() h = Reshape(x, s) p = Transpose(h) t = Shape(x) y = Reshape(p, t)",
        "float[n,b] x",
    ),
    "divided by how many there are": graph(
        "s = Size(x) f = Cast<to: int = 1>(s) y = Div(x, f)",
    ),
    "the rows upside down": graph(
        "b = Constant<value = int64[1] {-1}>() e = Constant<value = int64[1] {-9999}>() "
        "a = Constant<value = int64[1] {0}>() y = Slice(x, b, e, a, b)"
    ),
}
TRAINING = graph(STATISTICS + "y, m, v = BatchNormalization<training_mode: int = 1>(x, o, z, z, o)")
SINGLE = {
    "a layer": graph("h = MatMul(x, w) y = Relu(h)", weights="w:4,4"),
    "softmax over the classes": graph("y = Softmax(x)"),
    "batch norm": graph(STATISTICS + "y = BatchNormalization(x, o, z, z, o)"),
}


def requests(model: onnx.ModelProto, rows: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(1)
    (value,) = model.graph.input
    dims = [dim.dim_value or 4 for dim in value.type.tensor_type.shape.dim[1:]]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return [
        {"x": (generator.normal(size=(count, *dims)) * 10.0**index).astype(dtype)} for index, count in enumerate(rows)
    ]


class TestExecutor:
    @pytest.mark.parametrize("config", ["", "max_batch_size: 4"])
    @pytest.mark.parametrize("model", MIXING.values(), ids=MIXING)
    def test_requests_are_computed_alone(self, model: onnx.ModelProto, config: str, tmp_path: Path) -> None:
        with drop_in(tmp_path, model, config) as served:
            asked = requests(model, (1, 2, 1))
            together = served.ask(*asked)
            for feeds, outputs in zip(asked, together, strict=True):
                np.testing.assert_array_equal(served.ask(feeds)[0]["y"], outputs["y"])

    @pytest.mark.parametrize("model", SINGLE.values(), ids=SINGLE)
    def test_independent_rows_share_a_batch(self, model: onnx.ModelProto, tmp_path: Path) -> None:
        with drop_in(tmp_path, model) as served:
            assert (served.config.max_batch_size, served.proven.separate) == (4, False)
            served.executor.batch_sizes.clear()
            served.ask(*requests(model, (1, 2, 1)))
            assert list(served.executor.batch_sizes) == [4]

    def test_running_statistics_are_refused(self, tmp_path: Path) -> None:
        with (
            pytest.raises(LoweringError, match=r"different response.*evaluation mode"),
            drop_in(tmp_path, TRAINING),
        ):
            pass

    def test_random_numbers_are_accepted(self, tmp_path: Path) -> None:
        model = graph("r = RandomUniformLike(x) y = Add(x, r)")
        with drop_in(tmp_path, model) as served:
            assert served.proven.separate

    @pytest.mark.parametrize(
        "body",
        [
            "h, m, v = BatchNormalization<training_mode: int = 1>(x, a, b, c, d) y = Relu(h)",
            "t = Constant<value = bool {1}>() r = Constant<value = float {0.5}>() y = Dropout(x, r, t)",
        ],
    )
    def test_graph_in_training_mode_is_served_with_a_hint(self, body: str, tmp_path: Path) -> None:
        weights = "a:4 b:4 c:4 d:4" if "(x, a" in body else ""
        with drop_in(tmp_path, graph(body, weights=weights)) as served:
            (note,) = [note for note in served.proven.notes if "in training mode" in note]
            assert "requests are computed one by one" in note
            assert "model.eval()" in note

    def test_sequence_of_any_length_is_one_request(self, tmp_path: Path) -> None:
        with drop_in(tmp_path, MIXING["time first"]) as served:
            assert served.config.max_batch_size == 0
            assert [list(tensor.dims) for tensor in served.config.input] == [[-1, -1, 4]]
            assert served.ask({"x": np.ones((9, 1, 4), np.float32)})[0]["y"].shape == (9, 1, 5)


@pytest.mark.server
@pytest.mark.slow
def test_forty_requests_at_once(tmp_path: Path) -> None:
    """Also where the configuration of a graph asks for batches."""
    store = tmp_path / "store"
    names = ["softmax over the first axis", "time first"]
    for index, name in enumerate(names):
        zoo.add(store, f"bare{index}", MIXING[name])
        zoo.add(
            store,
            f"batched{index}",
            MIXING[name],
            "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 50000 }",
        )
    with Serving(tmp_path, "--model-store", store) as server:
        server.wait_ready()
        with Client(server.url) as client, ThreadPoolExecutor(8) as pool:
            for index, name in enumerate(names):
                feeds = requests(MIXING[name], (2,) * 4) * 10
                for model in (f"bare{index}", f"batched{index}"):
                    alone = [client.model(model).infer(each)["y"] for each in feeds[:4]]
                    together = pool.map(lambda each, model=model: client.model(model).infer(each)["y"], feeds)
                    for expected, found in zip(alone * 10, together, strict=True):
                        np.testing.assert_array_equal(expected, found)
            assert client.model("bare1").infer({"x": np.ones((9, 1, 4), np.float32)})["y"].shape == (9, 1, 5)
