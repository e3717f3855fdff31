"""Proofs in a second server: who is proven with whom, what is remembered, and whose fault an end is."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self
from unittest import mock

import psutil
import pytest
import stand_in

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server import proving_server as module
from graphkiln_backend.server.flags import reserved_port
from graphkiln_backend.server.golden_requests import Answers, Target, Way
from graphkiln_backend.server.managed_stores import ShownModel
from graphkiln_backend.server.proving_server import Candidate, ProvingServer
from graphkiln_backend.server.run_folder import SHARED_MEMORY
from graphkiln_backend.system.processes import start
from graphkiln_backend.system.signals import ServerStopping

RIGHT = Answers(verdict="right", error=1e-7)
Behaviour = Callable[["FakeAsking"], None]


# Names of models whose versions do so, and the reasons why they are refused.
WORDS = {
    "ends": "it ended the server that proved it: tritonserver was killed by SIGKILL",
    "breaks": "it ended the server that proved it: tritonserver was killed by SIGKILL",
    "hangs": "its proof did not finish within 0.2 s",
    "kills": "the process that asked its golden samples has ended",
}


class FakeServer:
    """Starts processes that do nothing, in the place of tritonserver."""

    def __init__(self) -> None:
        self.arguments: list[Sequence[str]] = []
        self.stores: list[dict[str, list[str]]] = []  # versions that each would load
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        self.arguments.append(arguments)
        (store,) = (Path(word.partition("=")[2]) for word in arguments if word.startswith("--model-repository="))
        self.stores.append(
            {
                model.name: sorted(path.name for path in model.iterdir() if path.name.isdecimal())
                for model in sorted(store.iterdir())
            }
        )
        self.processes.append(start(["sleep", "60"]))
        return self.processes[-1]

    def kill(self) -> None:
        """End the running one, as a version would."""
        self.processes[-1].kill()
        self.processes[-1].wait()


class FakeAsking:
    """Judges at once, but for models whose name says otherwise."""

    server: FakeServer

    def __init__(self, targets: Sequence[Target], _: Way) -> None:
        self.targets = targets
        self.answers: dict[tuple[str, int], Answers] = {}

    def wait(self, _: float) -> bool:
        for target in self.targets:
            answers = self._judge(target.model)
            if answers is None:
                time.sleep(0.01)
                return False
            self.answers[target.model, target.version] = answers
        return True

    def _judge(self, model: str) -> Answers | None:
        if model == "ends":
            self.server.kill()
            return None
        if model == "breaks":  # the connection, before the end is seen
            self.server.kill()
            return Answers(reason="Connection reset by peer", answered=False)
        if self.server.processes[-1].poll() is not None:
            return Answers(reason="Connection refused", answered=False)
        if model == "hangs":
            return None
        if model == "kills":
            raise EOFError
        return RIGHT if model.startswith("good") else Answers(reason=f"{self.targets[0].config} is wrong")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    server = FakeServer()
    monkeypatch.setattr(FakeAsking, "server", server, raising=False)
    monkeypatch.setattr(module, "Asking", FakeAsking)
    yield server
    assert all(process.poll() is not None for process in server.processes)


@pytest.fixture
def prover(server: FakeServer, tmp_path: Path) -> Iterator[ProvingServer]:
    (tmp_path / "backends" / "python").mkdir(parents=True)
    (tmp_path / "backends" / "python" / "libtriton_python.so").write_bytes(b"code")
    (tmp_path / "tmp").mkdir()
    before = {*psutil.Process().children()}
    yield ProvingServer(
        start=server,
        backends=tmp_path / "backends",
        arguments=["--backend-config=python,x=1"],
        temporary=tmp_path / "tmp",
        regions="graphkiln-test-proof-",
        cache=CacheSettings(folder=tmp_path / "cache"),
        release="2.51.0",
        deadline_s=0.2,
        memory_bytes=1 << 30,
    )
    assert list((tmp_path / "tmp").iterdir()) == []
    assert {*psutil.Process().children()} <= before


def shown(store: Path, name: str) -> ShownModel:
    stored = scan_stores([store])[name]
    return ShownModel(stored=stored, versions=tuple(stored.versions), other=True)


def candidates(store: Path, *names: str) -> list[Candidate]:
    for name in names:
        if not (store / name).exists():
            stand_in.add(store, name)
    return [Candidate(shown=shown(store, name), version=1) for name in names]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def reasons(answers: Mapping[tuple[str, int], Answers]) -> dict[str, str]:
    return {name: found.reason for (name, _), found in answers.items()}


class TestGroups:
    def test_all_are_proven_side_by_side(self, prover: ProvingServer, server: FakeServer, store: Path) -> None:
        assert set(reasons(prover.prove(candidates(store, "good", "good2"))).values()) == {""}
        assert server.stores == [{"good": ["1"], "good2": ["1"]}]

    def test_versions_of_one_model_are_loaded_together(
        self, prover: ProvingServer, server: FakeServer, store: Path
    ) -> None:
        for version in (1, 2, 3):
            stand_in.add(
                store, "good", version, config=f"{stand_in.CONFIG} version_policy {{ specific {{ versions: 3 }} }}"
            )
        model = shown(store, "good")
        answers = prover.prove([Candidate(shown=model, version=version) for version in (1, 3)])
        assert list(answers) == [("good", 1), ("good", 3)]
        assert server.stores == [{"good": ["1", "3"]}]

    def test_the_user_version_policy_does_not_hide_a_candidate(
        self, prover: ProvingServer, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stand_in.add(store, "good", config=f"{stand_in.CONFIG} version_policy {{ specific {{ versions: 3 }} }}")
        policies = []
        monkeypatch.setattr(
            FakeAsking,
            "_judge",
            lambda self, _: policies.append(read_config(Path(self.targets[0].config)).version_policy) or RIGHT,
        )
        prover.prove([Candidate(shown=shown(store, "good"), version=1)])
        assert policies[0].HasField("all")

    def test_memory_divides_them(self, prover: ProvingServer, server: FakeServer, store: Path) -> None:
        names = ["good1", "good2", "good3", "good4"]
        for name in names:
            (stand_in.add(store, name) / "weights").write_bytes(bytes(100_000))
        for limit, sizes in ((0, [1, 1, 1, 1]), (250_000, [2, 2]), (450_000, [4])):
            server.stores.clear()
            cache = CacheSettings(folder=store.with_name(f"cache of {limit}"))
            replace(prover, memory_bytes=limit, cache=cache).prove(candidates(store, *names))
            assert [len(models) for models in server.stores] == sizes, limit

    def test_none(self, prover: ProvingServer, server: FakeServer) -> None:
        assert prover.prove([]) == {}
        assert server.arguments == []


class TestWhoseFault:
    @pytest.mark.parametrize("position", [0, 2])
    @pytest.mark.parametrize("guilty", WORDS)
    def test_only_the_guilty_one_is_refused(
        self, prover: ProvingServer, store: Path, guilty: str, position: int
    ) -> None:
        names = ["good1", "good2"]
        names.insert(position, guilty)
        found = reasons(prover.prove(candidates(store, *names)))
        assert found == {"good1": "", "good2": "", guilty: WORDS[guilty]}

    def test_the_others_are_remembered(self, prover: ProvingServer, server: FakeServer, store: Path) -> None:
        for _ in range(2):
            prover.prove(candidates(store, "ends", "good"))
        assert server.stores == [{"ends": ["1"], "good": ["1"]}, {"ends": ["1"]}, {"good": ["1"]}, {"ends": ["1"]}]

    def test_a_wrong_one_is_not_asked_again(self, prover: ProvingServer, server: FakeServer, store: Path) -> None:
        found = reasons(prover.prove(candidates(store, "wrong", "good")))
        assert found == {"wrong": f"{store / 'wrong' / 'config.pbtxt'} is wrong", "good": ""}, "in the user's store"
        assert len(server.stores) == 1

    def test_a_server_that_cannot_be_started_says_nothing(self, prover: ProvingServer, store: Path) -> None:
        def fail(_: Sequence[str]) -> subprocess.Popen[bytes]:
            raise OSError(12, "Cannot allocate memory")

        with pytest.raises(OSError, match="allocate"):
            replace(prover, start=fail).prove(candidates(store, "good"))

    def test_a_stop_ends_it(self, prover: ProvingServer, store: Path) -> None:
        begun = time.monotonic()
        with pytest.raises(ServerStopping):
            replace(prover, deadline_s=60).prove(candidates(store, "hangs"), lambda: True)
        assert time.monotonic() - begun < 5

    def test_files_that_go_while_they_are_measured(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = candidates(store, "good")
        stat = Path.stat

        def fail(path: Path, **options: bool) -> object:
            if path.name == "model.py":
                raise FileNotFoundError(2, "gone", str(path))
            return stat(path, **options)

        monkeypatch.setattr(Path, "stat", fail)
        assert module._bytes_of(found[0].folder) > 0


class TestServer:
    def test_it_serves_only_this_process(self, prover: ProvingServer, server: FakeServer, store: Path) -> None:
        prover.prove(candidates(store, "good"))
        (line,) = server.arguments
        assert "--http-address=127.0.0.1" in line
        assert {"--allow-grpc=false", "--allow-metrics=false", "--exit-on-error=false"} <= {*line}
        assert "--backend-config=python,x=1" in line
        assert f"--backend-directory={prover.backends}" in line

    def test_its_shared_memory_is_removed(self, prover: ProvingServer, store: Path) -> None:
        region, other = (SHARED_MEMORY / name for name in ("graphkiln-test-proof-1", "graphkiln-test-1"))
        try:
            for path in (region, other):
                path.write_text("tensors")
            prover.prove(candidates(store, "good"))
            assert (region.exists(), other.exists()) == (False, True)
        finally:
            for path in (region, other):
                path.unlink(missing_ok=True)

    def test_regions_that_it_makes_until_its_end_are_removed(
        self, prover: ProvingServer, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        region, end = SHARED_MEMORY / "graphkiln-test-proof-2", module.kill_group

        def make_and_end(process: subprocess.Popen[bytes]) -> None:
            assert process.poll() is None
            region.write_text("tensors")
            end(process)
            assert process.poll() is not None

        monkeypatch.setattr(module, "kill_group", make_and_end)
        try:
            prover.prove(candidates(store, "good"))
            assert not region.exists()
        finally:
            region.unlink(missing_ok=True)

    def test_its_port_is_given_to_no_other_program(self) -> None:
        with reserved_port() as port, socket.socket() as other, socket.socket() as triton:
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            triton.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            triton.bind(("127.0.0.1", port))
            triton.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                triton.accept()[0].close()


class TestMemory:
    """What is remembered, and what makes it forget."""

    def asked_again(self, prover: ProvingServer, server: FakeServer, found: list[Candidate]) -> bool:
        before = len(server.arguments)
        answers = prover.prove(found)[found[0].which]
        assert answers == RIGHT
        return len(server.arguments) > before

    @pytest.fixture
    def proven(self, prover: ProvingServer, server: FakeServer, store: Path) -> list[Candidate]:
        found = candidates(store, "good")
        assert self.asked_again(prover, server, found)
        assert not self.asked_again(prover, server, found)
        return found

    def test_it_is_kept_for_other_servers(
        self, prover: ProvingServer, server: FakeServer, store: Path, proven: list[Candidate], tmp_path: Path
    ) -> None:
        shutil.copytree(tmp_path / "backends", tmp_path / "others")
        elsewhere = replace(prover, temporary=tmp_path / "tmp", backends=tmp_path / "others", regions="other-")
        assert not self.asked_again(prover, server, candidates(store, "good"))
        shutil.copystat(
            tmp_path / "backends" / "python" / "libtriton_python.so",
            tmp_path / "others" / "python" / "libtriton_python.so",
        )
        assert not self.asked_again(elsewhere, server, proven)

    def test_a_refusal_is_not(self, prover: ProvingServer, server: FakeServer, store: Path) -> None:
        for _ in range(2):
            prover.prove(candidates(store, "wrong"))
        assert len(server.arguments) == 2

    @pytest.mark.parametrize("file", ["1/model.py", "1/golden.npz", "1/manifest.json", "config.pbtxt", "labels.txt"])
    def test_other_files(self, prover: ProvingServer, server: FakeServer, proven: list[Candidate], file: str) -> None:
        store = proven[0].shown.stored.folder.parent
        path = store / "good" / file
        content = path.read_bytes() if path.exists() else b""
        path.write_bytes(content + b"\n")
        assert self.asked_again(prover, server, candidates(store, "good"))

    def test_another_version_number(self, prover: ProvingServer, server: FakeServer, proven: list[Candidate]) -> None:
        store = proven[0].shown.stored.folder.parent
        (store / "good" / "1").rename(store / "good" / "2")
        assert self.asked_again(prover, server, [Candidate(shown=shown(store, "good"), version=2)])

    def test_another_configuration(self, prover: ProvingServer, server: FakeServer, proven: list[Candidate]) -> None:
        """That of the native seat, with its threads and instances."""
        native = read_config(proven[0].shown.stored.folder / "config.pbtxt")
        native.instance_group.add(count=3)
        other = replace(proven[0], shown=replace(proven[0].shown, native=native))
        assert self.asked_again(prover, server, [other])

    @pytest.mark.parametrize("name", ["libtriton_python.so", "libnew.so"])
    def test_another_backend(
        self, prover: ProvingServer, server: FakeServer, proven: list[Candidate], name: str
    ) -> None:
        (prover.backends / "python" / name).write_bytes(b"other code")
        assert self.asked_again(prover, server, proven)

    @pytest.mark.parametrize("change", [{"arguments": ["--backend-config=python,x=2"]}, {"release": "2.52.0"}])
    def test_another_server(
        self, prover: ProvingServer, server: FakeServer, proven: list[Candidate], change: dict[str, object]
    ) -> None:
        assert self.asked_again(replace(prover, **change), server, proven)  # type: ignore[arg-type]

    @pytest.mark.parametrize("change", [{"identity": lambda _: "another CPU"}, {"gpus": lambda: ("a GPU",)}])
    def test_another_machine(
        self, prover: ProvingServer, server: FakeServer, proven: list[Candidate], change: dict[str, object]
    ) -> None:
        with mock.patch.multiple(module.hardware, **change):
            assert self.asked_again(prover, server, proven)

    def test_other_rules(
        self, prover: ProvingServer, server: FakeServer, proven: list[Candidate], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_SERVED_PROOF", replace(module._SERVED_PROOF, version="next"))
        assert self.asked_again(prover, server, proven)


def test_platforms_name_a_backend(prover: ProvingServer, store: Path) -> None:
    """`tensorrt_plan` is of the backend `tensorrt`, whose library is a part of the key."""
    stand_in.add(store, "good", config='platform: "tensorrt_plan"')
    found = Candidate(shown=shown(store, "good"), version=1)
    before = prover._key(found)
    (prover.backends / "tensorrt").mkdir()
    (prover.backends / "tensorrt" / "libtriton_tensorrt.so").write_bytes(b"code")
    assert prover._key(found)["backend"] != before["backend"]
