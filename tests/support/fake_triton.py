"""The part of `triton_python_backend_utils` (of Triton's stub process) that the backend uses, in plain Python."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from graphkiln_backend.triton.environment import instances_folder
from graphkiln_backend.triton.metrics import read_metrics

_BF16 = np.dtype(ml_dtypes.bfloat16)
# Of a DLManagedTensor: data pointer (8), device (4 + 4), ndim (4), then the type code. Source: dlpack.h 0.8.
_TYPE_CODE_OFFSET = 20
_UINT, _BFLOAT = 1, 4


def set_type_code(capsule: object, code: int) -> int:
    """Overwrite the type code of a DLPack capsule and return the old one: numpy reads uint16, but not bf16."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    place = ctypes.c_uint8.from_address(get_pointer(capsule, b"dltensor") + _TYPE_CODE_OFFSET)
    old, place.value = place.value, code
    return old


class _Exporter:
    """Object that numpy can import a capsule from."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def read_bf16(capsule: object) -> np.ndarray:
    """Read a bf16 capsule as uint16."""
    assert set_type_code(capsule, _UINT) == _BFLOAT
    return np.from_dlpack(_Exporter(capsule)).view(_BF16)


def write_bf16(array: np.ndarray) -> object:
    """Make a bf16 capsule: that of a uint16 array with another type code."""
    capsule = array.view(np.uint16).__dlpack__()
    assert set_type_code(capsule, _BFLOAT) == _UINT
    return capsule


class Tensor:
    """Hold any type but bf16 as numpy, and bf16 only as DLPack."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        assert array.dtype != _BF16, "pb_utils knows no bf16 in numpy"
        assert array.ndim, "Triton has no scalars"
        self._name, self._array = name, array

    @staticmethod
    def from_dlpack(name: str, capsule: object) -> Tensor:
        tensor = Tensor(name, np.zeros(1))
        tensor._array = np.array(read_bf16(capsule))
        return tensor

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        assert self._array.dtype != _BF16, "pb_utils knows no bf16 in numpy"
        return self._array

    def to_dlpack(self) -> object:
        return write_bf16(self._array)

    @property
    def content(self) -> np.ndarray:
        """Array of a tensor of any type."""
        return self._array


def input_tensor(name: str, array: np.ndarray) -> Tensor:
    """Make a tensor as a request holds it, of any type."""
    tensor = Tensor(name, np.zeros(1))
    tensor._array = array
    return tensor


class InferenceRequest:
    """Request with inputs and names of outputs."""

    def __init__(
        self,
        feeds: Mapping[str, np.ndarray],
        outputs: Collection[str] = ("y",),
        *,
        cancelled: bool = False,
        parameters: str = "",
        request_id: str = "",
    ) -> None:
        self._parameters = parameters
        self._request_id = request_id
        self._tensors = [input_tensor(name, array) for name, array in feeds.items()]
        self._outputs = outputs
        self._cancelled = cancelled
        self.cancellation_checks = 0

    def inputs(self) -> Sequence[Tensor]:
        return self._tensors

    def requested_output_names(self) -> Collection[str]:
        return self._outputs

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return self._request_id

    def is_cancelled(self) -> bool:
        self.cancellation_checks += 1
        return self._cancelled


class TritonError:
    INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, CANCELLED = range(1, 6)

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class TritonModelException(Exception):
    pass


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.error = error
        self.outputs = {tensor.name(): tensor.content for tensor in output_tensors}


class Logger:
    lines: list[tuple[str, str]] = []  # noqa: RUF012 - of the process

    @staticmethod
    def log_info(line: str) -> None:
        Logger.lines.append(("info", line))

    @staticmethod
    def log_warn(line: str) -> None:
        Logger.lines.append(("warning", line))


# Result of `get_model_dir`.
model_dir = ""


def get_model_dir() -> str:
    return model_dir


def metric(name: str, **labels: str) -> float:
    """Value of the only metric of a name whose labels include these, in the files of this process's instances."""
    folder = instances_folder()
    assert folder, "without a supervisor there are no metrics"
    return value_of(read_metrics(folder), name, **labels)


def value_of(lines: Iterable[str], name: str, **labels: str) -> float:
    """Value of the only metric of a name whose labels include these."""
    found = [(line.partition("{")[0], labels_of(line), float(line.rpartition(" ")[2])) for line in lines]
    values = [value for each, own, value in found if each == name and labels.items() <= own.items()]
    assert len(values) == 1, f"{len(values)} metrics {name} with {labels}"
    return values[0]


def labels_of(line: str) -> dict[str, str]:
    """Labels of a line in Prometheus' text format."""
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def reset() -> None:
    """Forget all log lines."""
    Logger.lines.clear()
