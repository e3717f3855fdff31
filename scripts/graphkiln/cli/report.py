"""Tables for people: what a conversion, a proof and a graph look like, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphkiln_backend.graph.manifest import Conversion, Manifest
from graphkiln_backend.graph.signature import TensorSpec

if TYPE_CHECKING:
    from graphkiln_backend.passes.base import Pass


def show_conversion(folder: Path, manifest: Manifest) -> None:
    """Prints what `graphkiln convert` wrote."""
    console = Console()
    if manifest.conversion:
        console.print(_passes_table(manifest.conversion))
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in (*_facts(manifest), ("written", str(folder))):
        table.add_row(name, escape(text))
    console.print(table)


def _passes_table(conversion: Conversion) -> Table:
    table = Table("pass", "nodes before", "after", "note")
    for record in conversion.passes:
        table.add_row(record.name, str(record.nodes_before), str(record.nodes_after), escape(record.note))
    return table


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Name and text of each row."""
    yield "inputs", "\n".join(map(str, manifest.signature.inputs))
    yield "outputs", "\n".join(_output(manifest, spec) for spec in manifest.signature.outputs)
    yield "proof", "\n".join(verification.verdict for verification in manifest.verification)
    if conversion := manifest.conversion:
        yield "graph", f"{conversion.precision}, {conversion.graph_bytes / 2**20:.1f} MB"
        yield "time", f"{conversion.seconds:.1f} s"
        yield from (("note", note) for note in conversion.notes)


def _output(manifest: Manifest, spec: TensorSpec) -> str:
    error = manifest.conversion.output_errors.get(spec.name) if manifest.conversion else None
    return str(spec) if error is None else f"{spec}: error {error:.1e}"


def show_passes(passes: Iterable[tuple[Pass, str]]) -> None:
    """Prints all passes and when they run."""
    table = Table("pass", "what it does", "runs")
    for graph_pass, when in passes:
        table.add_row(graph_pass.name, graph_pass.summary, when)
    Console().print(table)
