"""CycloneDX bill of materials of a version: files, source, samples and libraries with hashes, and the proof.

cyclonedx-python-lib writes CycloneDX 1.7 and has no class for model cards, so that the card is added to its JSON. The
text depends only on the version: a manifest has no time, so that the bill has none, and its serial number is derived
from the manifest.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.output.json import JsonV1Dot7
from packageurl import PackageURL

from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.precision import Precision

if TYPE_CHECKING:
    from graphkiln_backend.graph.manifest import Manifest

# Files of a recipe, by their keys, that are not in the version.
_GIVEN = {
    "weights": ComponentType.MACHINE_LEARNING_MODEL,
    **dict.fromkeys(("calibration", "samples", "reference"), ComponentType.DATA),
}


def bill_of_materials(folder: Path, manifest: Manifest, *, signed: str) -> str:
    """Describe a version in CycloneDX's JSON.

    Args:
        folder: Its folder.
        manifest: Its manifest.
        signed: Its signers, in words.
    """
    conversion = manifest.conversion
    recipe = conversion.recipe if conversion else {}
    digests = recipe.get("digests") or (conversion.digests if conversion else {})
    source = _component("source", manifest.provenance.source, ComponentType.MACHINE_LEARNING_MODEL, digests)
    model = _component("model", folder.parent.name, ComponentType.MACHINE_LEARNING_MODEL, {"model": manifest.sha256})
    model.version = folder.name
    model.pedigree = Pedigree(ancestors=[source], notes=manifest.provenance.command or None)
    model.properties = [Property(name=f"graphkiln:{name}", value=value) for name, value in _facts(manifest, signed)]
    given = [_component(key, str(recipe[key]), kind, digests) for key, kind in _GIVEN.items() if recipe.get(key)]
    parts = [*_files(manifest), *given, *_libraries(manifest)]
    name = json.dumps([model.name, model.version, encode(manifest), signed], sort_keys=True)
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, name), components=parts)
    bom.metadata.component = model
    bom.register_dependency(model, parts)
    document: dict[str, Any] = json.loads(JsonV1Dot7(bom).output_as_string())
    del document["metadata"]["timestamp"]  # that of this call
    document["metadata"]["component"]["modelCard"] = _model_card(manifest, [str(each.bom_ref.value) for each in given])
    return json.dumps(document, indent=2, ensure_ascii=False)


def _component(ref: str, name: str, kind: ComponentType, digests: dict[str, str]) -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digests[ref])] if ref in digests else []
    return Component(name=name, type=kind, bom_ref=ref, hashes=hashes)


def _files(manifest: Manifest) -> Iterator[Component]:
    """Files of the version."""
    hashes = {manifest.graph_file: manifest.sha256, **manifest.weights}
    if manifest.golden:
        hashes[manifest.golden.file] = manifest.golden.sha256
    if manifest.labels_file:
        hashes[manifest.labels_file] = (
            "" if isinstance(manifest.labels, str) else getattr(manifest.labels, "sha256", "")
        )
    for name, sha256 in hashes.items():
        kind = ComponentType.DATA if manifest.golden and name == manifest.golden.file else ComponentType.FILE
        yield _component(f"file:{name}", name, kind, {f"file:{name}": sha256} if sha256 else {})


def _libraries(manifest: Manifest) -> Iterator[Component]:
    """Libraries that exported, rewrote and proved the graph."""
    for name, version in manifest.provenance.versions.items():
        is_python = name == "python"
        url = PackageURL(type="generic" if is_python else "pypi", name=name, version=version)
        kind = ComponentType.PLATFORM if is_python else ComponentType.LIBRARY
        yield Component(name=name, version=version, type=kind, bom_ref=f"library:{name}", purl=url)


def _facts(manifest: Manifest, signed: str) -> Iterator[tuple[str, str]]:
    """Facts for which CycloneDX has no field."""
    yield "signed", signed
    yield "graph-digest", manifest.graph_digest
    if manifest.adoption:
        yield "precision", str(manifest.adoption.precision)
        yield "adopted-from", manifest.adoption.reference
    if manifest.conversion is None:
        return
    precision, recipe = manifest.conversion.precision, manifest.conversion.recipe
    yield "precision", str(precision)
    if precision is Precision.INT8 and recipe.get("calibration"):
        quantizer = str(recipe.get("int8_by", "onnxruntime"))
        yield "quantizer", f"{quantizer} {manifest.provenance.versions.get(quantizer, '')}".strip()
        yield "calibration-method", str(recipe.get("calibration_method", "minmax"))
    yield from (("note", note) for note in manifest.conversion.notes)


def _model_card(manifest: Manifest, datasets: Sequence[str]) -> dict[str, Any]:
    """The model card: what the model takes and returns, the proofs with their limits, metrics of the task."""
    signature = manifest.signature
    parameters: dict[str, Any] = {
        "inputs": [{"format": str(spec)} for spec in (*signature.inputs, *signature.optional_inputs)],
        "outputs": [{"format": str(spec)} for spec in signature.outputs],
    }
    kind = manifest.task.kind if manifest.task else "classification" if manifest.labels or manifest.ranking else ""
    if kind:
        parameters["task"] = kind
    if datasets:
        parameters["datasets"] = [{"ref": ref} for ref in datasets if ref != "weights"]
    metrics = [{"type": name, "value": str(value)} for name, value in manifest.provenance.metrics.items()]
    for proof in manifest.verification:
        sizes = f", batch sizes {', '.join(map(str, proof.batch_sizes))}" if proof.batch_sizes else ""
        where = f"{proof.step}, {proof.samples} samples{sizes}"
        for name in ("relative_l2", "relative_l2_limit", "worst_element", "worst_element_limit"):
            if (value := getattr(proof, name)) is not None:
                metrics.append({"type": name, "value": repr(value), "slice": where})
    return {
        "modelParameters": parameters,
        "quantitativeAnalysis": {"performanceMetrics": metrics},
        "properties": [{"name": "graphkiln:proof", "value": proof.verdict} for proof in manifest.verification],
    }
