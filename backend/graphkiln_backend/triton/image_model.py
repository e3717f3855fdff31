"""The model class of a model that takes encoded images for another one: a thin layer between Triton and an executor.

Runs inside Triton's Python stub. It holds no graph: what it decodes is sent to the tensor model inside the server
(Triton's business logic scripting), to the version of its own number, with the contract that the images were prepared
for. So a version is never given what another one's preprocessing made.

Source: Triton Python backend, "Business Logic Scripting".
"""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

from graphkiln_backend.graph.contract import PARAMETER as CONTRACTS
from graphkiln_backend.graph.contract import REQUEST_PARAMETER, Contract, Contracts
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, InvalidInput, ModelNotFound, ModelNotReady
from graphkiln_backend.graph.preprocess import PARAMETER as PREPROCESS
from graphkiln_backend.graph.preprocess import TENSOR_MODEL, Preprocess
from graphkiln_backend.graph.text import bounded
from graphkiln_backend.images.encoded import Decoder
from graphkiln_backend.repository.config import ModelConfigProto, parse_json
from graphkiln_backend.repository.image_config import TENSOR_INPUT, is_stacked, parts_of
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.triton.executor import Cancelled, Outputs
from graphkiln_backend.triton.image_executor import ImageExecutor
from graphkiln_backend.triton.log import log_to_triton
from graphkiln_backend.triton.memory_limit import lift_memory_limit
from graphkiln_backend.triton.metrics import ImageMetrics
from graphkiln_backend.triton.oversized_shapes import protect_texts
from graphkiln_backend.triton.responses import FAILURES, to_response
from graphkiln_backend.triton.sent_models import note_sent
from graphkiln_backend.triton.tensors import to_array

_NICENESS = 5
"""Where decoding and computing share cores, a session that has its samples goes first."""


class TritonPythonModel:
    """One instance of the model that takes images for one version of another model.

    Source: Triton Python backend, "Usage".
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Reads how images become samples.

        Raises:
            TritonModelException: What is published cannot be read.
        """
        lift_memory_limit()
        note_sent(args["model_repository"])
        log_to_triton(args["model_name"])
        os.nice(_NICENESS)
        try:
            config = parse_json(args["model_config"])
            self._tensor_model = TensorModel(config, int(args["model_version"]))
            self._decoder = Decoder(self._tensor_model.preprocess, threads=usable_cores())
        except GraphkilnError as error:
            raise pb_utils.TritonModelException(bounded(f"{args['model_name']}: {error}")) from error
        parts = parts_of(config)
        self._asking = ThreadPoolExecutor(parts, thread_name_prefix="graphkiln-ask")
        self._executor = ImageExecutor(
            self._decoder,
            self._tensor_model.ask,
            outputs=[*self._tensor_model.output_types],
            batching=config.max_batch_size > 0,
            stacked=is_stacked(config),
            contract=self._tensor_model.contract.digest if self._tensor_model.contract else "",
            asking=self._asking,
            parts=parts,
        )
        self._metrics = ImageMetrics(
            args["model_instance_name"],
            args["model_name"],
            args["model_version"],
            FAILURES.counts,
            self._decoder.seconds,
        )
        pb_utils.deserialize_bytes_tensor = protect_texts(pb_utils.deserialize_bytes_tensor)
        gc.freeze()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Computes a response for every request; an error in one is in that one's response only.

        Args:
            requests: `pb_utils.InferenceRequest`s.

        Returns:
            One `pb_utils.InferenceResponse` per request, in order.
        """
        return list(map(to_response, self._executor.execute_batch(requests), requests))

    def finalize(self) -> None:
        """Ends the threads."""
        self._metrics.close()
        self._decoder.close()
        self._asking.shutdown()


class TensorModel:
    """The version of the model that computes.

    Args:
        config: Of the model that takes images.
        version: Its version, and that of the model that computes.

    Attributes:
        contract: What the version says; None where nothing is published of it.
        preprocess: How images become samples.
        output_types: Type of each output, in their order.

    Raises:
        ManifestError: What is published cannot be read.
        InvalidInput: Nothing says how an image becomes a sample.
    """

    def __init__(self, config: ModelConfigProto, version: int) -> None:
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        self._name, self._version, self._input = parameters[TENSOR_MODEL], version, parameters[TENSOR_INPUT]
        self.contract = _contract(parameters, version)
        self.preprocess = self.contract.preprocess if self.contract and self.contract.preprocess else _spec(parameters)
        self.output_types = {output.name: DType.from_config(output.data_type) for output in config.output}

    def ask(self, samples: AnyArray, outputs: tuple[str, ...]) -> Outputs:
        """Has the version compute.

        Args:
            samples: Its input.
            outputs: Names of the outputs to compute.

        Raises:
            GraphkilnError: It did not.
        """
        response = pb_utils.InferenceRequest(
            model_name=self._name,
            model_version=self._version,
            requested_output_names=list(outputs),
            inputs=[pb_utils.Tensor(self._input, samples)],
            parameters={REQUEST_PARAMETER: self.contract.digest} if self.contract else {},
        ).exec()
        if response.has_error():
            raise _read_error(response.error())
        tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
        return {name: to_array(tensors[name], self.output_types[name]) for name in outputs}


def _contract(parameters: dict[str, str], version: int) -> Contract | None:
    return Contracts.from_json(parameters[CONTRACTS]).find(str(version)) if CONTRACTS in parameters else None


def _spec(parameters: dict[str, str]) -> Preprocess:
    if PREPROCESS not in parameters:
        raise InvalidInput("nothing says how an image becomes the input of this version")
    return Preprocess.from_json(parameters[PREPROCESS])


def _read_error(error: Any) -> GraphkilnError:
    """An error of the tensor model, as the same one of this model."""
    codes = pb_utils.TritonError
    kinds: dict[Any, type[GraphkilnError]] = {
        codes.INVALID_ARG: InvalidInput,
        codes.NOT_FOUND: ModelNotFound,
        codes.UNAVAILABLE: ModelNotReady,
        codes.CANCELLED: Cancelled,
    }
    return kinds.get(error.code(), ExecutionError)(error.message())
