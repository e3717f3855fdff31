"""Golden samples: a few inputs with the outputs that a saved graph must compute, kept beside it as one .npz file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphkiln_backend.graph.arrays import read_npz
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.text import is_text, pack_text, unpack_text

_PREFIXES = ("input", "source", "graph")
_BYTES, _LENGTHS = ".text", ".lengths"
"""After the prefix of the two arrays that one array of text becomes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenSamples:
    """Inputs and two sets of reference outputs, by tensor name; all with the same first dimension.

    Attributes:
        inputs: The feeds.
        source_outputs: Of the source model, in fp32.
        graph_outputs: Of the saved graph itself when it was made (ONNX Runtime on the CPU, optimizations off).
    """

    inputs: Mapping[str, AnyArray]
    source_outputs: Mapping[str, AnyArray]
    graph_outputs: Mapping[str, AnyArray]

    def only(self, outputs: Collection[str]) -> GoldenSamples:
        """The same samples with these outputs alone."""
        source, graph = (
            {name: array for name, array in group.items() if name in outputs}
            for group in (self.source_outputs, self.graph_outputs)
        )
        return GoldenSamples(inputs=self.inputs, source_outputs=source, graph_outputs=graph)

    def write(self, path: Path) -> None:
        """Writes the samples as a compressed .npz of plain arrays (no pickles)."""
        groups = zip(_PREFIXES, (self.inputs, self.source_outputs, self.graph_outputs), strict=True)
        arrays: dict[str, AnyArray] = {}
        for prefix, group in groups:
            for name, array in group.items():
                arrays |= _plain(prefix, name, array)
        np.savez_compressed(path, **arrays)

    @classmethod
    def read(cls, path: Path) -> GoldenSamples:
        """Reads what `write` wrote.

        Raises:
            ManifestError: The file is missing, damaged, or holds something else.
        """
        groups: dict[str, dict[str, AnyArray]] = {prefix: {} for prefix in _PREFIXES}
        try:
            arrays = read_npz(path)
            for key, array in arrays.items():
                prefix, _, name = key.partition("/")
                if prefix.endswith(_BYTES):
                    prefix = prefix.removesuffix(_BYTES)
                    groups[prefix][name] = unpack_text(array, arrays[f"{prefix}{_LENGTHS}/{name}"])
                elif not prefix.endswith(_LENGTHS):
                    groups[prefix][name] = array
        except ManifestError as error:
            raise ManifestError(f"cannot read golden samples from {path}: {error.message}") from error
        except KeyError as error:
            raise ManifestError(f"cannot read golden samples from {path}: {error}") from error
        return cls(inputs=groups["input"], source_outputs=groups["source"], graph_outputs=groups["graph"])


def _plain(prefix: str, name: str, array: AnyArray) -> dict[str, AnyArray]:
    if not is_text(array):
        return {f"{prefix}/{name}": array}
    content, lengths = pack_text(array)
    return {f"{prefix}{_BYTES}/{name}": content, f"{prefix}{_LENGTHS}/{name}": lengths}
