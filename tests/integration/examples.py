"""The example repositories of Triton's documentation, with the same names, signatures and configurations.

The graphs are our own: the examples say what they compute, and for the image classifiers only a signature matters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import zoo
from onnx import ModelProto, TensorProto, helper

CPU = "instance_group [ { count: 1 kind: KIND_CPU } ]"


def tensors(kind: str, names: str, data_type: str, dims: str) -> str:
    """Format a block `input` or `output`."""
    entries = ", ".join(f'{{ name: "{name}" data_type: {data_type} dims: [ {dims} ] }}' for name in names.split())
    return f"{kind} [ {entries} ]"


def sum_and_difference(dtype: int) -> ModelProto:
    """`OUTPUT0` is the sum and `OUTPUT1` the difference, computed in INT32."""
    nodes = [
        *(helper.make_node("Cast", [f"INPUT{i}"], [f"cast{i}"], to=TensorProto.INT32) for i in range(2)),
        helper.make_node("Add", ["cast0", "cast1"], ["result0"]),
        helper.make_node("Sub", ["cast0", "cast1"], ["result1"]),
        *(helper.make_node("Cast", [f"result{i}"], [f"OUTPUT{i}"], to=dtype) for i in range(2)),
    ]
    inputs = [zoo.value(f"INPUT{i}", ("batch", 16), dtype) for i in range(2)]
    return zoo.model(nodes, inputs, [zoo.value(f"OUTPUT{i}", ("batch", 16), dtype) for i in range(2)])


def sequence() -> ModelProto:
    """`OUTPUT` is `READY * (INPUT + START)`."""
    nodes = [
        helper.make_node("Add", ["INPUT", "START"], ["sum"]),
        helper.make_node("Mul", ["READY", "sum"], ["OUTPUT"]),
    ]
    inputs = [zoo.value(name, ("batch", 1), TensorProto.INT32) for name in ("INPUT", "START", "READY")]
    return zoo.model(nodes, inputs, [zoo.value("OUTPUT", ("batch", 1), TensorProto.INT32)])


def dyna_sequence(id_type: int) -> ModelProto:
    """`OUTPUT` is `READY * (INPUT + START + END * CORRID)`."""
    nodes = [
        helper.make_node("Cast", ["CORRID"], ["id"], to=TensorProto.INT32),
        helper.make_node("Mul", ["END", "id"], ["last"]),
        helper.make_node("Add", ["INPUT", "START"], ["begun"]),
        helper.make_node("Add", ["begun", "last"], ["sum"]),
        helper.make_node("Mul", ["READY", "sum"], ["OUTPUT"]),
    ]
    inputs = [zoo.value(name, ("batch", 1), TensorProto.INT32) for name in ("INPUT", "START", "END", "READY")]
    inputs.append(zoo.value("CORRID", ("batch", 1), id_type))
    return zoo.model(nodes, inputs, [zoo.value("OUTPUT", ("batch", 1), TensorProto.INT32)])


def classifier(image: str, scores: str, shape: tuple[int, ...], outputs: tuple[int, ...]) -> ModelProto:
    """Scores of an image of a fixed shape, from its sum and random weights."""
    weights = np.random.default_rng(0).normal(size=outputs).astype(np.float32)
    nodes = [
        helper.make_node("ReduceMean", [image], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "weights"], [scores]),
    ]
    return zoo.model(nodes, [zoo.value(image, shape)], [zoo.value(scores, outputs)], {"weights": weights})


def control(name: str, values: str = "int32_false_true: [ 0, 1 ]") -> str:
    """Format a `control_input` of a kind."""
    return f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{name} {values} }} ] }}'


def _add_simple(store: Path) -> None:
    for name, dtype in (("simple", "INT32"), ("simple_int8", "INT8"), ("simple_string", "STRING")):
        config = f'name: "{name}" platform: "onnxruntime_onnx" max_batch_size: 8 '
        config += tensors("input", "INPUT0 INPUT1", f"TYPE_{dtype}", "16")
        config += tensors("output", "OUTPUT0 OUTPUT1", f"TYPE_{dtype}", "16")
        zoo.add(store, name, sum_and_difference(getattr(TensorProto, dtype)), config)


def _add_sequences(store: Path) -> None:
    body = 'platform: "onnxruntime_onnx" max_batch_size: 8 '
    body += tensors("input", "INPUT", "TYPE_INT32", "1") + tensors("output", "OUTPUT", "TYPE_INT32", "1")
    controls = f"control_input [ {control('START')}, {control('READY')} ]"
    kind = "instance_group [ { kind: KIND_CPU } ]"
    zoo.add(store, "simple_sequence", sequence(), f"{body} sequence_batching {{ {controls} }} {kind}")
    for name, dtype in (("simple_dyna_sequence", "UINT64"), ("simple_string_dyna_sequence", "STRING")):
        ids = control("CORRID", f"data_type: TYPE_{dtype}")
        controls = f"control_input [ {control('START')}, {control('END')}, {control('READY')}, {ids} ]"
        oldest = "oldest { max_candidate_sequences: 1024 max_queue_delay_microseconds: 10000 }"
        batching = f"sequence_batching {{ max_sequence_idle_microseconds: 10000000 {oldest} {controls} }}"
        unread = 'parameters [ { key: "execute_delay_ms" value: { string_value: "3" } } ]'
        group = "instance_group [ { count: 2 kind: KIND_CPU } ]"
        zoo.add(store, name, dyna_sequence(getattr(TensorProto, dtype)), f"{body} {batching} {unread} {group}")


def _add_classifiers(store: Path) -> None:
    densenet = """
        name: "densenet_onnx" platform: "onnxruntime_onnx" max_batch_size : 0
        input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ]
                  reshape { shape: [ 1, 3, 224, 224 ] } } ]
        output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 1000 ] reshape { shape: [ 1, 1000, 1, 1 ] }
                   label_filename: "densenet_labels.txt" } ]
    """
    graph = classifier("data_0", "fc6_1", (1, 3, 224, 224), (1, 1000, 1, 1))
    folder = zoo.add(store, "densenet_onnx", graph, densenet + CPU).parent
    (folder / "densenet_labels.txt").write_text("".join(f"class {index}\n" for index in range(1000)))
    scores = "InceptionV3/Predictions/Softmax:0"
    inception = f"""
        name: "inception_onnx" platform: "onnxruntime_onnx" max_batch_size: 0
        input [ {{ name: "input:0" data_type: TYPE_FP32 format: FORMAT_NHWC dims: [ 299, 299, 3 ]
                  reshape {{ shape: [ 1, 299, 299, 3 ] }} }} ]
        output [ {{ name: "{scores}" data_type: TYPE_FP32 dims: [ 1001 ] reshape {{ shape: [ 1, 1001 ] }}
                   label_filename: "inception_labels.txt" }} ]
    """
    folder = zoo.add(
        store, "inception_onnx", classifier("input:0", scores, (1, 299, 299, 3), (1, 1001)), inception + CPU
    ).parent
    (folder / "inception_labels.txt").write_text("".join(f"label {index}\n" for index in range(1001)))


IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""
REPEAT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for index, value in enumerate(values):
                tensors = [pb_utils.Tensor("OUT", np.array([value])), pb_utils.Tensor("IDX", np.uint32([index]))]
                sender.send(pb_utils.InferenceResponse(tensors))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SCRIPTED = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = [pb_utils.Tensor(t.name(), t.as_numpy()[None]) for t in request.inputs()]
            asked = pb_utils.InferenceRequest(
                model_name="simple", requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=inputs
            )
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            outputs = [pb_utils.Tensor(t.name(), t.as_numpy()[0]) for t in answer.output_tensors()]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""


def _add_python(store: Path, name: str, code: str, config: str) -> None:
    folder = store / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    (folder.parent / "config.pbtxt").write_text(f'name: "{name}" backend: "python" {config} {CPU}')


def _add_others(store: Path) -> None:
    strings = tensors("input", "INPUT0", "TYPE_STRING", "-1") + tensors("output", "OUTPUT0", "TYPE_STRING", "-1")
    _add_python(store, "simple_identity", IDENTITY, f"max_batch_size: 8 {strings}")
    repeated = tensors("input", "IN", "TYPE_INT32", "-1") + tensors("output", "OUT", "TYPE_INT32", "1")
    repeated += tensors("output", "IDX", "TYPE_UINT32", "1")
    _add_python(store, "repeat_int32", REPEAT, f"model_transaction_policy {{ decoupled: True }} {repeated}")
    both = tensors("input", "INPUT0 INPUT1", "TYPE_INT32", "16") + tensors(
        "output", "OUTPUT0 OUTPUT1", "TYPE_INT32", "16"
    )
    _add_python(store, "bls_sync", SCRIPTED, both)
    ensemble = store / "ensemble_simple"
    (ensemble / "1").mkdir(parents=True)
    step = """
        step [ { model_name: "simple" model_version: -1
                 input_map [ { key: "INPUT0" value: "INPUT0" }, { key: "INPUT1" value: "INPUT1" } ]
                 output_map [ { key: "OUTPUT0" value: "sum" }, { key: "OUTPUT1" value: "difference" } ] },
               { model_name: "simple" model_version: -1
                 input_map [ { key: "INPUT0" value: "sum" }, { key: "INPUT1" value: "difference" } ]
                 output_map [ { key: "OUTPUT0" value: "OUTPUT0" }, { key: "OUTPUT1" value: "OUTPUT1" } ] } ]
    """
    (ensemble / "config.pbtxt").write_text(
        f'name: "ensemble_simple" platform: "ensemble" max_batch_size: 8 {both} ensemble_scheduling {{ {step} }}'
    )


def build(store: Path) -> Path:
    """Write all example models."""
    _add_simple(store)
    _add_sequences(store)
    _add_classifiers(store)
    _add_others(store)
    return store
