"""Writes config.pbtxt with Triton's own protobuf definitions."""

from __future__ import annotations

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from graphkiln.graph.preprocess import PARAMETER, Preprocess
from graphkiln.graph.signature import Signature, TensorSpec

BACKEND = "graphkiln"


def config_text(
    name: str,
    signature: Signature,
    *,
    max_batch_size: int,
    preprocess: Preprocess | None,
    labels_file: str | None,
) -> str:
    """The config.pbtxt of a saved graph.

    Args:
        name: Model name.
        signature: Inputs and outputs; with a varying first dimension each when `max_batch_size` is above 0.
        max_batch_size: Largest batch that Triton may form; 0 for a graph that cannot be batched.
        preprocess: Published for clients.
        labels_file: File in the model's folder with one class name a line, for the first output.
    """
    config = pb.ModelConfig(name=name, backend=BACKEND, max_batch_size=max_batch_size)
    for spec in signature.inputs:
        config.input.add(name=spec.name, data_type=_type(spec), dims=_dims(spec, batched=max_batch_size > 0))
    for spec in signature.outputs:
        config.output.add(name=spec.name, data_type=_type(spec), dims=_dims(spec, batched=max_batch_size > 0))
    if labels_file:
        config.output[0].label_filename = labels_file
    if max_batch_size > 0:
        config.dynamic_batching.SetInParent()
        _add_warmup(config)
    if preprocess:
        config.parameters[PARAMETER].string_value = preprocess.to_json()
    return text_format.MessageToString(config)


def _add_warmup(config: pb.ModelConfig) -> None:
    """Lets Triton send itself one sample before it is ready: the first request is slow all the way through Triton."""
    if any(dim < 0 for tensor in config.input for dim in tensor.dims):
        return  # no size is known to be right
    warmup = config.model_warmup.add(name="one sample", batch_size=1, count=3)
    for tensor in config.input:
        warmup.inputs[tensor.name].data_type = tensor.data_type
        warmup.inputs[tensor.name].dims.extend(tensor.dims)
        warmup.inputs[tensor.name].zero_data = True


def _type(spec: TensorSpec) -> int:
    return int(pb.DataType.Value(spec.dtype.config_name))


def _dims(spec: TensorSpec, *, batched: bool) -> list[int]:
    shape = spec.shape[1:] if batched else spec.shape
    return [dim if isinstance(dim, int) else -1 for dim in shape]
