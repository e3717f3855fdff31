"""Read a graph in OpenVINO IR (`NAME.xml` with its weights in `NAME.bin`) without OpenVINO.

The server and the commands need the signature of a graph before an engine is imported. OpenVINO may crash on damaged
files, so both are checked here before it opens them.

Source: OpenVINO, "OpenVINO IR format" and "Operation Sets"; versions 10 and 11 as its `read_model` (2026.4) reads them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from xml.parsers import expat

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import TEXT_LIMIT, read_bytes, stamp_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import ANY_RANK, Dim, Signature, TensorSpec, counted_dim, free_dim

FORMAT = "OpenVINO IR"
SUFFIX = ".xml"
WEIGHTS_SUFFIX = ".bin"
HOW_TO_MAKE = "write it again with its weights: openvino.save_model(model, 'model.xml')"

_VERSIONS = (10, 11)
_LEGACY_VERSION = 10
_MOST_GRAPHS = 8  # remembered
_MOST_DIMENSIONS = 32  # of a numpy array
# Names of element types in ports that are not those of constants in capital letters.
_OTHER_NAMES = {"FP16": "f16", "FP32": "f32", "FP64": "f64", "BOOL": "boolean", "BIN": "u1"}
_BITS = re.compile(r"[a-z]+([0-9]+)")
_SEPARATOR = re.compile(r"(?<!\\),")  # of names, which escape their own commas

_PRODUCTS = frozenset(
    ("Convolution", "ConvolutionBackpropData", "GroupConvolution", "GroupConvolutionBackpropData", "MatMul")
)
# Layers whose number of rows depends on values.
_COUNTING = frozenset(("NonMaxSuppression", "NMSRotated", "MulticlassNms", "MatrixNms", "NonZero", "Unique"))
_DRAWING = frozenset(("RandomUniform", "Multinomial"))
_STATES = frozenset(("ReadValue", "Assign"))
_PRECISIONS = {"f32": Precision.FP32, "f16": Precision.FP16, "bf16": Precision.BF16}


@dataclass(frozen=True, kw_only=True, slots=True)
class IrGraph:
    """Facts of a graph in OpenVINO IR.

    Attributes:
        version: Version of the format.
        signature: Inputs and outputs in OpenVINO's order, by the alphabetically first of their names, as in OpenVINO.
        precision: Precision of most products; int8 if values are quantized. Weights that are only stored in fewer bits
            and decompressed before a product do not count.
        operators: Type -> number of layers, most frequent first, with those of loop bodies and branches.
        weights: Element type -> number of elements of all constants.
        weight_bytes: Size of all constants.
    """

    version: int
    signature: Signature
    precision: Precision
    operators: Mapping[str, int]
    weights: Mapping[str, int]
    weight_bytes: int

    @property
    def draws_numbers(self) -> bool:
        """True if equal requests may get different responses."""
        return not _DRAWING.isdisjoint(self.operators)

    @property
    def keeps_states(self) -> bool:
        """True if requests change the responses to later ones."""
        return not _STATES.isdisjoint(self.operators)


def is_ir(path: Path) -> bool:
    """Return true for the name of a graph in OpenVINO IR."""
    return path.suffix.lower() == SUFFIX


def weights_of(path: Path) -> Path:
    """Return the file of a graph's weights, which has the same name."""
    return path.with_suffix(WEIGHTS_SUFFIX)


def read_ir(path: Path) -> IrGraph:
    """Read a graph and check both files; they are read again only after a change.

    Raises:
        RepositoryError: A file is missing, damaged or cut short, or of a version that OpenVINO does not read.
        ManifestError: Triton does not support an element type.
    """
    return _read_once(path, stamp_of(path), stamp_of(weights_of(path)))


@lru_cache(maxsize=_MOST_GRAPHS)
def _read_once(path: Path, _: tuple[int, ...], weights: tuple[int, ...]) -> IrGraph:
    try:
        net = _Document(read_bytes(path, TEXT_LIMIT))
        if net.version not in _VERSIONS:
            raise RepositoryError(
                f"{path} is {FORMAT} of version {net.version}, and OpenVINO reads {' and '.join(map(str, _VERSIONS))}",
                hint=f"convert the source model again (openvino.convert_model), and {HOW_TO_MAKE}",
            )
        _check_weights(path, net, exist=bool(weights))
        return IrGraph(
            version=net.version,
            signature=_signature(net),
            precision=_precision(net),
            operators=dict(Counter(layer.kind for layer in net.all_layers).most_common()),
            weights=dict(_elements(net).most_common()),
            weight_bytes=sum(layer.count("size") for layer in net.constants),
        )
    except OSError as error:
        raise RepositoryError(f"{path} cannot be read: {error.strerror or error}") from error
    except (expat.ExpatError, ValueError, LookupError, RecursionError, MemoryError) as error:
        raise RepositoryError(
            f"{path} is not a graph in {FORMAT}: {error}", hint=f"the file is damaged or cut short: {HOW_TO_MAKE}"
        ) from error


# The document:
#
#     <net version="11">
#         <layers>
#             <layer id="0" name="x" type="Parameter">
#                 <data shape="?,3" element_type="f32" />
#                 <output><port id="0" precision="FP32" names="x"><dim>-1</dim><dim>3</dim></port></output>
#             </layer>
#             <layer id="1" name="w" type="Const"><data element_type="f32" shape="3, 4" offset="0" size="48" /> ...
#             <layer id="3" name="y/sink" type="Result" output_names="y"><input><port ...
#         </layers>
#         <edges><edge from-layer="0" from-port="0" to-layer="2" to-port="0" /> ...
#
# Layers of type If, Loop and TensorIterator contain `body` elements with layers and edges of their own.


@dataclass(slots=True)
class _Port:
    id: str
    precision: str
    names: Sequence[str]
    dims: list[int] = field(default_factory=list)

    @property
    def element_type(self) -> str:
        return _OTHER_NAMES.get(self.precision, self.precision.lower())


@dataclass(slots=True)
class _Layer:
    id: str
    name: str
    kind: str
    names: Sequence[str]
    data: Mapping[str, str] = field(default_factory=dict)
    inputs: list[_Port] = field(default_factory=list)
    outputs: list[_Port] = field(default_factory=list)

    def count(self, key: str) -> int:
        """Return a number of bytes.

        Raises:
            ValueError: It is not one.
        """
        text = self.data.get(key, "")
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(f"the {key} of layer '{self.name}' is '{text}'")
        return int(text)


class _Document:
    """A parsed document.

    Attributes:
        version: Version of the format.
        layers: Layers of the graph itself by id, in order.
        all_layers: These, and the layers of loop bodies and branches.
        sources: Id of a layer -> ids of layer and port that its first input comes from.

    Raises:
        ValueError: It is not a graph.
        ExpatError: It is not XML.
    """

    def __init__(self, content: bytes) -> None:
        self.version = 0
        self.layers: dict[str, _Layer] = {}
        self.all_layers: list[_Layer] = []
        self.sources: dict[str, tuple[str, str]] = {}
        self._open: list[str] = []
        self._nested: list[_Layer] = []  # the layers around the current element
        self._text = ""
        parser = expat.ParserCreate()  # without external entities; documents that define some are refused
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._refuse
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._read_text
        parser.Parse(content, True)

    @property
    def constants(self) -> Iterator[_Layer]:
        """Layers with weights."""
        return (layer for layer in self.all_layers if layer.kind == "Const")

    def _refuse(self, *_: object) -> None:
        raise ValueError("it has a document type")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self._open:
            if tag != "net":
                raise ValueError(f"its root is '{tag}', not 'net'")
            self.version = int(attributes["version"])
        elif tag == "layer":
            layer = _Layer(
                attributes["id"], attributes["name"], attributes["type"], _split(attributes.get("output_names", ""))
            )
            self.all_layers.append(layer)
            if not self._nested:
                self.layers[layer.id] = layer
            self._nested.append(layer)
        elif tag == "edge" and not self._nested:
            self.sources.setdefault(attributes["to-layer"], (attributes["from-layer"], attributes["from-port"]))
        elif self._nested:
            self._start_in_layer(tag, attributes)
        self._open.append(tag)
        self._text = ""

    def _start_in_layer(self, tag: str, attributes: dict[str, str]) -> None:
        layer, parent = self._nested[-1], self._open[-1]
        if tag == "data" and parent == "layer":
            layer.data = attributes
        elif tag == "port" and parent in ("input", "output"):
            port = _Port(attributes["id"], attributes.get("precision", ""), _split(attributes.get("names", "")))
            (layer.inputs if parent == "input" else layer.outputs).append(port)

    def _end(self, tag: str) -> None:
        self._open.pop()
        if tag == "dim" and self._open[-1] == "port" and self._nested:
            layer = self._nested[-1]
            ports = layer.inputs if self._open[-2] == "input" else layer.outputs
            ports[-1].dims.append(int(self._text))
        elif tag == "layer":
            self._nested.pop()

    def _read_text(self, text: str) -> None:
        self._text += text


def _split(names: str) -> list[str]:
    return [name.replace("\\,", ",") for name in _SEPARATOR.split(names) if name]


def _check_weights(path: Path, net: _Document, *, exist: bool) -> None:
    """Compare the constants with the size of the file of weights.

    Raises:
        RepositoryError: The file is missing or too short.
        ValueError: A constant has more elements than bytes.
    """
    needed = 0
    for layer in net.constants:
        size, dims = layer.count("size"), _dims(layer.data.get("shape", ""), layer.name)
        if not all(isinstance(dim, int) for dim in dims):
            raise ValueError(f"constant '{layer.name}' has the shape '{layer.data['shape']}'")
        element, elements = layer.data["element_type"], math.prod(dim for dim in dims if isinstance(dim, int))
        found = _BITS.match(element)
        bits = int(found[1]) if found else 8 if element == "boolean" else 0
        if elements * bits > size * 8:
            raise ValueError(f"constant '{layer.name}' has {elements} elements of {element} in {size} bytes")
        needed = max(needed, layer.count("offset") + size)
    weights = weights_of(path)
    if needed and not exist:
        raise RepositoryError(f"{path} needs its weights in {weights.name}, which is missing", hint="copy both files")
    if needed and (size := weights.stat().st_size) < needed:
        raise RepositoryError(
            f"{weights} is cut short: {path.name} needs {needed} bytes, it has {size}", hint="copy both files again"
        )


def _signature(net: _Document) -> Signature:
    inputs, outputs = [], []
    counts = any(layer.kind in _COUNTING for layer in net.all_layers)
    for layer in net.layers.values():
        if layer.kind == "Parameter":
            name = _name(net, layer.outputs[0].names, layer.name)
            shape = _dims(layer.data.get("shape", ""), name)
            inputs.append(_spec(name, _tensor_type(net, layer.data["element_type"], of_input=True), shape))
        elif layer.kind == "Result":
            source, port = _source(net, layer)
            number = f".{source.outputs.index(port)}" if len(source.outputs) > 1 else ""
            name = _name(net, layer.names or port.names, f"{source.name}{number}")
            found = layer.inputs[0]
            shape = tuple(dim if dim >= 0 else free_dim(name, axis) for axis, dim in enumerate(found.dims))
            if counts and shape and isinstance(shape[0], str):
                shape = (counted_dim(name, 0), *shape[1:])
            # Ports of scalars and of tensors of unknown rank look the same.
            element = _tensor_type(net, found.element_type, of_input=False)
            outputs.append(_spec(name, element, shape or (ANY_RANK,)))
    if not outputs:
        raise ValueError("it has no outputs")
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs))


def _source(net: _Document, result: _Layer) -> tuple[_Layer, _Port]:
    """Return the layer and the port that a result comes from.

    Raises:
        LookupError: There is no such layer.
        ValueError: It has no such port.
    """
    layer, number = net.sources[result.id]
    source = net.layers[layer]
    found = [port for port in source.outputs if port.id == number]
    if not found:
        raise ValueError(f"layer '{source.name}' has no output port {number}")
    return source, found[0]


def _name(net: _Document, names: Sequence[str], otherwise: str) -> str:
    """Choose a tensor's name; in version 10, and without names, it is that of the layer."""
    return min([*names, *([otherwise] if net.version == _LEGACY_VERSION or not names else [])])


def _tensor_type(net: _Document, element: str, *, of_input: bool) -> str:
    """Return the element type of an input or output, which OpenVINO changes in version 10.

    Source: OpenVINO, `update_v10_model` in `model_reader.cpp`.
    """
    if net.version != _LEGACY_VERSION:
        return element
    if of_input:
        return "f32" if element == "f16" else element
    return "i32" if element in ("i64", "u64", "i32", "u32") else "f32"


def _spec(name: str, element: str, shape: tuple[Dim, ...]) -> TensorSpec:
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"'{name}' has {len(shape)} dimensions, and arrays have {_MOST_DIMENSIONS} at most")
    if element == "string":
        raise ManifestError(
            f"'{name}' is text, which the OpenVINO engine does not take", hint="compute token ids in the client"
        )
    try:
        return TensorSpec(name=name, dtype=DType.from_openvino(element), shape=shape)
    except ManifestError as error:
        raise ManifestError(f"'{name}': {error.message}", hint=error.hint) from None


def _dims(text: str, tensor: str) -> tuple[Dim, ...]:
    """Read a shape such as `?,3`, `1..8,2` or `...`."""
    if text == ANY_RANK:
        return (ANY_RANK,)
    words = [word.strip() for word in text.split(",") if word.strip()]
    return tuple(
        free_dim(tensor, axis) if word in ("?", "-1") or ".." in word else int(word) for axis, word in enumerate(words)
    )


def _precision(net: _Document) -> Precision:
    if any(layer.kind == "FakeQuantize" for layer in net.all_layers):
        return Precision.INT8
    layers = [layer for layer in net.all_layers if layer.kind in _PRODUCTS] or [
        layer for layer in net.all_layers if layer.kind != "Const"
    ]
    found = Counter(_PRECISIONS[port.element_type] for port in _ports(layers) if port.element_type in _PRECISIONS)
    return found.most_common(1)[0][0] if found else Precision.FP32


def _ports(layers: Sequence[_Layer]) -> Iterator[_Port]:
    return (port for layer in layers for port in layer.outputs)


def _elements(net: _Document) -> Counter[str]:
    found: Counter[str] = Counter()
    for layer in net.constants:
        dims = _dims(layer.data.get("shape", ""), layer.name)
        found[layer.data["element_type"]] += math.prod(dim for dim in dims if isinstance(dim, int))
    return found
