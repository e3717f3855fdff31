"""Libraries of custom operators come into every session, and a bad one is an error that names it."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

from graphkiln_backend.engines.onnxruntime.loading import digest, register
from graphkiln_backend.graph.errors import LoweringError


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_what_does_not_load(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(content)
    with pytest.raises(LoweringError, match=r"custom operators .*/lib.so does not load"):
        register(onnxruntime.SessionOptions(), [str(tmp_path / "lib.so")])


def test_a_library_without_operators() -> None:
    with pytest.raises(LoweringError, match=r"libm.so.6 does not load.*RegisterCustomOps"):
        register(onnxruntime.SessionOptions(), ["libm.so.6"])


def test_another_content_is_another_digest(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"1")
    first = digest([str(library)])
    library.write_bytes(b"2")
    assert digest([str(library)]) != first
    assert (digest([]), bool(digest(["libm.so.6"]))) == ("", True)
