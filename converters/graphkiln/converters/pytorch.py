"""PyTorch modules -> ONNX graphs with a dynamic batch."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

from graphkiln.graph.dtypes import AnyArray
from graphkiln.graph.errors import ConversionError

OPSET = 18
"""Read by every ONNX Runtime since 1.14, hence by every supported Triton release."""

_EXPORT_BATCH = 2
"""Never 1: PyTorch specialises on it, and a baked-in batch is the commonest silent failure of an export."""


def export_graph(
    module: nn.Module, sample: AnyArray, path: Path, *, input_name: str = "INPUT_0", output_name: str = "OUTPUT_0"
) -> None:
    """Writes a module with one input and one output as an ONNX graph.

    Args:
        module: The trained module; it is put in evaluation mode.
        sample: One sample of the input, `[...]` without the batch dimension.
        path: The .onnx file to write; the weights are inside.
        input_name: Name of the graph's input.
        output_name: Name of the graph's output.

    Raises:
        ConversionError: PyTorch cannot export the module.
    """
    example = torch.from_numpy(np.stack([sample] * _EXPORT_BATCH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own deprecations
        try:
            program = torch.onnx.export(
                module.eval(),
                (example,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=[input_name],
                output_names=[output_name],
                opset_version=OPSET,
                verbose=False,
            )
        except Exception as error:
            raise ConversionError(f"PyTorch cannot export {type(module).__name__}: {error}") from error
    if program is None:
        raise ConversionError(f"PyTorch exported nothing for {type(module).__name__}")
    program.save(str(path), external_data=False)


def run_module(module: nn.Module, samples: AnyArray) -> AnyArray:
    """The reference answers: the module in fp32 and evaluation mode, `[samples, ...]` in and out."""
    with torch.inference_mode():
        answers: AnyArray = module.eval()(torch.from_numpy(samples)).numpy()
    return answers
