"""Check of the engines, each probed in a child process, because a broken runtime may crash it."""

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
_DEFAULT = "onnxruntime"  # required for serving
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
    """Check all registered engines, installed or not."""
    # not by the registry: it imports numpy, which may be broken
    names = sorted(entry.name for entry in entry_points(group=_GROUP))
    if not names:
        yield Finding(
            subject="engines",
            level=Level.ERROR,
            message="no engine is registered: the entry points of graphkiln are not installed",
            hint="pip install --force-reinstall 'graphkiln[serve]'",
        )
    processes = {name: start_probe(name) for name in names}
    for name, process in processes.items():
        versions = installed_versions(_DISTRIBUTIONS.get(name, (name,)))
        yield find_engine(name, next(iter(versions.values()), ""), *read_probe(process))


def start_probe(name: str) -> subprocess.Popen[str]:
    """Start a child process that probes an engine."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROBE, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_probe(process: subprocess.Popen[str]) -> tuple[dict[str, str], str]:
    """Read the result of a child process.

    Returns:
        Device -> reason why the engine cannot run on it ("" if it can), and the reason for a missing result or "".
    """
    with process:
        try:
            printed, complaint = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {}, f"hangs when loaded ({_TIMEOUT_S} s)"
    if process.returncode < 0:
        number = -process.returncode
        known = {each.value: each.name for each in signal.Signals}
        return {}, f"crashes its process when loaded ({known.get(number, f'signal {number}')})"
    try:
        found = json.loads(printed.splitlines()[-1])
        return dict(found.get("devices", {})), str(found.get("reason", ""))
    except (ValueError, IndexError, AttributeError):
        return {}, (complaint.strip().splitlines() or ["no output"])[-1]


def find_engine(name: str, version: str, devices: Mapping[str, str], reason: str) -> Finding:
    """Create the finding about an engine from the version of its runtime and the result of `read_probe`."""
    usable = [device for device, why in devices.items() if not why]
    missing = reason or "; ".join(why for why in devices.values() if why)
    message = f"{version} on {', '.join(usable)}".strip()
    level, hint = Level.OK, ""
    if not usable:
        message = f"cannot be used: {missing or 'no supported device'}"
        if name == _DEFAULT:
            level = Level.ERROR
            hint = "pip install --force-reinstall 'graphkiln[serve]': serving requires ONNX Runtime"
        elif reason and "not installed" not in reason:
            level, hint = Level.WARNING, "reinstall it, or do not request it"
    facts: dict[str, Fact] = {"version": version, "devices": usable, "reason": missing}
    return Finding(subject=name, level=level, message=message, hint=hint, facts=facts)
