"""What Triton puts into /tmp wherever TMPDIR leads."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from graphkiln_backend.server.run_folder import (
    environments_of,
    remove_environments,
    remove_sent_models,
    rename_environments,
)

RUN = f"graphkiln-{os.getpid() % 100_000_000:08d}"


def test_a_backend_makes_its_folders_under_a_name_that_is_found(tmp_path: Path) -> None:
    library = tmp_path / "libtriton_python.so"
    library.write_bytes(b"\0/tmp/python_env_\0")
    rename_environments(library, RUN)
    made = Path(library.read_bytes().strip(b"\0").decode() + "aB3xYz")
    made.mkdir()
    assert environments_of(RUN) == [made]
    remove_environments(RUN)
    assert not made.exists()


@pytest.mark.parametrize("run", [RUN, "graphkiln-short"], ids=["usual", "short"])
@pytest.mark.parametrize("content", [b"/tmp/elsewhere_", b"/tmp/python_env_ /tmp/python_env_"], ids=["none", "two"])
def test_a_backend_of_another_release_is_left_as_it_is(tmp_path: Path, content: bytes, run: str) -> None:
    library = tmp_path / "libtriton_python.so"
    library.write_bytes(content)
    rename_environments(library, run)
    assert library.read_bytes() == content


@pytest.mark.parametrize("noting", ["shared", "overlay"])
def test_models_that_were_sent_go_with_their_run(tmp_path: Path, noting: str) -> None:
    with TemporaryDirectory(prefix="kept", dir="/tmp") as kept:
        sent = Path(f"/tmp/folder{os.getpid() % 1_000_000:06d}")
        sent.mkdir()
        notes = tmp_path / noting / "sent"
        notes.mkdir(parents=True)
        for folder in (sent, Path(kept)):
            (notes / folder.name).symlink_to(folder)
        remove_sent_models(tmp_path)
        assert not sent.exists()
        assert Path(kept).is_dir()
