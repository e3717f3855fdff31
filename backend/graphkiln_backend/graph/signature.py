"""Names, dtypes and shapes of a graph's inputs and outputs, and the only validator of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ManifestError, SignatureError

# A fixed size, or the symbol of a dynamic size (equal symbols have equal sizes).
Dim = int | str

# The symbol of the batch dimension.
BATCH = "batch"
# The only entry in the shape of a tensor of unknown rank.
ANY_RANK = "..."


def free_dim(tensor: str, axis: int) -> str:
    """Unique symbol of a dynamic dimension without a name in the graph."""
    return f"{tensor}.{axis}"


def counted_dim(tensor: str, axis: int) -> str:
    """Symbol of a dimension whose size depends on values, such as the number of detected boxes."""
    return f"?{tensor}.{axis}"


# Symbols without a meaning to users: `free_dim`, `counted_dim`; those that exporters number, in sums and products, too.
_UNNAMED = re.compile(r".+\.\d+", re.DOTALL)
_NUMBERED = re.compile(r"\b(?:[su]|unk__|DynamicDimension\.)(\d+)\b")


def readable_dim(dim: Dim) -> str:
    """Return a dimension as users see it: its size, its name, -1 (as in config.pbtxt) without one, or `dim_<i>`.

    Equal numbers are equal sizes: torch's `s53` is `dim_53`.
    """
    named = _NUMBERED.sub(r"dim_\1", str(dim))
    return "-1" if _UNNAMED.fullmatch(named) else named


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output.

    Attributes:
        name: Name of the tensor in the graph and in requests.
        dtype: Element type.
        shape: One entry per dimension: a size or a symbol such as `"batch"`.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ManifestError("a tensor has an empty name")
        for dim in self.shape:
            if isinstance(dim, int) and dim < 0:
                raise ManifestError(f"tensor '{self.name}' has a dimension of {dim}; name it instead")

    @property
    def has_rank(self) -> bool:
        """True if the rank is known."""
        return self.shape != (ANY_RANK,)

    @property
    def varies(self) -> bool:
        """True if the first dimension is dynamic."""
        return bool(self.shape) and self.has_rank and isinstance(self.shape[0], str)

    @property
    def batchable(self) -> bool:
        """True if the first dimension is dynamic and does not depend on values."""
        return self.varies and not str(self.shape[0]).startswith("?")

    def is_like(self, other: TensorSpec) -> bool:
        """Compare names, dtypes and, if both are known, ranks."""
        same_rank = len(self.shape) == len(other.shape) or not (self.has_rank and other.has_rank)
        return (self.name, self.dtype) == (other.name, other.dtype) and same_rank

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{','.join(map(readable_dim, self.shape))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """All inputs and outputs of a graph, in the graph's own order.

    Attributes:
        inputs: Required inputs.
        outputs: Outputs.
        optional_inputs: Inputs with a default in the graph.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    optional_inputs: tuple[TensorSpec, ...] = ()

    def __post_init__(self) -> None:
        for kind, specs in (("input", (*self.inputs, *self.optional_inputs)), ("output", self.outputs)):
            names = [spec.name for spec in specs]
            for name in names:
                if names.count(name) > 1:
                    raise ManifestError(f"two {kind}s are named '{name}'")

    @property
    def batchable(self) -> bool:
        """True if the first dimension of every input and output is dynamic and does not depend on values."""
        return all(spec.batchable for spec in (*self.inputs, *self.outputs))

    @property
    def varies(self) -> bool:
        """True if the first dimension of every input and output is dynamic."""
        return all(spec.varies for spec in (*self.inputs, *self.outputs))

    @property
    def fixed_batch(self) -> int | None:
        """The fixed first dimension common to all inputs and outputs, or None."""
        sizes = {spec.shape[0] if spec.shape else None for spec in (*self.inputs, *self.outputs)}
        size = sizes.pop() if len(sizes) == 1 else None
        return size if isinstance(size, int) else None

    def check(self, feeds: Mapping[str, AnyArray]) -> None:
        """Validate tensors against the inputs: names, dtypes, ranks, sizes, and equal sizes of equal symbols.

        Raises:
            SignatureError: A tensor does not match; the error has the expected and the given value.
        """
        known = ", ".join(str(spec) for spec in self.inputs)
        for name in feeds:
            if all(spec.name != name for spec in (*self.inputs, *self.optional_inputs)):
                raise SignatureError(f"unknown input '{name}'", expected=known, got=name)
        sizes: dict[str, int] = {}
        for spec in self.inputs:
            if spec.name not in feeds:
                raise SignatureError(f"missing input '{spec.name}'", expected=known, got=", ".join(feeds) or "no input")
            _check_tensor(spec, feeds[spec.name], sizes)
        for spec in self.optional_inputs:
            if spec.name in feeds:
                _check_tensor(spec, feeds[spec.name], sizes)

    def check_answers(self, feeds: Mapping[str, AnyArray], outputs: Mapping[str, AnyArray]) -> None:
        """Validate the outputs of a graph against its declaration, like `check`; equal symbols as in the inputs, too.

        Raises:
            SignatureError: An output differs from what the graph declares.
        """
        sizes: dict[str, int] = {}
        for spec in (*self.inputs, *self.optional_inputs):
            if spec.name in feeds:
                _mismatch(spec, feeds[spec.name], sizes)
        for spec in self.outputs:
            if spec.name in outputs:
                _check_tensor(spec, outputs[spec.name], sizes, "output")


def _check_tensor(spec: TensorSpec, array: AnyArray, sizes: dict[str, int], kind: str = "input") -> None:
    wrong = _mismatch(spec, array, sizes)
    if wrong:
        got = f"{_dtype_name(array)}[{','.join(map(str, array.shape))}]"
        raise SignatureError(f"wrong {wrong} of {kind} '{spec.name}'", expected=str(spec), got=got)


def _mismatch(spec: TensorSpec, array: AnyArray, sizes: dict[str, int]) -> str:
    if array.dtype != spec.dtype.numpy and not (spec.dtype is DType.BYTES and array.dtype.kind in "OSU"):
        return "dtype"
    if not spec.has_rank:
        return ""
    if len(array.shape) != len(spec.shape):
        return "rank"
    for axis, (dim, size) in enumerate(zip(spec.shape, array.shape, strict=True)):
        if dim != size and (isinstance(dim, int) or sizes.setdefault(dim, size) != size):
            known = f" ('{readable_dim(dim)}' is {sizes[dim]} elsewhere)" if isinstance(dim, str) else ""
            return f"size in dimension {axis}{known}"
    return ""


def _dtype_name(array: AnyArray) -> str:
    try:
        return str(DType.from_numpy(array.dtype))
    except ManifestError:
        return str(array.dtype)
