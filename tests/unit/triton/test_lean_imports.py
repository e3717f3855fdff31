"""Libraries without what no instance needs of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from graphkiln_backend.triton import lean_imports

PROGRAM = """
import ctypes, json, sys, threading
import graphkiln_backend.triton.lean_imports as lean_imports
lean_imports.import_libraries()
import numpy as np
left = [name for names in lean_imports.DEFERRED.values() for name in names if name in sys.modules]
from google.protobuf import descriptor_pb2, json_format, text_format
found = []
def draw():
    found.append(np.random.default_rng(7).integers(1 << 40))
threads = [threading.Thread(target=draw) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
import numpy.random
results = {
    "left": left,
    "drawn": [int(number) for number in found],
    "real": np.random is sys.modules["numpy.random"] and type(np.random).__name__ == "module",
    "masked": int(np.ma.masked_equal([1, 2, 2], 2).sum()),
    "fitted": np.polynomial.Polynomial([1.0, 2.0])(3.0),
    "transformed": np.fft.fft([1.0, 1.0]).real.tolist(),
    "parsed": json_format.Parse('{"name": "m"}', descriptor_pb2.FileDescriptorProto()).name,
    "told": text_format.MessageToString(descriptor_pb2.FileDescriptorProto(name="m")),
    "viewed": int(np.ctypeslib.as_array((ctypes.c_int * 2)(1, 2)).sum()),
    "solved": np.linalg.inv(np.eye(2) * 2).tolist(),
}
print(json.dumps(results))
"""
"""In a process of its own: whoever runs the tests has imported all of numpy."""


def test_what_is_deferred_is_there_when_it_is_read() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("left") == []
    assert len(set(found["drawn"])) == 1
    assert len(found.pop("drawn")) == 4, "threads that read it first at the same time"
    assert found == {
        "real": True,
        "masked": 1,
        "fitted": 7.0,
        "transformed": [2.0, 0.0],
        "parsed": "m",
        "told": 'name: "m"\n',
        "viewed": 3,
        "solved": [[0.5, 0.0], [0.0, 0.5]],
    }


def test_what_is_imported_already_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(sys.modules)
    monkeypatch.setattr(lean_imports, "import_module", pytest.fail)
    lean_imports.import_libraries()
    assert sys.modules == before
