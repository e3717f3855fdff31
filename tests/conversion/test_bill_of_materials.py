"""`graphkiln inspect --format cyclonedx`: bills of materials, validated strictly against CycloneDX's schema."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from converting import Convert
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from onnx import numpy_helper, parser
from running import run_here

from graphkiln_backend.graph.manifest import Manifest, digest_of, sha256_of
from graphkiln_converters.recipe_file import read_recipe

TEXT = """<ir_version: 9, opset_import: ["": 18]>
g (float[n,8] x) => (float[n,4] scores) { h = MatMul(x, w) r = Relu(h) scores = MatMul(r, v) }"""


def bill_of(version: Path) -> dict[str, Any]:
    """Bill of materials of a version, as the schema accepts it."""
    finished = run_here("inspect", version, "--format", "cyclonedx")
    assert finished.returncode == 0, finished.stderr
    error = JsonStrictValidator(SchemaVersion.V1_7).validate_str(finished.stdout)
    assert error is None, error
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def components_of(bill: dict[str, Any]) -> dict[str, Any]:
    """Components by reference, with the model and its source."""
    model = bill["metadata"]["component"]
    return {each["bom-ref"]: each for each in (*bill["components"], model, *model["pedigree"]["ancestors"])}


def sha256(component: dict[str, Any]) -> str:
    (found,) = component["hashes"]
    assert found["alg"] == "SHA-256"
    return str(found["content"])


def properties_of(bill: dict[str, Any]) -> dict[str, str]:
    return {
        each["name"].removeprefix("graphkiln:"): each["value"] for each in bill["metadata"]["component"]["properties"]
    }


def test_the_example(digits: Path) -> None:
    bill = bill_of(digits)
    assert bill["specVersion"] == "1.7"
    found, manifest = components_of(bill), Manifest.read(digits / "1" / "manifest.json")
    assert (found["model"]["type"], found["model"]["name"], found["model"]["version"]) == (
        "machine-learning-model", digits.name, "1",
    )  # fmt: skip
    for name in ("model.onnx", "golden.npz", "labels.txt"):
        assert sha256(found[f"file:{name}"]) == sha256_of(digits / "1" / name)
    assert found["source"]["name"] == manifest.provenance.source
    assert found["library:onnxruntime"]["version"] == manifest.provenance.versions["onnxruntime"]
    card = found["model"]["modelCard"]
    assert card["modelParameters"]["task"] == "classification"
    assert card["modelParameters"]["inputs"] == [{"format": "INPUT_0 FP32[batch,1,32,32]"}]
    metrics = card["quantitativeAnalysis"]["performanceMetrics"]
    measured = {(each["type"], each.get("slice")): float(each["value"]) for each in metrics}
    (proof,) = manifest.verification
    where = "export, 450 samples, batch sizes 1, 3"
    assert measured["relative_l2", where] == proof.relative_l2
    assert measured["relative_l2_limit", where] == proof.relative_l2_limit
    assert measured["worst_element_limit", where] == proof.worst_element_limit
    assert measured["test_accuracy", None] == 0.9933
    assert card["properties"] == [{"name": "graphkiln:proof", "value": proof.verdict}]
    assert properties_of(bill)["signed"] == "no"


def test_it_depends_only_on_the_version(digits: Path, tmp_path: Path) -> None:
    bill = bill_of(digits)
    assert bill == bill_of(digits / "1")
    assert "timestamp" not in bill["metadata"]
    other = shutil.copytree(digits, tmp_path / "other")
    assert bill_of(other)["serialNumber"] != bill["serialNumber"]


def test_a_quantized_graph(run: Convert, tmp_path: Path) -> None:
    graph, generator = parser.parse_model(TEXT), np.random.default_rng(0)
    for name, shape in (("w", (8, 16)), ("v", (16, 4))):
        graph.graph.initializer.append(numpy_helper.from_array(generator.normal(size=shape).astype("f4"), name))
    onnx.save(graph, tmp_path / "net.onnx", save_as_external_data=True, size_threshold=0, location="net.bin")
    for name in ("calibration", "samples"):
        np.savez(tmp_path / f"{name}.npz", INPUT_0=generator.normal(size=(64, 8)).astype("f4"))
    given = {name: str(tmp_path / f"{name}.npz") for name in ("calibration", "samples")}
    version = run(str(tmp_path / "net.onnx"), precision="int8", int8_by="onnxruntime", relative_l2=0.5, **given)
    bill = bill_of(version)
    found, facts = components_of(bill), properties_of(bill)
    assert facts["precision"] == "int8"
    assert facts["quantizer"] == f"onnxruntime {found['library:onnxruntime']['version']}"
    assert facts["calibration-method"] == "minmax"
    for name, path in given.items():
        assert sha256(found[name]) == sha256_of(Path(path))
    assert read_recipe(version / "manifest.json", {}, []).calibration == Path(given["calibration"])  # without digests
    lines = "".join(f"{sha256_of(tmp_path / name)}  {name}\n" for name in ("net.bin", "net.onnx"))
    assert sha256(found["source"]) == hashlib.sha256(lines.encode()).hexdigest()
    assert found["model"]["modelCard"]["modelParameters"]["datasets"] == [{"ref": "calibration"}, {"ref": "samples"}]
    without_digests(version)


def without_digests(version: Path) -> None:
    """Check a version whose manifest has no digests, as those of before."""
    manifest = Manifest.read(version / "manifest.json")
    assert manifest.conversion is not None
    recipe = {key: value for key, value in manifest.conversion.recipe.items() if key != "digests"}
    older = replace(manifest, conversion=replace(manifest.conversion, recipe=recipe))
    older.write(version / "manifest.json")
    assert "digests" not in (version / "manifest.json").read_text()
    assert Manifest.read(version / "manifest.json").conversion == older.conversion
    assert "hashes" not in components_of(bill_of(version))["source"]


def test_digests_of_folders_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("x")
    (tmp_path / "a").write_text("a")
    hashes = {name: hashlib.sha256(name[-1].encode()).hexdigest() for name in ("a", "b/x")}
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in hashes.items())
    assert digest_of(tmp_path) == hashlib.sha256(lines.encode()).hexdigest()
    assert digest_of(tmp_path / "a") == sha256_of(tmp_path / "a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("digits/9",), "digits/9"),
        (("nowhere",), "nowhere"),
        (("bare.onnx",), "has no manifest"),
        (("digits", "--format", "spdx"), "'spdx' is not one of 'table', 'json', 'cyclonedx'"),
    ],
)
def test_what_has_no_bill(digits: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    shutil.copy(digits / "1" / "model.onnx", tmp_path / "bare.onnx")
    finished = run_here("inspect", "--format", "cyclonedx", tmp_path / words[0], *words[1:])
    assert finished.returncode != 0
    assert message in " ".join(finished.stderr.split())


def test_the_extra_is_named(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "graphkiln.cli.bill_of_materials", None)
    finished = run_here("inspect", digits, "--format", "cyclonedx")
    assert "pip install 'graphkiln[bom]'" in finished.stderr
