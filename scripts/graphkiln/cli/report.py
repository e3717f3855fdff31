"""Tables for people: what a conversion, a proof and a graph look like, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphkiln_backend.graph.manifest import Manifest

if TYPE_CHECKING:
    from graphkiln_backend.passes.base import Pass


def show_conversion(folder: Path, manifest: Manifest) -> None:
    """Prints what `graphkiln convert` wrote."""
    console = Console()
    conversion = manifest.conversion
    if conversion:
        passes = Table("pass", "nodes before", "after", "note")
        for record in conversion.passes:
            passes.add_row(record.name, str(record.nodes_before), str(record.nodes_after), record.note)
        console.print(passes)
    facts = Table(show_header=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("inputs", escape("\n".join(map(str, manifest.signature.inputs))))
    outputs = [_output(manifest, str(spec), spec.name) for spec in manifest.signature.outputs]
    facts.add_row("outputs", escape("\n".join(outputs)))
    facts.add_row("proof", "\n".join(verification.verdict for verification in manifest.verification))
    if conversion:
        facts.add_row("graph", f"{conversion.precision}, {conversion.graph_bytes / 2**20:.1f} MB")
        facts.add_row("time", f"{conversion.seconds:.1f} s")
        for note in conversion.notes:
            facts.add_row("note", note)
    facts.add_row("written", str(folder))
    console.print(facts)


def show_passes(passes: Iterable[tuple[Pass, str]]) -> None:
    """Prints all passes and when they run."""
    table = Table("pass", "what it does", "runs")
    for graph_pass, when in passes:
        table.add_row(graph_pass.name, graph_pass.summary, when)
    Console().print(table)


def _output(manifest: Manifest, text: str, name: str) -> str:
    error = manifest.conversion.output_errors.get(name) if manifest.conversion else None
    return text if error is None else f"{text}: error {error:.1e}"
