"""Fixtures for all tests: the checkout, and running servers."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
from running import Server, Serving, StartServer

from graphkiln_backend.cache.store import ArtifactCache

# A busy machine must not fail a property that holds.
hypothesis.settings.register_profile("graphkiln", deadline=None)
hypothesis.settings.load_profile("graphkiln")

# PyTorch's threads wait for each other in a loop, at every operation: where others had the cores, training a small
# network took 643 s in place of 66. Read when libgomp is loaded, in all processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _artifact_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands and servers of tests keep artifacts and state in folders of the test run, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHKILN_CACHE", str(tmp_path_factory.mktemp("artifacts")))
        patch.setenv("GRAPHKILN_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout."""
    return REPOSITORY


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the tests of the native seat."""
    parser.addoption("--cpp-backend", metavar="DIR", help="backend directory with Triton's C++ onnxruntime backend")


@pytest.fixture(scope="session")
def cpp_backends(pytestconfig: pytest.Config) -> Path:
    """A backend directory with Triton's C++ `onnxruntime` backend, which no package holds."""
    folder = pytestconfig.getoption("--cpp-backend")
    if not folder:
        pytest.skip("needs --cpp-backend DIR")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def digits(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example classifier's folder, a copy: alone in its store, so that servers load nothing else."""
    folder = tmp_path_factory.mktemp("store") / "digits"
    shutil.copytree(repository / "model_repository" / "digits", folder)
    return folder


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers on free ports; every one is stopped at the end, and must leave nothing behind."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(Serving(tmp_path, *arguments, **options))


@pytest.fixture(scope="session")
def server(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of the example classifier, shared by the tests that only ask it."""
    folder = tmp_path_factory.mktemp("server")
    with Serving(folder, "--model-store", digits.parent) as running:
        running.wait_ready()
        yield running


def pytest_configure() -> None:
    """Ctrl-C works in tests of it, also where a shell started them in the background and has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Import all tests without looking for garbage in what stays anyway."""
    gc.disable()


def pytest_collection_finish() -> None:
    """No later collection looks at 12,000 tests and PyTorch: each `gc.collect()` of a test took more than a second."""
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m slow`, say, files that do not name this mark are not imported: to import all takes nearly a minute."""
    mark, _, _ = config.option.markexpr.partition(" and ")
    if not mark.isidentifier() or not collection_path.match("test_*.py"):
        return None
    return f"pytest.mark.{mark}" not in collection_path.read_text() or None


class _Collector(logging.Handler):
    """Collects the messages of a logger."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if (record.name, message.split()[0]) != ("graphkiln.lowering", "proving"):
            self.messages.append(message)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Log lines of graphkiln's packages during a test, including those of other threads.

    But for proofs of lowered graphs: one is made at every load, and tests ask what is built.
    """
    logger, collector = logging.getLogger("graphkiln"), _Collector()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(collector)
    yield collector.messages
    logger.removeHandler(collector)
    logger.setLevel(level)


@pytest.fixture
def hangup_ends() -> Iterator[None]:
    """SIGHUP as in a terminal; the tests themselves may be run with `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ArtifactCache]:
    """An empty artifact cache."""
    with ArtifactCache(tmp_path / "cache") as cache:
        yield cache
