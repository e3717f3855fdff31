"""Which texts a graph knows: the categories and tokens that its nodes hold, for samples that mean something to it."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

ODD_WORDS = ("", "unknown", "größe", "日本", "two words", "NUL\0inside")
"""Nobody's categories: they show what a graph makes of text that it does not know."""
_ANSWERS = ("classlabels", "values_", "default_")
"""Start of the names of attributes that hold what a node returns, not what it is asked."""
_MOST_WORDS = 1000


def known_words(graph: onnx.GraphProto, name: str) -> tuple[str, ...]:
    """The texts that the first nodes know that read an input, or what was made of it: categories, keys, tokens.

    Args:
        graph: The graph.
        name: The input.
    """
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.STRING}
    words: dict[str, None] = {}
    seen, waiting = {name}, [name]
    while waiting:
        for node in readers.get(waiting.pop(), ()):
            found = dict.fromkeys(_words(node, constants))
            words |= found
            further = [value for value in node.output if not found and value not in seen]
            seen.update(further)
            waiting += further
    return tuple(words)[:_MOST_WORDS]


def _words(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> Iterator[str]:
    for attribute in node.attribute:
        if not attribute.name.startswith(_ANSWERS):
            yield from (word.decode("utf-8", "replace") for word in (*attribute.strings, *attribute.t.string_data))
    for value in node.input:
        if value in constants:
            yield from (word.decode("utf-8", "replace") for word in constants[value].string_data)
