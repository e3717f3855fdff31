"""What OneFlow saved into a store becomes an entry of the cache, once for each content."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import saved_graphs

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.lowering.adoption import adopted, convert_apart
from graphkiln_backend.repository.version import read_version


class Conversions:
    """Stands in for the conversion, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, saved: Path, target: Path) -> None:
        self.count += 1
        (target / "model.onnx").write_text(f"{saved} {self.count}")


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "store" / "net" / "1"
    (folder / "model" / "a.weight").mkdir(parents=True)
    (folder / "model" / "model.mlir").write_text("module {}")
    (folder / "model" / "a.weight" / "out").write_bytes(b"1234")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


class TestAdopted:
    def test_once_for_each_content(self, version: Path, tmp_path: Path, logged: list[str]) -> None:
        convert = Conversions()
        for _ in range(2):
            with ArtifactCache(tmp_path / "cache") as cache:
                first = adopted(version, cache, convert)
        (version / "model" / "a.weight" / "out").write_bytes(b"1235")
        with ArtifactCache(tmp_path / "cache") as cache:
            other = adopted(version, cache, convert)
            assert other != first
            assert (other / "model.onnx").read_text().endswith(" 2")
        assert convert.count == 2
        assert logged == [f"converting net 1, which OneFlow saved: once, into {tmp_path / 'cache'}"] * 2

    def test_a_file_that_only_moved_is_another_content(self, version: Path, cache: ArtifactCache) -> None:
        convert = Conversions()
        with cache:
            adopted(version, cache, convert)
            (version / "model" / "a.weight").rename(version / "model" / "b.weight")
            adopted(version, cache, convert)
        assert convert.count == 2

    @pytest.mark.parametrize("file", ["model.onnx", "manifest.json"])
    def test_a_graph_of_ours_beside_it_goes_first(self, version: Path, cache: ArtifactCache, file: str) -> None:
        (version / file).write_text("{}")
        with cache:
            assert adopted(version, cache, Conversions()) == version

    def test_a_version_without_any_is_left_alone(self, tmp_path: Path, cache: ArtifactCache) -> None:
        with cache:
            assert adopted(tmp_path, cache, Conversions()) == tmp_path

    def test_a_failure_is_not_kept(self, version: Path, cache: ArtifactCache, tmp_path: Path) -> None:
        with cache, pytest.raises(ConversionError, match=r"line 1, column 9"):
            adopted(version, cache)
        assert list((tmp_path / "cache" / "entries").iterdir()) == []
        assert list((tmp_path / "cache" / "partial").iterdir()) == []


class TestApart:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        return saved_graphs.unpack("models.zip", tmp_path / "unpacked", "cnn") / "cnn" / "model"

    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        (tmp_path / "target").mkdir()
        return tmp_path / "target"

    def test_what_it_makes_is_a_version(self, saved: Path, target: Path) -> None:
        convert_apart(saved, target)
        assert {path.name for path in target.iterdir()} == {"model.onnx", "manifest.json", "golden.npz"}
        assert read_version(target).golden is not None

    def test_errors_come_across(self, saved: Path, target: Path) -> None:
        (saved / "m.classes.bias" / "out").write_bytes(b"")
        with pytest.raises(ConversionError, match=r"state tensor 'm\.classes\.bias'.* short .*save the graph again"):
            convert_apart(saved, target)

    def test_a_folder_that_cannot_be_written_is_told(self, saved: Path, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=r"cannot be converted in .*missing: No such file .*make room"):
            convert_apart(saved, tmp_path / "missing")

    def test_a_process_that_is_killed_is_an_error(self, saved: Path, target: Path) -> None:
        with when_it_converts(lambda child: child.kill()), pytest.raises(ConversionError, match="ended from outside"):
            convert_apart(saved, target)

    @pytest.mark.timeout(60)
    def test_it_ends_with_the_call(self, saved: Path, target: Path) -> None:
        """Even a process that does nothing more."""

        def interrupt(child: psutil.Process) -> None:
            child.suspend()
            os.kill(os.getpid(), signal.SIGUSR1)

        def raise_it(*_: object) -> None:
            raise _Interrupted

        before = signal.signal(signal.SIGUSR1, raise_it)
        try:
            with when_it_converts(interrupt), pytest.raises(_Interrupted):
                convert_apart(saved, target)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert converting() == []


class _Interrupted(Exception):
    pass


def converting() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if any("spawn_main" in word for word in each.cmdline())]


@contextmanager
def when_it_converts(act: Callable[[psutil.Process], object]) -> Iterator[None]:
    """Does something as soon as the process is there."""

    def wait_and_act() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if found := converting():
                act(found[0])
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    yield
    thread.join()
