"""Manifests on disk."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.manifest import (
    FORMAT_VERSION,
    Adoption,
    Conversion,
    Golden,
    Labels,
    Manifest,
    PassRecord,
    Provenance,
    Verification,
    sha256_of,
)
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Ranking

MANIFEST = Manifest(
    format_version=FORMAT_VERSION,
    graph_file="model.onnx",
    sha256="0" * 64,
    signature=Signature(
        inputs=(TensorSpec(name="image", dtype=DType.BF16, shape=("batch", 3, 8, 8)),),
        outputs=(TensorSpec(name="scores", dtype=DType.FP32, shape=("batch", 10)),),
        optional_inputs=(TensorSpec(name="scale", dtype=DType.FP32, shape=()),),
    ),
    preprocess=Preprocess(resize=(9, 9), crop=(8, 8), mean=(0.5, 0.5, 0.5), dtype=DType.FP16),
    labels=Labels(file="labels.txt", sha256="3" * 64, count=10),
    provenance=Provenance(
        source="timm:größe", command="graphkiln convert", versions={"torch": "2"}, metrics={"top1": 1}
    ),
    verification=(
        Verification(
            step="int8",
            samples=4,
            batch_sizes=(1, 3),
            relative_l2=0.125,
            relative_l2_limit=0.3,
            worst_element=2.0,
            worst_element_limit=None,
            verdict="PASS",
        ),
    ),
    golden=Golden(file="golden.npz", sha256="1" * 64, samples=4),
    conversion=Conversion(
        recipe={"source": "timm:x", "fold": [1, {"a": None}]},
        precision=Precision.INT8,
        passes=(PassRecord(name="fold", nodes_before=9, nodes_after=5, note="left 1"),),
        output_errors={"scores": 0.125},
        graph_bytes=1 << 40,
        seconds=1.5,
        notes=("a note",),
    ),
    weights={"weights.bin": "2" * 64},
    ranking=Ranking(scores="scores", indices="classes", labels=("a",)),
)


def written(tmp_path: Path, **changes: Any) -> Path:
    """The manifest as a file, with some of its keys changed in the JSON."""
    path = tmp_path / "manifest.json"
    MANIFEST.write(path)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))
    return path


def test_round_trip(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path / "manifest.json") == MANIFEST


def test_keys_equal_the_committed_manifest(digits: Path, tmp_path: Path) -> None:
    committed = json.loads((digits / "1" / "manifest.json").read_bytes())
    MANIFEST.write(tmp_path / "manifest.json")
    fresh = json.loads((tmp_path / "manifest.json").read_bytes())
    assert list(fresh)[: len(committed)] == list(committed)
    for key in ("golden", "provenance"):
        assert list(fresh[key]) == list(committed[key])
    assert list(fresh["verification"][0]) == list(committed["verification"][0])
    assert list(fresh["signature"]["inputs"][0]) == list(committed["signature"]["inputs"][0])


@pytest.mark.parametrize("key", ["conversion", "weights", "ranking"])
def test_older_manifests_without_later_keys(tmp_path: Path, key: str) -> None:
    path = written(tmp_path, format_version=1)
    document = json.loads(path.read_bytes())
    del document[key]
    path.write_text(json.dumps(document))
    assert not getattr(Manifest.read(path), key)


def test_adoption(tmp_path: Path) -> None:
    adopted = replace(MANIFEST, adoption=Adoption(reference="timm:x", precision=Precision.INT8))
    adopted.write(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path / "manifest.json") == adopted
    MANIFEST.write(tmp_path / "manifest.json")  # older readers compute the digest of what they know
    assert "adoption" not in json.loads((tmp_path / "manifest.json").read_bytes())


def test_older_manifests_without_optional_inputs(tmp_path: Path) -> None:
    path = written(tmp_path, format_version=1)
    document = json.loads(path.read_bytes())
    del document["signature"]["optional_inputs"]
    path.write_text(json.dumps(document))
    assert Manifest.read(path).signature.optional_inputs == ()


@pytest.mark.parametrize(
    ("version", "hint"), [(FORMAT_VERSION + 1, "upgrade graphkiln"), (0, "convert the model again")]
)
def test_unknown_format(tmp_path: Path, version: int, hint: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.read(written(tmp_path, format_version=version))
    assert caught.value.hint == hint
    assert f"manifest format {version} is not known" in caught.value.message


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "..", ""])
@pytest.mark.parametrize("field", ["graph_file", "labels", "golden", "weights"])
def test_file_names_outside_the_folder(name: str, field: str) -> None:
    changes: dict[str, Any] = {field: name}
    if field == "labels":
        changes = {"labels": Labels(file=name, sha256="", count=1)}
    if field == "golden":
        changes = {"golden": Golden(file=name, sha256="", samples=1)}
    if field == "weights":
        changes = {"weights": {name: "0"}}
    with pytest.raises(ManifestError, match="must be a plain file name"):
        replace(MANIFEST, **changes)


CHANGES: list[dict[str, Any]] = [
    {"golden": None},
    {"labels": "labels.txt"},
    {"sha256": "f" * 64},
    {"digest": "0" * 64},
    {"digest": ""},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_changed_value_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ManifestError, match="it is not as it was written") as caught:
        Manifest.read(path)
    assert caught.value.hint == "restore the file or convert the model again"


def test_layout_and_order_of_keys_are_free(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_bytes()), sort_keys=True))
    assert Manifest.read(path) == MANIFEST


def test_first_format(tmp_path: Path) -> None:
    old = replace(MANIFEST, format_version=1, labels="labels.txt")
    old.write(tmp_path / "manifest.json")
    assert "digest" not in json.loads((tmp_path / "manifest.json").read_bytes())
    assert Manifest.read(tmp_path / "manifest.json") == old
    assert (old.labels_file, MANIFEST.labels_file) == ("labels.txt", "labels.txt")
    assert replace(old, labels=None).labels_file is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": 1}, "unknown key 'verdict'"),
        ({"conversion": {"recipe": {}}}, "missing key 'conversion.precision'"),
        ({"weights": {"weights.bin": 5}}, "'weights.weights.bin' must be a value of type str"),
        ({"ranking": {"scores": "s"}}, "missing key 'ranking.indices'"),
        ({"preprocess": {"dtype": "INT64"}}, "preprocess.dtype must be UINT8, FP16 or FP32"),
        ({"signature": {"inputs": [], "outputs": [{"name": "", "dtype": "FP32", "shape": []}]}}, "an empty name"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ManifestError) as caught:
        Manifest.read(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_invalid_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ManifestError, match="is not JSON"):
        Manifest.read(tmp_path / "manifest.json")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        Manifest.read(tmp_path / "manifest.json")


@pytest.mark.parametrize("content", [b"", bytes(3 << 20)])
def test_sha256_of(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_graph_digest() -> None:
    others = [replace(MANIFEST, sha256="1" * 64), replace(MANIFEST, weights={"a": "2" * 64})]
    others += [replace(MANIFEST, weights={"b": "2" * 64}), replace(MANIFEST, weights={"a": "2" * 64, "b": "2" * 64})]
    assert len({each.graph_digest for each in (MANIFEST, *others)}) == 5
    assert replace(MANIFEST, preprocess=None, labels=None).graph_digest == MANIFEST.graph_digest
    assert len(MANIFEST.graph_digest) == 16
