"""Engines that can run here, each probed in a process: a broken runtime may take its process along."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from graphkiln.doctor.examination import Fact, Finding, Level, Request
from graphkiln.doctor.serving import installed_versions

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
        versions = installed_versions(_DISTRIBUTIONS.get(name, (name,)))
        yield find_engine(name, next(iter(versions.values()), ""), *read_probe(process))


def start_probe(name: str) -> subprocess.Popen[str]:
    """Start the process that probes an engine."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROBE, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_probe(process: subprocess.Popen[str]) -> tuple[dict[str, str], str]:
    """Read the result of such a process.

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
        number = -process.returncode
        known = {each.value: each.name for each in signal.Signals}
        return {}, f"ends its process when it is loaded ({known.get(number, f'signal {number}')})"
    try:
        found = json.loads(printed.splitlines()[-1])
        return dict(found.get("devices", {})), str(found.get("reason", ""))
    except (ValueError, IndexError, AttributeError):
        return {}, (complaint.strip().splitlines() or ["no output that can be read"])[-1]


def find_engine(name: str, version: str, devices: Mapping[str, str], reason: str) -> Finding:
    """One engine, with the version of its runtime and the result of `read_probe`."""
    usable = [device for device, why in devices.items() if not why]
    missing = reason or "; ".join(why for why in devices.values() if why)
    message = f"{version} on {', '.join(usable)}".strip()
    level, hint = Level.OK, ""
    if not usable:
        message = f"cannot be used: {missing or 'it knows no device of this machine'}"
        if name == _DEFAULT:
            level = Level.ERROR
            hint = "pip install --force-reinstall 'graphkiln[serve]': without ONNX Runtime nothing is served"
        elif reason and "not installed" not in reason:
            level, hint = Level.WARNING, "install it again, or do not request it"
    facts: dict[str, Fact] = {"version": version, "devices": usable, "reason": missing}
    return Finding(subject=name, level=level, message=message, hint=hint, facts=facts)
