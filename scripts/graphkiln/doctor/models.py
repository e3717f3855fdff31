"""Each model of the stores: readable, whole, as its manifest says; and whether all of them fit on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln.doctor.finding import Finding, Level, Request, format_size
from graphkiln.doctor.packages import installed_versions
from graphkiln_backend.graph.errors import GraphkilnError

# Which engines can run here. Each is looked at in a process of its own: a runtime that is broken may take it along.

_GROUP = "graphkiln.engines"
_DEFAULT = "onnxruntime"  # without this one nothing can be served
_DISTRIBUTIONS = {"onnxruntime": ("onnxruntime", "onnxruntime-gpu"), "tensorrt": ("tensorrt", "onnxruntime-gpu")}
_TIMEOUT_S = 15
_PROBE = """
import json, sys
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import GraphkilnError
devices = {}
try:
    engine = load_engine(sys.argv[1])
    for device in (CPU, *map(Device.gpu, range(len(gpus())))):
        support = engine.probe(device)
        devices[str(device)] = "" if support.ok else support.reason
    print(json.dumps({"devices": devices}))
except GraphkilnError as error:
    print(json.dumps({"reason": str(error)}))
"""


def check_engines(_: Request) -> Iterator[Finding]:
    """Every engine that is registered, installed or not."""
    # The registry would import numpy, which may be what is broken.
    names = sorted(entry.name for entry in entry_points(group=_GROUP))
    if not names:
        yield Finding(
            subject="engines",
            level=Level.ERROR,
            message="none is registered: the entry points of graphkiln are not installed",
            hint="pip install --force-reinstall 'graphkiln[serve]'",
        )
    processes = {name: start_probe(name) for name in names}
    for name, process in processes.items():
        yield find_engine(name, _version(name), *read_probe(process))


def start_probe(name: str) -> subprocess.Popen[str]:
    """Starts the process that looks at an engine."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROBE, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_probe(process: subprocess.Popen[str]) -> tuple[dict[str, str], str]:
    """What such a process found.

    Returns:
        Device -> why the engine cannot run on it, empty where it can; and why nothing at all is known, or empty.
    """
    with process:
        try:
            printed, complaint = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {}, f"hangs when it is loaded ({_TIMEOUT_S} s)"
    if process.returncode < 0:
        return {}, f"ends its process when it is loaded ({_signal_name(-process.returncode)})"
    try:
        found = json.loads(printed.splitlines()[-1])
        return dict(found.get("devices", {})), str(found.get("reason", ""))
    except (ValueError, IndexError, AttributeError):
        return {}, (complaint.strip().splitlines() or ["no output that can be read"])[-1]


def find_engine(name: str, version: str, devices: Mapping[str, str], reason: str) -> Finding:
    """One engine.

    Args:
        name: Its name.
        version: Its runtime's, or empty.
        devices: Device -> why it cannot run there, or empty.
        reason: Why nothing is known of it, or empty.
    """
    usable = [device for device, why in devices.items() if not why]
    missing = reason or "; ".join(why for why in devices.values() if why)
    broken = bool(reason) and "not installed" not in reason
    if usable:
        return Finding(
            subject=name,
            message=f"{version} on {', '.join(usable)}".strip(),
            facts={"version": version, "devices": usable, "reason": missing},
        )
    level = Level.ERROR if name == _DEFAULT else Level.WARNING if broken else Level.OK
    return Finding(
        subject=name,
        level=level,
        message=f"cannot be used: {missing or 'it knows no device of this machine'}",
        hint=_way_out(level),
        facts={"version": version, "devices": [], "reason": missing},
    )


def _way_out(level: Level) -> str:
    if level is Level.ERROR:
        return "pip install --force-reinstall 'graphkiln[serve]': without ONNX Runtime nothing is served"
    return "install it again, or do not request it" if level is Level.WARNING else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _version(name: str) -> str:
    found = installed_versions(_DISTRIBUTIONS.get(name, (name,)))
    return next(iter(found.values()), "")


if TYPE_CHECKING:
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.repository.model_config import ModelConfig

# Files of models that are larger together are not compared with their hashes: that takes longer than anybody waits.
_HASHED_BYTES = 2 << 30
_AUTO = "auto"
_UNFINISHED = ".graphkiln-*"
_BEING_WRITTEN_S = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What serving a model takes.

    Attributes:
        model: Its name.
        engine: The engine that its configuration requests, or empty.
        device: Where it runs.
        has_fallback: Whether its configuration names what else to try.
        instances: Number of its instances, and of those that decode images for it.
        shared_bytes: Shared memory for the largest batches of all.
        graph_bytes: Size of the files of its newest version.
    """

    model: str = ""
    engine: str = ""
    device: str = "cpu"
    has_fallback: bool = False
    instances: int
    shared_bytes: int
    graph_bytes: int


def check_models(request: Request) -> Iterator[Finding]:
    """Every store, every model, every version."""
    from graphkiln_backend.repository.stores import model_at, model_folders
    from graphkiln_backend.repository.version_folders import reason_to_pass_over

    needs = []
    for store in request.stores:
        if not store.is_dir():
            missing = "is not a folder" if store.exists() else "is missing"
            yield Finding(
                subject=str(store), level=Level.ERROR, message=f"the model store {missing}", hint="--model-store DIR"
            )
            continue
        yield from find_unfinished(store, time.time())
        folders = [model] if (model := model_at(store)) else model_folders(store)
        others = {folder: reason for folder in folders if (reason := reason_to_pass_over(folder))}
        yield from (_passed_over(folder, reason) for folder, reason in others.items())
        models = [folder for folder in folders if folder not in others]
        is_small = sum(map(size_of, models)) <= _HASHED_BYTES
        if not models:
            yield Finding(subject=str(store), level=Level.WARNING, message="the model store holds no model")
        for model in models:
            found, need = examine_model(model, compare_hashes=is_small)
            needs += [need] if need else []
            yield from found
    if needs:
        yield from find_fit(needs)
    yield from find_missing_engines(needs)


def examine_model(model: Path, *, compare_hashes: bool) -> tuple[list[Finding], Need | None]:
    """One model: its configuration and its versions.

    Args:
        model: Its folder.
        compare_hashes: Whether to read all of its files.

    Returns:
        What was found, and what it needs where its configuration can be read.
    """
    try:
        versions = versions_of(model)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)  # a link that leads nowhere
        hint = "mend the link, or take it out" if gone else f"chmod -R a+rX {model}, or serve as its owner"
        return [_broken(model.name, error, hint)], None
    found = [find_version(version, compare_hashes=compare_hashes) for version in versions]
    if found and all(finding.level is Level.OK for finding in found):
        found = [_summary(model, found)]
    try:
        need = need_of(model)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it is the finding
        hint = getattr(error, "hint", "") or "mend config.pbtxt, or convert the model again"
        return [*found, _broken(model.name, error, hint)], None
    return found, need


def versions_of(model: Path) -> list[Path]:
    """The version folders of a model, the oldest first."""
    from graphkiln_backend.repository.version_folders import version_folders

    return list(version_folders(model.iterdir()).values())


def find_version(version: Path, *, compare_hashes: bool) -> Finding:
    """One version: its files against its manifest.

    Args:
        version: Its folder.
        compare_hashes: Whether to read all of its files.
    """
    from graphkiln_backend.repository.importers import find_foreign_graph
    from graphkiln_backend.repository.version import has_own_graph, read_version, read_version_signature

    subject = f"{version.parent.name} {version.name}"
    try:
        foreign = None if has_own_graph(version) else find_foreign_graph(version)
        if foreign:
            return Finding(
                subject=subject, message=f"saved by {foreign.importer.framework}, converted at its first start"
            )
        if not compare_hashes:
            read_version_signature(version)
            hint = f"graphkiln verify {version} compares all files"
            return Finding(subject=subject, message="large: its files were not compared with their hashes", hint=hint)
        read = read_version(version)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it is the finding
        return _broken(subject, error, getattr(error, "hint", "") or "convert it again, or remove the version folder")
    return Finding(subject=subject, message="whole, golden samples" if read.golden else "whole, no golden samples")


def need_of(model: Path) -> Need:
    """What serving a model takes.

    Raises:
        GraphkilnError: Its configuration or its graph cannot be read, or it is spread over devices that are not here.
    """
    from graphkiln_backend.engines.hardware import gpus
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.repository.importers import find_foreign_graph
    from graphkiln_backend.repository.model_config import ModelConfig
    from graphkiln_backend.repository.overlay import complete_config
    from graphkiln_backend.repository.version import has_own_graph, newest_version
    from graphkiln_backend.server.image_models import find_taker
    from graphkiln_backend.server.run_folder import BACKEND_NAMES, region_bytes

    newest = newest_version(model)
    if not has_own_graph(newest) and find_foreign_graph(newest):
        return Need(instances=1, shared_bytes=region_bytes(0), graph_bytes=size_of(newest))
    completed = complete_config(model, BACKEND_NAMES, lambda version: version)
    pair = completed, find_taker(completed)
    config, *_ = served = [ModelConfig.from_protobuf(each, has_gpu=bool(gpus())) for each in pair if each is not None]
    settings = Settings.from_config(config, config.device)
    _check_devices(settings, config)
    return Need(
        model=model.name,
        engine=settings.engine,
        device=str(config.device),
        has_fallback=bool(settings.fallback),
        instances=sum(each.instances for each in served),
        shared_bytes=sum(each.processes * region_bytes(each.batch_bytes) for each in served),
        graph_bytes=size_of(newest),
    )


def _check_devices(settings: Settings, config: ModelConfig) -> None:
    """Refuses a model that is spread over more cores or GPUs than this machine has.

    Raises:
        LoweringError: They are not here.
    """
    from graphkiln_backend.engines.hardware import gpus
    from graphkiln_backend.lowering.parallel.places import find_places
    from graphkiln_backend.system.resources import usable_core_numbers

    if settings.parallel:
        find_places(
            settings.parallel,
            instances=config.processes,
            instance=0,
            device=config.device,
            cores=usable_core_numbers(),
            gpus=len(gpus()),
        )


def find_missing_engines(needs: Sequence[Need]) -> Iterator[Finding]:
    """The models whose configurations request an engine that cannot run them here."""
    requested = {need.engine for need in needs} - {"", _AUTO}
    probes = {name: start_probe(name) for name in sorted(requested)}
    found = {name: read_probe(process) for name, process in probes.items()}
    for need in needs:
        devices, reason = found.get(need.engine, ({need.device: ""}, ""))
        missing = reason or devices.get(need.device, f"there is no {need.device} here")
        if missing:
            yield Finding(
                subject=need.model,
                level=Level.WARNING if need.has_fallback else Level.ERROR,
                message=f"requests {need.engine} on {need.device}, which cannot be used: {missing}",
                hint=f"graphkiln explain STORE/{need.model} shows what else could run it",
            )


def find_fit(needs: Sequence[Need]) -> Iterator[Finding]:
    """Whether all models fit into the memory that is there."""
    from graphkiln_backend.server.limits import INSTANCE_BYTES, free_memory
    from graphkiln_backend.server.run_folder import free_shared_memory

    instances = sum(need.instances for need in needs)
    shared, free = sum(need.shared_bytes for need in needs), free_shared_memory()
    yield Finding(
        subject="shared memory",
        level=Level.ERROR if shared > free else Level.OK,
        message=f"{instances} instances need {format_size(shared)} for full batches, {format_size(free)} are free",
        hint=f"docker run --shm-size={2 * shared >> 20}m, or a smaller max_batch_size" if shared > free else "",
        facts={"needed_bytes": shared, "free_bytes": free, "instances": instances},
    )
    graphs, available = sum(need.graph_bytes for need in needs), free_memory()
    processes = instances * INSTANCE_BYTES
    scarce = graphs + processes > available
    yield Finding(
        subject="memory",
        level=Level.WARNING if scarce else Level.OK,
        message=f"the graphs are {format_size(graphs)}, the instances beside them {format_size(processes)}, "
        f"{format_size(available)} of memory are available",
        hint="serve fewer models here, or fewer instances: instance_group { count: 1 }" if scarce else "",
        facts={"graph_bytes": graphs, "instance_bytes": processes, "available_bytes": available},
    )
    yield from find_too_few(instances)


def find_too_few(instances: int) -> Iterator[Finding]:
    """Whether the instances of all models may have as many threads and open files as they need."""
    from graphkiln_backend.server.limits import check_files, check_threads

    for subject, check in (("threads", check_threads), ("open files", check_files)):
        try:
            check(instances)
        except GraphkilnError as error:
            yield Finding(subject=subject, level=Level.ERROR, message=error.message, hint=error.hint)


def find_unfinished(store: Path, now_s: float) -> Iterator[Finding]:
    """Versions that conversions have begun to write. Stores are the user's: nothing removes them but their owner.

    Args:
        store: The store.
        now_s: Seconds of the epoch.
    """
    for path in sorted((*store.glob(_UNFINISHED), *store.glob(f"*/{_UNFINISHED}"))):
        age_s = now_s - path.stat().st_mtime
        old = age_s > _BEING_WRITTEN_S
        yield Finding(
            subject=str(path.relative_to(store)),
            level=Level.WARNING if old else Level.OK,
            message="half a version, left by a conversion that died" if old else "a conversion is writing a version",
            hint=f"rm -r '{path}'" if old else "",
            facts={"path": str(path), "age_s": round(age_s)},
        )


def size_of(folder: Path) -> int:
    """Size of all files below a folder in bytes, without following links."""
    return sum((Path(parent) / name).lstat().st_size for parent, _, names in os.walk(folder) for name in names)


def _passed_over(folder: Path, reason: str) -> Finding:
    hint = "take it out of the store, or put a version into it"
    return Finding(subject=folder.name, level=Level.WARNING, message=f"passed over: {reason}", hint=hint)


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
    return Finding(subject=subject, level=Level.ERROR, message=f"would not be live: {message}", hint=hint)
