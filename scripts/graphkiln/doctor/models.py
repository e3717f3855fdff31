"""Checks of the models in the stores: readable, intact, and small enough for this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln.doctor.engines import read_probe, start_probe
from graphkiln.doctor.examination import Finding, Level, Request, graded, refused
from graphkiln.doctor.serving import backend_folders_of
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.files import format_size

if TYPE_CHECKING:
    from graphkiln_backend.lowering.seat import NativeBackend
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.repository.config import ModelConfigProto
    from graphkiln_backend.repository.model_config import ModelConfig
    from graphkiln_backend.storage.address import RemoteAddress

# Total size of models above which files are not hashed, which would take too long.
_HASHED_BYTES = 2 << 30
# Seconds to load and prove versions, and the size of the versions that are tried; less than the deadline of a check.
_TRY_S, _TRIED_BYTES = 15.0, 256 << 20
_AUTO = "auto"
_UNFINISHED = ".graphkiln-*"
_BEING_WRITTEN_S = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Resources that a served model needs.

    Attributes:
        model: Name.
        engine: Configured engine, or that of the graph's format, or "".
        device: Device of the instances.
        has_fallback: A fallback is configured.
        instances: Number of instances, including those of its image model.
        shared_bytes: Shared memory for the largest batches of all instances.
        graph_bytes: Size of the files of the newest version.
        config: Completed configuration; None for a graph that is not converted yet.
    """

    model: str = ""
    engine: str = ""
    device: str = "cpu"
    has_fallback: bool = False
    instances: int
    shared_bytes: int
    graph_bytes: int
    config: ModelConfigProto | None = None


def check_models(request: Request) -> Iterator[Finding]:
    """Check all versions of all models in all stores."""
    from graphkiln_backend.lowering.seat import find_native_backend
    from graphkiln_backend.repository.version_folders import reason_to_ignore

    needs = []
    backends = backend_folders_of(request)
    native = find_native_backend(backends)
    for store in request.stores:
        if not store.is_dir():
            missing = "is not a folder" if store.exists() else "does not exist"
            yield Finding(
                subject=str(store), level=Level.ERROR, message=f"the model store {missing}", hint="--model-store DIR"
            )
            continue
        yield from find_unfinished(store, time.time())
        try:
            folders = folders_of(store)
        except GraphkilnError as error:
            yield refused(str(store), error)
            continue
        others = {folder: reason for folder in folders if (reason := reason_to_ignore(folder))}
        for folder, reason in others.items():
            hint = "remove it from the store, or add a version"
            yield Finding(subject=folder.name, level=Level.WARNING, message=f"ignored: {reason}", hint=hint)
        models = [folder for folder in folders if folder not in others]
        is_small = sum(map(size_of, models)) <= _HASHED_BYTES
        if not models:
            yield Finding(subject=str(store), level=Level.WARNING, message="the model store contains no model")
        for model in models:
            if backend := other_backend(model, backends):
                is_ensemble = backend == "ensemble"
                yield find_steps(model, models) if is_ensemble else find_other(model, backend, backends)
                continue
            found, need = examine_model(model, compare_hashes=is_small)
            needs += [need] if need else []
            yield from found
            if need and need.config is not None:
                yield from find_seat(model, need.config, native)
    if needs:
        yield from find_fit(needs)
    yield from find_missing_engines(needs)


def folders_of(store: Path) -> list[Path]:
    """Return the folders of the models of a store.

    Raises:
        GraphkilnError: Its config.json is invalid.
    """
    from graphkiln_backend.repository.ovms import read_ovms
    from graphkiln_backend.repository.stores import model_at, model_folders

    if listed := read_ovms(store):
        return [each.folder for each in listed.models]
    model = model_at(store)
    return [model] if model else [*model_folders(store)]


def try_models(request: Request) -> Iterator[Finding]:
    """Load and prove the versions that would be served, smallest first, as far as time allows."""
    from graphkiln_backend.repository.config import select_versions

    backends = backend_folders_of(request)
    end, untried = time.monotonic() + _TRY_S, []
    found: list[tuple[int, Path, ModelConfigProto]] = []
    for store in request.stores:
        with suppress(GraphkilnError, OSError):  # reported by `check_models`
            for model in folders_of(store):
                with suppress(GraphkilnError, OSError):
                    config = None if other_backend(model, backends) else need_of(model).config
                    if config is not None:
                        folders = {int(folder.name): folder for folder in versions_of(model)}
                        served = [folders[number] for number in select_versions(config, folders)]
                        found += [(size_of(folder), folder, config) for folder in served]
    for size_bytes, version, config in sorted(found, key=lambda each: each[:2]):
        left_s = end - time.monotonic()
        subject = f"{version.parent.name} {version.name}"
        reason = _try(version, config, left_s) if left_s > 0 and size_bytes <= _TRIED_BYTES else None
        if reason is None:
            untried.append(subject)
        elif reason:
            hint = f"graphkiln explain STORE/{version.parent.name} shows how it would be lowered"
            yield Finding(subject=subject, level=Level.ERROR, message=f"would not be served: {reason}", hint=hint)
    if untried:
        yield Finding(
            subject="not loaded here", message=", ".join(untried), hint="graphkiln verify STORE/NAME does that"
        )


def _try(version: Path, config: ModelConfigProto, deadline_s: float) -> str | None:
    """Return why a version is refused, an empty text if it is not, and None if the time is over."""
    from tempfile import TemporaryDirectory

    from graphkiln_backend.cache.settings import CacheSettings
    from graphkiln_backend.repository.config import write_config
    from graphkiln_backend.server.admission import Candidate, admit
    from graphkiln_backend.system.signals import ServerStopping

    end = time.monotonic() + deadline_s
    with TemporaryDirectory(prefix="graphkiln-doctor-") as temporary:
        path = Path(temporary) / "config.pbtxt"
        write_config(config, path)
        candidate = Candidate(folder=version, config=path, cache=CacheSettings(), temporary=Path(temporary))
        with suppress(ServerStopping):
            return admit(candidate, deadline_s=2 * deadline_s, stopped=lambda: time.monotonic() > end).reason
    return None


def other_backend(model: Path, backends: Sequence[Path]) -> str:
    """Return the name of the backend that computes a model if it is not graphkiln's, else "".

    Args:
        model: Folder of the model.
        backends: Backend directories of `serve`.
    """
    from graphkiln_backend.repository.config import read_config
    from graphkiln_backend.repository.overlay import backend_of
    from graphkiln_backend.repository.version import CONFIG_FILE
    from graphkiln_backend.server.run_folder import backend_names

    names = backend_names(backends, replace_onnxruntime=False)
    try:
        config = read_config(model / CONFIG_FILE)
    except GraphkilnError:
        return ""  # reported by `examine_model`
    name = backend_of(config, names)
    return "" if name in names else name or str(config.platform)


def find_steps(ensemble: Path, models: Sequence[Path]) -> Finding:
    """Check that the store has the models of an ensemble's steps; Triton itself runs ensembles."""
    from graphkiln_backend.graph.text import did_you_mean
    from graphkiln_backend.repository.config import read_config
    from graphkiln_backend.repository.version import CONFIG_FILE

    known = [model.name for model in models]
    steps = [step.model_name for step in read_config(ensemble / CONFIG_FILE).ensemble_scheduling.step]
    if absent := [name for name in steps if name not in known]:
        hint = did_you_mean(absent[0], known)
        message = f"ensemble: its step {absent[0]!r} is not a model of this store"
        return Finding(subject=ensemble.name, level=Level.ERROR, message=message, hint=hint)
    return Finding(subject=ensemble.name, message=f"ensemble of {', '.join(steps)}")


def find_other(model: Path, backend: str, backends: Sequence[Path]) -> Finding:
    """Check that a model's backend is installed and that its versions can be proven through the server."""
    from graphkiln_backend.repository.config import DROP_IN_BACKEND, DROP_IN_PLATFORM
    from graphkiln_backend.repository.version import claims_proof

    message = f"backend {backend}"
    if not any((folder / backend.partition("_")[0]).is_dir() for folder in backends):
        hint = "serve it with NVIDIA's image of Triton, or name its folder: --backend-directory DIR"
        if backend == DROP_IN_BACKEND:  # only its platform has this name
            hint = f'write backend: "{backend}" in its config.pbtxt, or platform: "{DROP_IN_PLATFORM}"'
        return Finding(subject=model.name, level=Level.ERROR, message=f"{message} is not installed", hint=hint)
    versions = versions_of(model)
    unproven = [version.name for version in versions if not claims_proof(version)]
    return graded(
        model.name,
        f"{message}: {'unproven' if unproven else 'proven by its golden samples when it is served'}",
        warning=unproven,
        hint=f"graphkiln adopt STORE/{model.name} --reference MODEL",
        backend=backend,
        unproven=unproven,
    )


def examine_model(model: Path, *, compare_hashes: bool) -> tuple[list[Finding], Need | None]:
    """Examine the configuration and the versions of a model.

    Args:
        model: Folder of the model.
        compare_hashes: Read and hash all files.

    Returns:
        The findings, and the needs if the configuration is readable.
    """
    try:
        versions = versions_of(model)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)  # a broken link
        hint = "fix or remove the link" if gone else f"chmod -R a+rX {model}, or serve as its owner"
        return [_broken(model.name, error, hint)], None
    found = [find_version(version, compare_hashes=compare_hashes) for version in versions]
    if found and all(finding.level is Level.OK for finding in found):
        found = [_summary(model, found)]
    try:
        need = need_of(model)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        hint = getattr(error, "hint", "") or "fix config.pbtxt, or convert the model again"
        return [*found, _broken(model.name, error, hint)], None
    return found, need


def versions_of(model: Path) -> list[Path]:
    """Return the version folders of a model, oldest first."""
    from graphkiln_backend.repository.version_folders import version_folders

    return list(version_folders(model.iterdir()).values())


def find_version(version: Path, *, compare_hashes: bool) -> Finding:
    """Check the files of a version against its manifest, including hashes if `compare_hashes`."""
    from graphkiln_backend.repository.importers import find_foreign_graph
    from graphkiln_backend.repository.version import has_own_graph, read_version, read_version_signature

    subject = f"{version.parent.name} {version.name}"
    try:
        foreign = None if has_own_graph(version) else find_foreign_graph(version)
        if foreign:
            return Finding(
                subject=subject, message=f"saved by {foreign.importer.framework}, will be converted at its first start"
            )
        if not compare_hashes:
            read_version_signature(version)
            hint = f"graphkiln verify {version} compares all files"
            return Finding(subject=subject, message="large: the files were not hashed", hint=hint)
        read = read_version(version)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        return _broken(subject, error, getattr(error, "hint", "") or "convert it again, or remove the version folder")
    return Finding(subject=subject, message="whole, golden samples" if read.golden else "whole, no golden samples")


def need_of(model: Path) -> Need:
    """Return the needs of a model.

    Raises:
        GraphkilnError: The configuration or the graph is invalid, or devices of `parallel` do not exist.
    """
    from graphkiln_backend.engines.hardware import gpus
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.repository.importers import find_foreign_graph
    from graphkiln_backend.repository.model_config import ModelConfig, check_gpus
    from graphkiln_backend.repository.overlay import complete_config
    from graphkiln_backend.repository.version import has_own_graph, holds_ir, newest_version
    from graphkiln_backend.server.image_models import find_taker
    from graphkiln_backend.server.limits import region_bytes
    from graphkiln_backend.server.run_folder import BACKEND_NAMES

    newest = newest_version(model)
    if not has_own_graph(newest) and find_foreign_graph(newest):
        return Need(instances=1, shared_bytes=region_bytes(0), graph_bytes=size_of(newest))
    completed = complete_config(model, BACKEND_NAMES, lambda version: version)
    check_gpus(completed, has_gpu=bool(gpus()))
    pair = completed, find_taker(completed)
    config, *_ = served = [ModelConfig.from_protobuf(each, has_gpu=bool(gpus())) for each in pair if each is not None]
    settings = Settings.from_config(config, config.device)
    _check_devices(settings, config)
    return Need(
        model=model.name,
        engine=settings.engine or ("openvino" if holds_ir(newest, config.default_model_filename) else ""),
        device=str(config.device),
        has_fallback=bool(settings.fallback),
        instances=sum(each.instances for each in served),
        shared_bytes=sum(each.processes * region_bytes(each.batch_bytes) for each in served),
        graph_bytes=size_of(newest),
        config=completed,
    )


def find_seat(model: Path, config: ModelConfigProto, native: NativeBackend | None) -> Iterator[Finding]:
    """Find who computes a model, if Triton's C++ `onnxruntime` backend is installed or requested.

    Args:
        model: Folder of the model.
        config: Its completed configuration.
        native: The C++ backend, or None.
    """
    from graphkiln_backend.lowering.seat import choose_seat
    from graphkiln_backend.repository.config import select_versions

    versions = {int(version.name): version for version in versions_of(model)}
    subject = f"seat of {model.name}"
    try:
        seat = choose_seat(config, [versions[number] for number in select_versions(config, versions)], [], native)
    except GraphkilnError as error:
        yield refused(subject, error)
        return
    if native:
        yield Finding(subject=subject, message=str(seat), facts={"native": seat.native, "reason": seat.reason})


def _check_devices(settings: Settings, config: ModelConfig) -> None:
    """Check that the devices of `parallel` exist."""
    from graphkiln_backend.engines.hardware import gpus
    from graphkiln_backend.lowering.parallel.spreading import Machine
    from graphkiln_backend.system.resources import usable_core_numbers

    if settings.parallel:
        Machine(device=config.device, cores=usable_core_numbers(), gpus=len(gpus()), instances=config.processes).places(
            settings.parallel
        )


def find_missing_engines(needs: Sequence[Need]) -> Iterator[Finding]:
    """Find models that request an engine which cannot run them on this machine."""
    requested = {need.engine for need in needs} - {"", _AUTO}
    probes = {name: start_probe(name) for name in sorted(requested)}
    found = {name: read_probe(process) for name, process in probes.items()}
    for need in needs:
        devices, reason = found.get(need.engine, ({need.device: ""}, ""))
        missing = reason or devices.get(need.device, f"there is no {need.device} here")
        if missing:
            yield graded(
                need.model,
                f"requests {need.engine} on {need.device}, which cannot be used: {missing}",
                error=not need.has_fallback,
                warning=True,
                hint=f"graphkiln explain STORE/{need.model} shows alternatives",
            )


def find_fit(needs: Sequence[Need]) -> Iterator[Finding]:
    """Compare the needs of all models with the memory, threads and open files of this machine."""
    from graphkiln_backend.server.limits import (
        INSTANCE_BYTES,
        check_files,
        check_threads,
        free_memory,
        free_shared_memory,
    )

    instances = sum(need.instances for need in needs)
    shared, free = sum(need.shared_bytes for need in needs), free_shared_memory()
    yield graded(
        "shared memory",
        f"{instances} instances need {format_size(shared)} for full batches, {format_size(free)} are free",
        error=shared > free,
        hint=f"docker run --shm-size={2 * shared >> 20}m, or a smaller max_batch_size",
        needed_bytes=shared,
        free_bytes=free,
        instances=instances,
    )
    graphs, available = sum(need.graph_bytes for need in needs), free_memory()
    processes = instances * INSTANCE_BYTES
    yield graded(
        "memory",
        f"the graphs are {format_size(graphs)}, the instances beside them {format_size(processes)}, "
        f"{format_size(available)} of memory are available",
        warning=graphs + processes > available,
        hint="serve fewer models or fewer instances: instance_group { count: 1 }",
        graph_bytes=graphs,
        instance_bytes=processes,
        available_bytes=available,
    )
    for subject, check in (("threads", check_threads), ("open files", check_files)):
        try:
            check(instances)
        except GraphkilnError as error:
            yield refused(subject, error)


def find_unfinished(store: Path, now_s: float) -> Iterator[Finding]:
    """Find unfinished versions of conversions; only the owner of the store should remove them."""
    for path in sorted((*store.glob(_UNFINISHED), *store.glob(f"*/{_UNFINISHED}"))):
        age_s = now_s - path.stat().st_mtime
        old = age_s > _BEING_WRITTEN_S
        yield graded(
            str(path.relative_to(store)),
            "an unfinished version of a killed conversion" if old else "a conversion is writing a version",
            warning=old,
            hint=f"rm -r '{path}'",
            path=str(path),
            age_s=round(age_s),
        )


def size_of(folder: Path) -> int:
    """Return the size of all files below a folder in bytes, without following links."""
    return sum((Path(parent) / name).lstat().st_size for parent, _, names in os.walk(folder) for name in names)


def _summary(model: Path, found: Sequence[Finding]) -> Finding:
    versions = ", ".join(finding.subject.rpartition(" ")[2] for finding in found)
    messages = "; ".join(dict.fromkeys(finding.message for finding in found))
    hints = "; ".join(dict.fromkeys(finding.hint for finding in found if finding.hint))
    return Finding(
        subject=model.name,
        message=f"version{'s' if len(found) > 1 else ''} {versions}: {messages}",
        hint=hints,
        facts={"versions": versions.split(", ")},
    )


def _broken(subject: str, error: Exception, hint: str) -> Finding:
    message = str(getattr(error, "message", "") or f"{type(error).__name__}: {error}")
    return Finding(subject=subject, level=Level.ERROR, message=f"would not be served: {message}", hint=hint)


def check_remote_stores(request: Request) -> Iterator[Finding]:
    """Check that remote stores can be listed; fetch and examine a single model."""
    from graphkiln_backend.storage.address import RemoteStoreError
    from graphkiln_backend.storage.files import RemoteFiles

    for address in request.remote:
        try:
            listing = RemoteFiles(address).list()
            if is_one_model(listing):
                yield from _find_model(address)
                continue
        except RemoteStoreError as error:
            message = error.message.removeprefix(f"{address}: ")
            yield Finding(subject=str(address), level=Level.ERROR, message=message, hint=error.hint)
            continue
        models = sorted({path.partition("/")[0] for path in listing if "/" in path})
        size = sum(file.size for file in listing.values())
        found = f"{len(models)} models, {len(listing)} files, {format_size(size)}"
        yield graded(
            str(address),
            found if models else "the model store contains no model",
            warning=not models,
            hint="",
            models=models,
            files=len(listing),
            size_bytes=size,
        )


def is_one_model(listing: Collection[str]) -> bool:
    """Return true if the paths below an address belong to a model or version instead of a store."""
    from graphkiln_backend.repository.version import CONFIG_FILE, GRAPH_FILE
    from graphkiln_backend.repository.version_folders import is_version

    folders = {path.partition("/")[0] for path in listing if "/" in path}
    own = {CONFIG_FILE, GRAPH_FILE} & set(listing)
    return bool(own) or (bool(folders) and all(map(is_version, folders)))


def _find_model(address: RemoteAddress) -> Iterator[Finding]:
    from graphkiln_backend.repository.remote_model import fetch_model
    from graphkiln_backend.repository.stores import model_at
    from graphkiln_backend.system.owned_folder import OwnedFolder

    with OwnedFolder(prefix="graphkiln-doctor-") as temporary:
        fetched = fetch_model(address, temporary.path)
        found, _ = examine_model(model_at(fetched) or fetched, compare_hashes=True)
    yield from found
    yield Finding(
        subject=str(address),
        level=Level.WARNING,
        message="a model instead of a store: only its newest version was examined",
        hint=f"serve takes the store of the model: {address.split()[0]}",
    )
