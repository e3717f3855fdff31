#!/usr/bin/env python3
"""A tritonserver that serves nothing, and refuses at its start what Triton of its release refuses.

Its release is in the file TRITON_VERSION beside its folder `bin`.
"""

import json
import re
import sys
from pathlib import Path

FLAGS = (
    *("model-repository", "backend-directory", "backend-config", "cache-directory", "model-control-mode", "load-model"),
    *("log-info", "log-verbose", "http-address", "http-port", "grpc-address", "grpc-port", "metrics-port"),
    *("reuse-http-port", "allow-gpu-metrics", "enable-peer-access", "pinned-memory-pool-byte-size", "exit-on-error"),
    *("strict-readiness", "http-restricted-api", "grpc-restricted-protocol"),
)
root = Path(sys.argv[0]).resolve().parent.parent
version = tuple(map(int, (root / "TRITON_VERSION").read_text().split(".")))
flags = [*FLAGS, *(["allow-client-shm"] if version >= (2, 68) else [])]
if "--help" in sys.argv:
    print("Usage: tritonserver [options]", *(f"  --{flag} <value>\n\tHelp." for flag in flags), sep="\n")
    print("  --disable-auto-complete-config\n\tHelp.")
    sys.exit()

given = [word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:]]
if unknown := [name for name, value in given if value and name not in flags]:
    sys.exit(f"unrecognized option '--{unknown[0]}'")
for model in (model for name, value in given if name == "model-repository" for model in Path(value).iterdir()):
    for label in re.findall(r'label_filename: "([^"]+)"', (model / "config.pbtxt").read_text()):
        if version >= (2, 66) and not (model / label).resolve().is_relative_to(model.resolve()):
            sys.exit(f"label file '{label}' in model '{model.name}' is outside model directory")
print(json.dumps({"shared memory": version < (2, 68) or ("allow-client-shm", "true") in given}))
