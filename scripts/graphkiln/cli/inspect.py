"""`graphkiln inspect`: signature, operators, arithmetic and proof of a version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.console import print_json, print_table
from graphkiln.cli.options import AsJson, local_path, version_folder
from graphkiln.cli.sign import NOT_SIGNED, TrustedKeysOption, describe_signers

if TYPE_CHECKING:
    from graphkiln_backend.graph.signature import Signature
    from graphkiln_backend.passes.node_costs import Census
    from graphkiln_backend.repository.version import ModelVersion

_OPERATORS_SHOWN = 8


def inspect(
    path: Annotated[
        str,
        typer.Argument(help="Version folder, model folder (its newest version), or FILE.onnx; also s3:// and others."),
    ],
    trusted_keys: TrustedKeysOption = None,
    as_json: AsJson = False,
) -> None:
    """Describe a version.

    Signature, operators, arithmetic, parameters, precision, preprocessing, verdicts and signatures.
    """
    from graphkiln_backend.passes.node_costs import census
    from graphkiln_backend.repository.version import read_version

    with local_path(path) as folder:
        bare = _bare_graph(folder)
        version = bare or read_version(version_folder(folder))
        signed = NOT_SIGNED if bare else describe_signers(version_folder(folder), trusted_keys)
        found = census(version.graph_path)
        if as_json:
            print_json({**_document(version, found), "signed": signed})
        else:
            print_table((), [*_rows(version, found), ("signed", signed)])


def _bare_graph(path: Path) -> ModelVersion | None:
    """Read the graph of a file outside of version folders; None for any other path.

    Raises:
        RepositoryError: The file is no graph.
    """
    from graphkiln_backend.repository.onnx_file import read_signature
    from graphkiln_backend.repository.version import ModelVersion
    from graphkiln_backend.repository.version_folders import is_version

    if not path.is_file() or is_version(path.absolute().parent.name):
        return None
    read_signature(path)  # checks the file before another library opens it
    return ModelVersion(graph_path=path, manifest=None, golden=None)


def _signature(version: ModelVersion) -> Signature:
    from graphkiln_backend.repository.onnx_file import read_signature

    return version.manifest.signature if version.manifest else read_signature(version.graph_path)


def _document(version: ModelVersion, found: Census) -> dict[str, Any]:
    from graphkiln_backend.graph.decoding import encode

    document = {"graph": str(version.graph_path), "signature": encode(_signature(version)), **encode(found)}
    if version.manifest:
        facts = encode(version.manifest)
        document |= {key: facts[key] for key in ("preprocess", "labels", "provenance", "verification", "conversion")}
    return document


def _rows(version: ModelVersion, found: Census) -> Iterator[tuple[str, str]]:
    signature = _signature(version)
    yield "graph", str(version.graph_path)
    yield "inputs", "\n".join(map(str, (*signature.inputs, *signature.optional_inputs)))
    yield "outputs", "\n".join(map(str, signature.outputs))
    operators = [f"{count} {name}" for name, count in found.operators.items()]
    more = f", {len(operators) - _OPERATORS_SHOWN} other types" if len(operators) > _OPERATORS_SHOWN else ""
    yield "operators", f"{sum(found.operators.values())}: {', '.join(operators[:_OPERATORS_SHOWN])}{more}"
    yield "arithmetic", "not known" if found.flops is None else f"{found.flops / 1e9:.3g} GFLOP a sample"
    yield "parameters", f"{found.parameters:,} ({found.weight_bytes / 2**20:.1f} MB)"
    shares = [f"{name} {count / max(1, found.parameters):.1%}" for name, count in found.precisions.items()]
    yield "weights in", ", ".join(shares) or "-"
    yield "format", f"opset {found.opset}, IR {found.ir_version}"
    yield from _manifest_rows(version)


def _manifest_rows(version: ModelVersion) -> Iterator[tuple[str, str]]:
    manifest = version.manifest
    if manifest is None:
        yield "verdicts", "none: this graph has no manifest (graphkiln convert FILE.onnx creates a proven version)"
        return
    labels = version.contract.labels or (version.ranking.labels if version.ranking else ())
    yield "source", manifest.provenance.source
    yield "preprocess", manifest.preprocess.to_json() if manifest.preprocess else "-"
    yield "labels", f"{len(labels)}: {labels[0]} ... {labels[-1]}" if labels else "-"
    yield "verdicts", "\n".join(item.verdict for item in manifest.verification)
    for note in manifest.conversion.notes if manifest.conversion else ():
        yield "note", note
