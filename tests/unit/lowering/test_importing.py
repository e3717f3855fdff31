"""Models of other frameworks are converted once per content, into the cache."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import saved_graphs

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.lowering.importing import convert_if_needed, convert_in_subprocess
from graphkiln_backend.repository import importers
from graphkiln_backend.repository.importers import ForeignGraph
from graphkiln_backend.repository.version import read_version
from graphkiln_converters.importers.oneflow import OneFlowImporter


class Conversions:
    """Fake conversion that counts its calls."""

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
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    conversions = Conversions()
    monkeypatch.setattr(OneFlowImporter, "convert", conversions)
    return conversions


class TestConvertIfNeeded:
    def test_conversion_runs_once_per_content(
        self, version: Path, tmp_path: Path, conversions: Conversions, logged: list[str]
    ) -> None:
        for _ in range(2):
            with ArtifactCache(tmp_path / "cache") as cache:
                first = convert_if_needed(version, cache)
        (version / "model" / "a.weight" / "out").write_bytes(b"1235")
        with ArtifactCache(tmp_path / "cache") as cache:
            other = convert_if_needed(version, cache)
            assert other != first
            assert (other / "model.onnx").read_text().endswith(" 2")
        assert conversions.count == 2
        assert logged == [f"converting net 1, saved by OneFlow, into {tmp_path / 'cache'}"] * 2

    @pytest.mark.parametrize("file", ["model.onnx", "manifest.json"])
    def test_own_graph_comes_first(
        self, version: Path, cache: ArtifactCache, conversions: Conversions, file: str
    ) -> None:
        (version / file).write_text("{}")
        assert convert_if_needed(version, cache) == version
        assert conversions.count == 0

    def test_failed_conversion_is_not_cached(self, version: Path, cache: ArtifactCache) -> None:
        with pytest.raises(ConversionError, match=r"line 1, column 9"):
            convert_if_needed(version, cache)
        assert list((cache.folder / "entries").iterdir()) == []
        assert list((cache.folder / "partial").iterdir()) == []


class PaddleImporter:
    """Importer of another framework, whose results depend on NumPy."""

    kind = "paddle"
    framework = "Paddle"
    distributions = ("numpy",)

    def find_saved(self, version: Path) -> Path | None:
        saved = version / "inference"
        return saved if saved.is_dir() else None

    def convert(self, saved: Path, target: Path) -> None:
        (target / "model.onnx").write_bytes((saved / "net").read_bytes())


class TestOtherFrameworks:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importers, "load_importers", lambda: [OneFlowImporter(), PaddleImporter()])

    @pytest.fixture
    def paddle(self, tmp_path: Path) -> Path:
        folder = tmp_path / "store" / "net" / "7"
        (folder / "inference").mkdir(parents=True)
        (folder / "inference" / "net").write_bytes(b"graph")
        return folder

    def test_library_versions_are_part_of_the_key(
        self, paddle: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = convert_if_needed(paddle, cache)
        monkeypatch.setattr("graphkiln_backend.lowering.importing.version_of", lambda name: f"{name} 99")
        assert convert_if_needed(paddle, cache) != first


class TestContent:
    @pytest.mark.parametrize("change", ["longer", "renamed", "swapped"])
    def test_changed_files_are_converted_again(
        self, version: Path, cache: ArtifactCache, conversions: Conversions, change: str
    ) -> None:
        folder = version / "model" / "a.weight"
        (folder / "meta").write_bytes(b"5678")
        first = convert_if_needed(version, cache)
        match change:
            case "longer":
                (folder / "out").write_bytes(b"12345")
            case "renamed":
                (folder / "meta").rename(folder / "mets")
            case "swapped":
                (folder / "out").write_bytes(b"5678")
                (folder / "meta").write_bytes(b"1234")
        assert convert_if_needed(version, cache) != first
        assert conversions.count == 2


class TestSubprocess:
    @pytest.fixture
    def graph(self, tmp_path: Path) -> ForeignGraph:
        saved = saved_graphs.unpack("models.zip", tmp_path / "unpacked", "cnn") / "cnn" / "model"
        return ForeignGraph(saved=saved, importer=OneFlowImporter())

    @pytest.fixture
    def target(self, tmp_path: Path) -> Path:
        (tmp_path / "target").mkdir()
        return tmp_path / "target"

    def test_result_is_a_version(self, graph: ForeignGraph, target: Path) -> None:
        convert_in_subprocess(graph, target)
        assert {path.name for path in target.iterdir()} == {"model.onnx", "manifest.json", "golden.npz"}
        assert read_version(target).golden is not None

    def test_error_of_the_subprocess_is_raised(self, graph: ForeignGraph, target: Path) -> None:
        (graph.saved / "m.classes.bias" / "out").write_bytes(b"")
        with pytest.raises(ConversionError, match=r"state tensor 'm\.classes\.bias'.* short .*save the graph again"):
            convert_in_subprocess(graph, target)

    def test_unwritable_folder_is_an_error(self, graph: ForeignGraph, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=r"cannot be converted in .*missing: No such file .*free disk space"):
            convert_in_subprocess(graph, tmp_path / "missing")

    def test_killed_process_is_an_error(self, graph: ForeignGraph, target: Path) -> None:
        with when_it_converts(lambda child: child.kill()), pytest.raises(ConversionError, match="was killed"):
            convert_in_subprocess(graph, target)

    @pytest.mark.timeout(60)
    def test_suspended_process_ends_with_the_call(self, graph: ForeignGraph, target: Path) -> None:
        def interrupt(child: psutil.Process) -> None:
            child.suspend()
            if signal.getsignal(signal.SIGUSR1) is raise_it:  # else it would end the tests themselves
                # To the thread that waits: while SIGCHLD is pending there, another might take a signal to the process.
                signal.pthread_kill(main, signal.SIGUSR1)

        def raise_it(*_: object) -> None:
            raise _Interrupted

        main = threading.get_ident()
        before = signal.signal(signal.SIGUSR1, raise_it)
        try:
            with when_it_converts(interrupt), pytest.raises(_Interrupted):
                convert_in_subprocess(graph, target)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert converting() == []


class _Interrupted(Exception):
    pass


def converting() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("spawn_main" in word for word in child.cmdline()):
                found.append(child)
    return found


@contextmanager
def when_it_converts(act: Callable[[psutil.Process], object]) -> Iterator[None]:
    """Act as soon as the conversion process exists."""
    before, over = {child.pid for child in converting()}, threading.Event()

    def wait_and_act() -> None:
        while not over.wait(0.01):
            if found := [child for child in converting() if child.pid not in before]:
                act(found[0])
                return

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
