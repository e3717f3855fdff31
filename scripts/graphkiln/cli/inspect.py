"""`graphkiln inspect`: signature, operators, arithmetic and proof of a version, for any backend of Triton."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.console import print_json, print_table
from graphkiln.cli.options import AsJson, local_path, read_any_version, version_folder
from graphkiln.cli.sign import NOT_SIGNED, TrustedKeysOption, describe_signers
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import EngineUnavailable, RepositoryError

if TYPE_CHECKING:
    from graphkiln_backend.graph.manifest import Manifest
    from graphkiln_backend.graph.signature import Signature
    from graphkiln_backend.passes.node_costs import Census
    from graphkiln_backend.repository.version import ModelVersion

_OPERATORS_SHOWN = 8
_READABLE = (".onnx", ".xml")  # suffixes of graphs that graphkiln reads
_UNPROVEN = (
    "unproven: this graph has no manifest with golden samples (graphkiln adopt STORE/NAME --reference ... adds them; "
    "graphkiln convert FILE.onnx creates a proven version)"
)


class Format(StrEnum):
    """Format of the description."""

    TABLE = "table"
    JSON = "json"
    CYCLONEDX = "cyclonedx"


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            help="Version folder, model folder (its newest version), FILE.onnx or FILE.xml; also s3:// and others."
        ),
    ],
    trusted_keys: TrustedKeysOption = None,
    output: Annotated[
        Format,
        typer.Option(
            "--format",
            help="table, json, or cyclonedx: a bill of materials, CycloneDX 1.7 in JSON.",
            metavar="FORMAT",
        ),
    ] = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Describe a version.

    Signature, operators, arithmetic, parameters, precision, preprocessing, verdicts and signatures.
    """
    from graphkiln_backend.passes.node_costs import census

    with local_path(path) as folder:
        bare = _bare_graph(folder)
        version = bare or read_any_version(version_folder(folder))
        signed = NOT_SIGNED if bare else describe_signers(version_folder(folder), trusted_keys)
        if output is Format.CYCLONEDX:
            typer.echo(_bill_of_materials(version, signed))
            return
        signature = _signature(version)
        found = census(version.graph_path) if version.graph_path.suffix in _READABLE else None
        if as_json or output is Format.JSON:
            print_json({**_document(version, signature, found), "signed": signed})
        else:
            print_table((), [*_rows(version, signature, found), ("signed", signed)])


def _bill_of_materials(version: ModelVersion, signed: str) -> str:
    """Bill of materials of a version.

    Raises:
        RepositoryError: It has no manifest.
        EngineUnavailable: The library is not installed.
    """
    if version.manifest is None:
        raise RepositoryError(
            f"{version.graph_path} has no manifest: its source and its proof are not known",
            hint="graphkiln convert writes one, graphkiln adopt adds one",
        )
    try:
        from graphkiln.cli.bill_of_materials import bill_of_materials
    except ImportError as error:
        raise EngineUnavailable(
            f"--format cyclonedx needs a library that is not installed: {error}", extra="bom"
        ) from error
    return bill_of_materials(version.graph_path.parent.absolute(), version.manifest, signed=signed)


def _bare_graph(path: Path) -> ModelVersion | None:
    """Read the graph of a file outside of version folders; None for any other path.

    Raises:
        RepositoryError: The file is no graph.
    """
    from graphkiln_backend.repository.version import ModelVersion, read_graph_signature
    from graphkiln_backend.repository.version_folders import is_version

    if not path.is_file() or is_version(path.absolute().parent.name):
        return None
    read_graph_signature(path)  # checks the file before another library opens it
    return ModelVersion(graph_path=path, manifest=None, golden=None)


def _signature(version: ModelVersion) -> Signature | None:
    """Return the signature of the manifest, the graph or config.pbtxt; None if only the backend knows it."""
    from graphkiln_backend.repository.config import configured_signature, read_config
    from graphkiln_backend.repository.version import CONFIG_FILE, read_graph_signature

    if version.manifest:
        return version.manifest.signature
    if version.graph_path.suffix in _READABLE:
        return read_graph_signature(version.graph_path)
    return configured_signature(read_config(version.graph_path.parent.parent / CONFIG_FILE))


def _document(version: ModelVersion, signature: Signature | None, found: Census | None) -> dict[str, Any]:
    from graphkiln_backend.graph.decoding import encode

    document = {
        "graph": str(version.graph_path),
        "signature": encode(signature) if signature else None,
        "unproven": version.golden is None,
        **(encode(found) if found else {}),
    }
    if version.manifest:
        facts = encode(version.manifest)
        document |= {key: facts[key] for key in ("preprocess", "labels", "provenance", "verification", "conversion")}
        document["adoption"] = facts.get("adoption")
    return document


def _rows(version: ModelVersion, signature: Signature | None, found: Census | None) -> Iterator[tuple[str, str]]:
    yield "graph", str(version.graph_path)
    if signature is None:
        yield "inputs", "not known: config.pbtxt leaves them to the backend"
    else:
        yield "inputs", "\n".join(map(str, (*signature.inputs, *signature.optional_inputs)))
        yield "outputs", "\n".join(map(str, signature.outputs))
    if found:
        yield from _census_rows(found)
    yield from _manifest_rows(version)


def _census_rows(found: Census) -> Iterator[tuple[str, str]]:
    operators = [f"{count} {name}" for name, count in found.operators.items()]
    more = f", {len(operators) - _OPERATORS_SHOWN} other types" if len(operators) > _OPERATORS_SHOWN else ""
    yield "operators", f"{sum(found.operators.values())}: {', '.join(operators[:_OPERATORS_SHOWN])}{more}"
    yield "arithmetic", "not known" if found.flops is None else f"{found.flops / 1e9:.3g} GFLOP a sample"
    yield "parameters", f"{found.parameters:,} ({found.weight_bytes / 2**20:.1f} MB)"
    shares = [f"{name} {count / max(1, found.parameters):.1%}" for name, count in found.precisions.items()]
    yield "weights in", ", ".join(shares) or "-"
    is_onnx = found.opset is not None
    yield "format", f"opset {found.opset}, IR {found.ir_version}" if is_onnx else f"OpenVINO IR {found.ir_version}"


def _manifest_rows(version: ModelVersion) -> Iterator[tuple[str, str]]:
    manifest = version.manifest
    if manifest is None:
        yield "verdicts", _UNPROVEN
        return
    labels = version.contract.labels or (version.ranking.labels if version.ranking else ())
    yield "reference" if manifest.adoption else "source", manifest.provenance.source
    # With spaces: a terminal breaks lines there.
    yield "preprocess", json.dumps(encode(manifest.preprocess)) if manifest.preprocess else "-"
    yield "labels", f"{len(labels)}: {labels[0]} ... {labels[-1]}" if labels else "-"
    yield "verdicts", "\n".join(_verdicts(manifest)) or _UNPROVEN
    for note in manifest.conversion.notes if manifest.conversion else ():
        yield "note", note


def _verdicts(manifest: Manifest) -> Iterator[str]:
    yield from (verification.verdict for verification in manifest.verification)
    if manifest.adoption and manifest.golden:
        kind = "outputs were recorded from" if manifest.adoption.recorded else "expected outputs are those of"
        yield (
            f"adopted as {manifest.adoption.precision}: the {kind} {manifest.adoption.reference}; "
            f"serve proves {manifest.golden.samples} samples before it answers"
        )
