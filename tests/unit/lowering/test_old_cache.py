"""Versions and caches of earlier releases are used as they are: nothing is built again.

`old_cache.zip` holds what the commit before the one that renamed the packages (710b0df) made, on two cores of an Intel
Xeon, with ONNX Runtime 1.31.1, OpenVINO 2026.4.1, onnx-ir 1.1.0 and onnxscript 0.7.2:

    store/tiny/     a small classifier, as `graphkiln convert` wrote it
    store/saved/    a graph as OneFlow saved it
    cache/          what these commands left there:
                    graphkiln lower store/tiny
                    graphkiln lower store/tiny --set engine=auto --set precision=bf16
                    graphkiln lower store/tiny --set engine=auto
                    graphkiln lower store/saved

Keys name the processor and the installed libraries. So that the cache is one of this machine, these values are written
anew, and folders renamed, by an implementation of the naming that shares nothing with that of the cache. All else in a
key must equal the current key.

What engines compiled runs on the same processor and release only: elsewhere its keys are compared, and sessions are
built from the graph. What OpenVINO compiled by another table of numbers (`engines.openvino_numbers`) may compute
otherwise: it is compiled and measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import onnxruntime
import openvino
import pytest

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, engine
from graphkiln_backend.engines.openvino import OpenVinoEngine
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.overlay import complete_config

ARCHIVE = Path(__file__).parent / "old_cache.zip"
BACKENDS = frozenset({"graphkiln", "onnxruntime", "oneflow"})
COMPILED = {"onnxruntime": OnnxRuntimeEngine, "openvino": OpenVinoEngine}

AUTO = ("engine", "auto", "--set")
OPENVINO = ("engine", "openvino", "--set")  # auto measures fp32 beside bf16 now
BF16 = ("precision", "bf16", "--set")
# Model, what the command line requests, and the kinds of the entries that it needs.
LOWERINGS = {
    "as configured": ("tiny", (), {"onnxruntime"}),
    "bf16": ("tiny", (OPENVINO, BF16), {"graph", "openvino"}),
    "auto": ("tiny", (AUTO,), {"choice", "onnxruntime"}),
    "saved by OneFlow": ("saved", (), {"oneflow", "onnxruntime"}),
}


def facts_of_this_machine() -> dict[str, str]:
    versions = {name: version_of(name) for name in ("graphkiln", "onnx-ir", "onnxscript")}
    libraries = {"onnxruntime": onnxruntime.__version__, "openvino": openvino.__version__}
    return {**versions, **libraries, "device": hardware.identity(CPU)}


def old_name(kind: str, key: dict[str, str]) -> str:
    """Name of an entry, computed independently of the cache."""
    text = json.dumps(dict(sorted({"kind": kind, **key}.items())))
    return kind + "-" + hashlib.sha256(text.encode("utf-8")).hexdigest()[:40]


def old_entries() -> dict[str, dict[str, Any]]:
    """Read the `entry.json`s of the archive, by the name of their folder."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        paths = [name for name in archive.namelist() if name.endswith("/entry.json")]
        return {Path(path).parent.name: json.loads(archive.read(path)) for path in paths}


def runs_here(kind: str) -> bool:
    """Check that the archive's compiled artifacts run on this machine."""
    here = facts_of_this_machine()
    keys = [entry["key"] for entry in old_entries().values() if entry["kind"] == kind]
    return all(key[name] == here[name] for key in keys for name in (kind, "device"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive's store, and its cache as if it had been filled here, on a CPU with VNNI as the archive's was."""
    monkeypatch.setattr(engine, "saturates_products_of_bytes", lambda: False)
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    here = facts_of_this_machine()
    for entry in list((tmp_path / "cache" / "entries").iterdir()):
        document = json.loads((entry / "entry.json").read_text())
        key = document["key"]
        for name in key:
            fact = name.rpartition(": ")[2]
            key[name] = here.get(fact, key[name])
        (entry / "entry.json").write_text(json.dumps(document))
        entry.rename(entry.with_name(old_name(document["kind"], key)))
        lock = tmp_path / "cache" / "locks" / old_name(document["kind"], key)
        lock.touch()
        os.utime(lock, (0, 0))
    return tmp_path


@pytest.fixture
def cache(folder: Path) -> Iterator[ArtifactCache]:
    with ArtifactCache(folder / "cache") as cache:
        yield cache


def build(folder: Path, lowering: str, cache: ArtifactCache) -> ProvenSession:
    """Build a session as `graphkiln lower` and the server do, on two cores."""
    model, overrides, _ = LOWERINGS[lowering]
    path = folder / "store" / model
    graph_folder = partial(convert_if_needed, cache=cache)
    config = ModelConfig.from_protobuf(complete_config(path, BACKENDS, graph_folder), has_gpu=False)
    resources = Resources(device=CPU, cores=2, probe=probe)
    return Deployment.read(graph_folder(path / "1"), config, resources, overrides).build(cache)


def used_kinds(cache: ArtifactCache) -> set[str]:
    return {stored.entry.kind for stored in cache.entries() if stored.used_s > 0}


def skip_without_bf16(lowering: str) -> None:
    facts = Path("/proc/cpuinfo").read_text()
    if lowering == "bf16" and not ("avx512_bf16" in facts or "amx_bf16" in facts):
        pytest.skip("this CPU does not compute in bf16")


def test_archive_has_the_stable_names_of_entries() -> None:
    entries = old_entries()
    assert sorted(entry["kind"] for entry in entries.values()) == [
        "choice",
        "graph",
        "oneflow",
        *["onnxruntime"] * 2,
        *["openvino"] * 2,
    ]
    assert {name: old_name(entry["kind"], entry["key"]) for name, entry in entries.items()} == {
        name: name for name in entries
    }


def test_old_entries_are_readable(cache: ArtifactCache) -> None:
    assert len(cache.entries()) == len(old_entries())
    assert cache.faults() == {}


@pytest.mark.parametrize("compiled", ["loaded", "compared"])
@pytest.mark.parametrize("lowering", ["as configured", "saved by OneFlow"])
def test_old_artifacts_are_used(  # noqa: PLR0917 - fixtures and parameters
    folder: Path,
    cache: ArtifactCache,
    lowering: str,
    compiled: str,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
) -> None:
    skip_without_bf16(lowering)
    kinds = LOWERINGS[lowering][2]
    found: list[Path | None] = []
    for kind in kinds & COMPILED.keys():
        if compiled == "loaded" and not runs_here(kind):
            pytest.skip(f"{kind} compiled the old artifacts for another processor or release: only keys are compared")
        monkeypatch.setattr(COMPILED[kind], "build", recording(COMPILED[kind].build, found, load=compiled == "loaded"))
    before = {path: path.stat().st_mtime_ns for path in (folder / "cache" / "entries").rglob("*")}

    proven = build(folder, lowering, cache)

    with proven.session:
        assert logged == []
        assert proven.self_test is not None
        assert proven.self_test.verdict.endswith("PASS")
        assert proven.failures == ()
    assert [path and path.parent for path in found] == [folder / "cache" / "entries"]
    assert used_kinds(cache) == {*kinds, "observations"}  # which those releases did not keep
    after = {path: path.stat().st_mtime_ns for path in (folder / "cache" / "entries").rglob("*")}
    assert {path: after[path] for path in after if "observations-" not in str(path)} == before


def recording(build: Callable[..., Any], found: list[Path | None], *, load: bool) -> Callable[..., Any]:
    """An engine's `build` that notes what compiled artifact it is given, and starts from the graph unless it may."""

    def wrapped(self: object, graph: Path, config: object, compiled: Path | None = None) -> object:
        found.append(compiled)
        return build(self, graph, config, compiled if load else None)

    return wrapped


@pytest.mark.parametrize(
    ("lowering", "message"), [("bf16", "compiling for openvino"), ("auto", "measuring onnxruntime")]
)
def test_what_another_table_of_numbers_made_is_made_again_once(
    folder: Path, cache: ArtifactCache, lowering: str, message: str, logged: list[str]
) -> None:
    skip_without_bf16(lowering)
    build(folder, lowering, cache).session.close()
    assert any(line.startswith(message) for line in logged)
    logged.clear()
    build(folder, lowering, cache).session.close()
    assert logged == []


@pytest.mark.parametrize(
    ("lowering", "message"),
    [
        ("as configured", "compiling for onnxruntime on cpu"),
        ("bf16", "compiling for openvino on cpu in bf16"),
        ("auto", "measuring onnxruntime on cpu, openvino on cpu at batch 32"),
        ("saved by OneFlow", "converting saved 1, saved by OneFlow, into"),
    ],
)
def test_without_the_cache_everything_is_built(
    folder: Path, cache: ArtifactCache, lowering: str, message: str, logged: list[str]
) -> None:
    """Negative control: the logs of `test_old_artifacts_are_used` are empty only because of the cache."""
    skip_without_bf16(lowering)
    shutil.rmtree(folder / "cache" / "entries")
    build(folder, lowering, cache).session.close()
    assert logged[0].startswith(message)
