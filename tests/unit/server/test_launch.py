"""The start of tritonserver: command line, environment, stores, process."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import stand_in
from fake_repository import StoreOfFakes

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.lowering.settings import Override, parse_override
from graphkiln_backend.repository.config import ModelConfigProto, read_config
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server import launch as module
from graphkiln_backend.server.admission import Candidate, Verdict
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.golden_requests import Answers
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.launch import Launch, LoadedModels, Readiness, command_line, may_all_load
from graphkiln_backend.server.limits import SharedMemoryPlan
from graphkiln_backend.server.managed_stores import ShownModel
from graphkiln_backend.server.repository_control import RepositoryControl
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.triton.environment import (
    RecordSettings,
    instances_folder,
    open_cache,
    overrides_for,
    record_settings,
    replay_interval_s,
    shared_folder,
)

KNOWN = {
    **dict.fromkeys(("log-verbose", "log-info", "backend-config", "model-control-mode", "load-model"), True),
    **dict.fromkeys(("reuse-http-port", "cache-directory", "backend-directory", "strict-model-config"), True),
    **dict.fromkeys(("allow-gpu-metrics", "model-config-name", "exit-on-error"), True),
    **dict.fromkeys(("allow-http", "allow-grpc", "grpc-use-ssl", "strict-readiness", "http-port"), True),
    "disable-auto-complete-config": False,
}
MEMORY = SharedMemoryPlan(region_bytes=1 << 20)


def parse(*arguments: str) -> TritonFlags:
    return TritonFlags.parse(arguments, KNOWN)


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    with RunFolder() as folder:
        yield folder


@pytest.fixture
def store(tmp_path: Path, digits: Path) -> Path:
    """A store with the example model."""
    shutil.copytree(digits, tmp_path / "store" / "digits")
    return tmp_path / "store"


def make_launch(installation: Installation, *stores: Path, flags: TritonFlags | None = None) -> Launch:
    return Launch(installation=installation, stores=stores, flags=flags or parse())


class TestCommandLine:
    def line(self, installation: Installation, folder: RunFolder, *arguments: str, complete: bool = True) -> list[str]:
        return command_line(installation, folder, [Path("/s")], parse(*arguments), MEMORY, complete=complete)

    def test_our_defaults_give_way_to_the_users_flags(self, installation: Installation, folder: RunFolder) -> None:
        quiet = self.line(installation, folder)
        loud = self.line(installation, folder, "--log-verbose=1", complete=False)
        assert "--log-info=false" in quiet
        assert "--model-repository=/s" in quiet
        assert "--backend-config=python,shm-default-byte-size=1048576" in quiet
        assert "--log-info=false" not in loud
        assert "--log-verbose=1" in loud

    def test_pools_of_many_instances_are_small(self, installation: Installation, folder: RunFolder) -> None:
        many = dataclasses.replace(MEMORY, instances=400)
        for typed, memory, expected in (
            ((), MEMORY, "32"),
            ((), many, "8"),
            ((), dataclasses.replace(MEMORY, instances=2), "32"),
            (("--backend-config=python,thread-pool-size=3",), many, "3"),
        ):
            line = command_line(installation, folder, [], parse(*typed), memory, complete=True)
            assert [word.partition("size=")[2] for word in line if "thread-pool" in word] == [expected]

    def test_the_users_arguments_stand_last_and_as_typed(self, installation: Installation, folder: RunFolder) -> None:
        typed = [
            "--model-control-mode=explicit",
            "--backend-config",
            "a,b=c d",
            "--log-info=true",
            "--disable-auto-complete-config",
        ]
        line = self.line(installation, folder, *typed)
        assert line[-5:] == typed
        assert "--log-info=false" not in line

    @pytest.mark.parametrize("complete", [True, False])
    def test_triton_completes_only_what_is_not_complete(
        self, installation: Installation, folder: RunFolder, complete: bool
    ) -> None:
        line = self.line(installation, folder, complete=complete)
        assert ("--disable-auto-complete-config" in line) is complete

    @pytest.mark.parametrize("flag", ["reuse-http-port", "cache-directory", "allow-gpu-metrics"])
    def test_a_flag_of_the_user_stands_once(self, installation: Installation, folder: RunFolder, flag: str) -> None:
        line = self.line(installation, folder, f"--{flag}=mine")
        assert [word for word in line if word.startswith(f"--{flag}=")] == [f"--{flag}=mine"]

    @pytest.mark.parametrize("has_gpu", [True, False])
    def test_what_needs_a_driver_is_switched_off_without_one(
        self, installation: Installation, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
    ) -> None:
        monkeypatch.setattr(module, "_NVIDIA_DRIVER", Path("/dev/null" if has_gpu else "/nowhere"))
        line = self.line(installation, folder)
        assert ("--allow-gpu-metrics=false" in line) is not has_gpu
        assert ("--pinned-memory-pool-byte-size=0" in line) is not has_gpu


class TestPrepare:
    def test_stores_are_mirrored_with_complete_configurations(
        self, installation: Installation, folder: RunFolder, store: Path
    ) -> None:
        (store / "digits" / "config.pbtxt").write_text('backend: "graphkiln" max_batch_size: 4')
        line = make_launch(installation, store).prepare(folder)
        mirror = folder.overlay / "models"
        assert f"--model-repository={mirror}" in line
        assert "--disable-auto-complete-config" in line
        config = read_config(mirror / "digits" / "config.pbtxt")
        assert [tensor.name for tensor in config.input] == ["INPUT_0"]
        graph = mirror / "digits" / "1" / "model.onnx"
        assert graph.resolve() == (store / "digits" / "1" / "model.onnx").resolve()
        assert (folder.backends / "graphkiln" / "model.py").is_file()

    def test_what_only_triton_can_do_is_left_to_it(
        self, installation: Installation, folder: RunFolder, store: Path
    ) -> None:
        line = make_launch(installation, store, flags=parse("--load-model=digits")).prepare(folder)
        assert f"--model-repository={store}" in line
        assert not folder.overlay.exists()
        assert "--disable-auto-complete-config" not in line

    def test_in_explicit_mode_the_store_is_shown_as_it_is(
        self, installation: Installation, folder: RunFolder, store: Path
    ) -> None:
        flags = parse("--model-control-mode=explicit", "--load-model=digits")
        line = make_launch(installation, store, flags=flags).prepare(folder)
        assert f"--model-repository={store}" in line
        assert line[-2:] == ["--model-control-mode=explicit", "--load-model=digits"]
        assert "--disable-auto-complete-config" not in line

    def test_in_explicit_mode_what_was_loaded_is_loaded_again(
        self, installation: Installation, folder: RunFolder, store: Path
    ) -> None:
        launch = make_launch(installation, store, flags=parse("--model-control-mode=explicit", "--load-model=*"))
        launch.loaded.names = ["digits"]
        line = launch.prepare(folder)
        assert line[-2:] == ["--model-control-mode=explicit", "--load-model=digits"]

    def test_and_a_broken_one_is_no_reason_to_start_twice(
        self, installation: Installation, folder: RunFolder, store: Path
    ) -> None:
        (store / "broken").mkdir()
        (store / "broken" / "config.pbtxt").touch()
        flags = parse("--model-control-mode=explicit", "--load-model=*")
        line = make_launch(installation, store, flags=flags).prepare(folder)
        assert line[-2:] == ["--load-model=broken", "--load-model=digits"]
        assert "--strict-readiness=false" not in line

    @pytest.mark.parametrize("flags", [(), ("--model-control-mode=none",), ("--model-control-mode=poll",)])
    def test_otherwise_triton_loads_what_the_mirror_holds(
        self, installation: Installation, folder: RunFolder, store: Path, flags: tuple[str, ...]
    ) -> None:
        line = make_launch(installation, store, flags=parse(*flags)).prepare(folder)
        assert f"--model-repository={folder.overlay / 'models'}" in line
        assert "--exit-on-error=false" in line
        assert line[-2:] == ["--model-control-mode=explicit", "--load-model=*"]  # the last one counts

    def test_a_load_that_fails_later_does_not_count_where_nothing_is_loaded_at_the_start(
        self, installation: Installation, folder: RunFolder, store: Path
    ) -> None:
        launch = make_launch(installation, store, flags=parse("--model-control-mode=explicit"))
        line = launch.prepare(folder)
        assert "--strict-readiness=false" in line
        assert "--exit-on-error=true" not in line
        assert not launch.readiness.strict

    def test_a_version_that_the_first_start_refused_is_not_loaded_again(
        self, installation: Installation, store: Path, logged: list[str]
    ) -> None:
        shutil.copytree(store / "digits" / "1", store / "digits" / "2")
        launch = make_launch(installation, store)
        with RunFolder() as first:
            launch.prepare(first)
            folder = first.overlay / "models"
            reason = f"Internal: TritonModelException: digits: cannot serve {folder}/digits/2/model.onnx\n\nAt:\n  x"
            launch._note_failed(folder, "digits", 2, reason)
            launch._note_failed(folder, "digits", 1, "Internal: Stub process is not healthy.")
            assert launch.readiness.fall_back()
        with RunFolder() as second:
            line = launch.prepare(second)
            assert [path.name for path in (second.overlay / "models" / "digits").iterdir() if path.is_dir()] == ["1"]
        assert logged == [f"digits version 2 is not served: cannot serve {store / 'digits'}/2/model.onnx"]
        assert "--strict-readiness=false" not in line

    @pytest.mark.parametrize("flags", [(), ("--model-control-mode=explicit", "--load-model=digits")])
    def test_it_stays_ready_while_versions_come_and_go(
        self, installation: Installation, folder: RunFolder, store: Path, flags: tuple[str, ...]
    ) -> None:
        line = make_launch(installation, store, flags=parse(*flags)).prepare(folder)
        assert "--strict-readiness=false" in line
        assert line.index("--exit-on-error=false") < line.index("--exit-on-error=true")

    def test_readiness_is_strict_if_triton_loads_by_itself(
        self, installation: Installation, folder: RunFolder, store: Path
    ) -> None:
        line = make_launch(installation, store, flags=parse("--load-model=digits")).prepare(folder)
        assert "--strict-readiness=false" not in line

    def test_and_where_a_model_is_bad(self, installation: Installation, folder: RunFolder, store: Path) -> None:
        (store / "bad" / "1").mkdir(parents=True)
        (store / "bad" / "1" / "model.onnx").write_bytes(b"PK")
        line = make_launch(installation, store).prepare(folder)
        assert "--strict-readiness=false" not in line

    @pytest.mark.parametrize("flag", ["--model-config-name=other", "--strict-model-config=true"])
    def test_flags_about_configurations_leave_them_as_they_are(
        self, installation: Installation, folder: RunFolder, store: Path, flag: str
    ) -> None:
        line = make_launch(installation, store, flags=parse(flag)).prepare(folder)
        assert (folder.overlay / "models" / "digits" / "config.pbtxt").is_symlink()
        assert "--disable-auto-complete-config" not in line

    def test_a_model_of_another_backend_leaves_completion_to_triton(
        self, installation: Installation, folder: RunFolder, store: Path, logged: list[str]
    ) -> None:
        (store / "other" / "1").mkdir(parents=True)
        (store / "other" / "config.pbtxt").write_text('backend: "tensorflow"')
        line = make_launch(installation, store).prepare(folder)
        assert sorted(path.name for path in (folder.overlay / "models").iterdir()) == ["digits", "other"]
        assert "--disable-auto-complete-config" not in line
        assert logged == []

    def test_a_store_that_cannot_be_read_is_an_error(
        self, installation: Installation, folder: RunFolder, tmp_path: Path
    ) -> None:
        with pytest.raises(ServerSetupError, match="cannot mirror the model stores"):
            make_launch(installation, tmp_path / "gone").prepare(folder)

    def test_too_little_shared_memory_is_an_error(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "free_shared_memory", lambda: 1 << 19)
        with pytest.raises(ServerSetupError, match="--shm-size="):
            make_launch(installation, store).prepare(folder)

    def test_too_few_threads_are_an_error(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = [(20, "a larger limit")]
        monkeypatch.setattr("graphkiln_backend.server.limits._allowed_by_groups", lambda: limits)
        with pytest.raises(ServerSetupError, match=r"need at least \d+ threads, and only 20 more may run here"):
            make_launch(installation, store).prepare(folder)


class FakeProofs:
    """Proofs through a server; those of the versions named in `wrong` fail."""

    def __init__(self, *wrong: tuple[str, int]) -> None:
        self.wrong = wrong
        self.only_rewritten = False  # wrong while ONNX Runtime rewrites the graph
        self.admitted: list[tuple[str, int]] = []
        self.prepared: list[str] = []

    def admit(self, models: list[tuple[ShownModel, int]]) -> dict[tuple[str, int], Answers]:
        names = [(model.stored.name, version) for model, version in models]
        self.admitted += names
        rewritten = {
            model.stored.name: not (self.only_rewritten and model.native and model.native.optimization.graph.level == 2)
            for model, _ in models
        }
        wrong = {which for which in self.wrong if rewritten.get(which[0])}
        return {which: Answers(reason="it is wrong" if which in wrong else "") for which in names}

    def ask_once_live(self, models: list[ShownModel]) -> AbstractContextManager[None]:
        self.prepared += [model.stored.name for model in models]
        return nullcontext()


class TestProofsBeforeTheStart:
    """What no instance of graphkiln computes is proven before Triton sees it."""

    ALL = f"{stand_in.CONFIG}version_policy {{ all {{ }} }}"

    def prepare(
        self, launch: Launch, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, *wrong: tuple[str, int]
    ) -> tuple[FakeProofs, list[str]]:
        proofs = FakeProofs(*wrong)
        monkeypatch.setattr(Launch, "_served_proofs", lambda *_: proofs)
        return proofs, launch.prepare(folder)

    def shown(self, folder: RunFolder, model: str) -> list[str]:
        return sorted(path.name for path in (folder.overlay / "models" / model).iterdir() if path.name.isdecimal())

    def test_an_older_version_replaces_a_wrong_one(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for version in (1, 2, 3):
            stand_in.add(store, "m", version)
        stand_in.add(store, "bare", proven=False)
        launch = make_launch(installation, store)
        proofs, line = self.prepare(launch, folder, monkeypatch, ("m", 2), ("m", 3))
        assert proofs.admitted == [("m", 3), ("m", 2), ("m", 1)]
        assert self.shown(folder, "m") == ["1"]
        assert launch.managed.refusals() == {("m", "2"): "it is wrong", ("m", "3"): "it is wrong"}
        assert "--strict-readiness=false" in line, "every model has a version"

    def test_of_versions_side_by_side_the_wrong_ones_go(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for version in (1, 2, 3):
            stand_in.add(store, "m", version, config=self.ALL)
        proofs, _ = self.prepare(make_launch(installation, store), folder, monkeypatch, ("m", 1), ("m", 3))
        assert proofs.admitted == [("m", 1), ("m", 2), ("m", 3)]
        assert self.shown(folder, "m") == ["2"]

    def test_a_model_without_a_right_version_is_a_placeholder(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stand_in.add(store, "m")
        _, line = self.prepare(make_launch(installation, store), folder, monkeypatch, ("m", 1))
        assert "it is wrong" in (folder.overlay / "models" / "m" / "1" / "model.py").read_text()
        assert "--strict-readiness=false" not in line

    def test_a_second_server_that_cannot_be_started_is_an_error(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        stand_in.add(store, "m")
        monkeypatch.setattr(FakeProofs, "admit", fail)
        with pytest.raises(ServerSetupError, match=r"in a second server: .*Cannot allocate memory"):
            self.prepare(make_launch(installation, store), folder, monkeypatch)

    def test_in_explicit_mode_nothing_is_shown(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stand_in.add(store, "m")
        launch = make_launch(installation, store, flags=parse("--model-control-mode=explicit", "--load-model=m"))
        proofs, _ = self.prepare(launch, folder, monkeypatch)
        with launch.first_replay(folder) as asking:
            assert asking is None
        assert (proofs.admitted, proofs.prepared) == ([], [])

    def test_the_first_replay_is_of_what_is_shown(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("right", "wrong"):
            stand_in.add(store, name)
        stand_in.add(store, "bare", proven=False)
        launch = make_launch(installation, store)
        proofs, _ = self.prepare(launch, folder, monkeypatch, ("wrong", 1))
        with launch.first_replay(folder):
            assert proofs.prepared == ["right"]

    def test_the_second_server_is_like_the_first(self, installation: Installation, folder: RunFolder) -> None:
        flags = parse("--backend-config=tensorflow,version=2", "--http-port=1234", "--log-info=true")
        launch = dataclasses.replace(make_launch(installation, flags=flags), prove_memory_bytes=7, load_deadline_s=8.0)
        proofs = launch._served_proofs(folder)
        prover = proofs.prover
        assert [*prover.arguments] == ["--backend-config=tensorflow,version=2"]
        assert (prover.backends, prover.memory_bytes, prover.deadline_s) == (folder.backends, 7, 8.0)
        assert prover.regions.startswith(folder.shared_memory_prefix)
        assert proofs.address
        assert proofs.address.port == 1234

    def test_without_http_nothing_is_replayed(self, installation: Installation, folder: RunFolder) -> None:
        assert make_launch(installation, flags=parse("--allow-http=false"))._served_proofs(folder).address is None


class TestNativeSeat:
    @pytest.fixture
    def installation(self, installation: Installation) -> Installation:
        """With the C++ backend, which cannot be loaded."""
        backend = installation.backends / "onnxruntime"
        backend.mkdir()
        for name in ("libtriton_onnxruntime.so", "libonnxruntime.so.1.32.0"):
            (backend / name).write_bytes(b"")
        return installation

    @pytest.mark.parametrize("seat", ["auto", "native", "python"])
    def test_the_mirror_names_who_computes(
        self, installation: Installation, folder: RunFolder, store: Path, monkeypatch: pytest.MonkeyPatch, seat: str
    ) -> None:
        proofs = FakeProofs()
        monkeypatch.setattr(Launch, "_served_proofs", lambda *_: proofs)
        overrides = {"digits": [parse_override(f"seat={seat}")]}
        line = dataclasses.replace(make_launch(installation, store), overrides=overrides).prepare(folder)
        config = read_config(folder.overlay / "models" / "digits" / "config.pbtxt")
        is_native = seat != "python"
        assert config.backend == ("onnxruntime" if is_native else "graphkiln")
        assert (config.parameters["seat"].string_value == "native") is is_native
        assert proofs.admitted == ([("digits", 1)] if is_native else [])
        assert "--disable-auto-complete-config" in line

    @pytest.mark.parametrize(("seat", "is_native"), [("auto", False), ("native", True)])
    def test_recorded_models_are_computed_by_graphkiln(
        self,
        installation: Installation,
        folder: RunFolder,
        store: Path,
        monkeypatch: pytest.MonkeyPatch,
        logged: list[str],
        *,
        seat: str,
        is_native: bool,
    ) -> None:
        monkeypatch.setattr(Launch, "_served_proofs", lambda *_: FakeProofs())
        launch = dataclasses.replace(
            make_launch(installation, store),
            overrides={"digits": [parse_override(f"seat={seat}")]},
            record=RecordSettings(folder=store / "record"),
        )
        launch.prepare(folder)
        config = read_config(folder.overlay / "models" / "digits" / "config.pbtxt")
        assert config.backend == ("onnxruntime" if is_native else "graphkiln")
        assert [line for line in logged if "not recorded" in line] == [
            "requests of 'digits' are not recorded: seat: native is set"
        ] * is_native

    @pytest.mark.parametrize("requested", [False, True])
    def test_a_graph_that_is_wrong_there(
        self,
        installation: Installation,
        folder: RunFolder,
        store: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        requested: bool,
    ) -> None:
        """Graphkiln computes it, unless the native seat is requested."""
        monkeypatch.setattr(Launch, "_served_proofs", lambda *_: FakeProofs(("digits", 1)))
        overrides = {"digits": [Override("seat", "native", "--set")]} if requested else {}
        launch = replace(make_launch(installation, store), overrides=overrides)
        launch.prepare(folder)
        assert launch.managed.refusals() == ({("digits", "1"): "it is wrong"} if requested else {})
        assert launch.managed.shown["digits"].native is None

    @pytest.mark.parametrize("requested", [False, True])
    def test_a_graph_that_rewrites_break(
        self,
        installation: Installation,
        folder: RunFolder,
        store: Path,
        monkeypatch: pytest.MonkeyPatch,
        logged: list[str],
        *,
        requested: bool,
    ) -> None:
        """Graphkiln computes it, or, if the native seat is requested, the C++ backend without rewrites."""
        proofs = FakeProofs(("digits", 1))
        proofs.only_rewritten = True
        monkeypatch.setattr(Launch, "_served_proofs", lambda *_: proofs)
        overrides = {"digits": [Override("seat", "native", "--set")]} if requested else {}
        launch = replace(make_launch(installation, store), overrides=overrides)
        launch.prepare(folder)
        config = read_config(folder.overlay / "models" / "digits" / "config.pbtxt")
        expected = ("onnxruntime", 2) if requested else ("graphkiln", 0)
        assert (config.backend, config.optimization.graph.level) == expected
        assert len(proofs.admitted) == (2 if requested else 1)
        assert launch.managed.refusals() == {}
        assert any("own rewrites are off" in line and "it is wrong" in line for line in logged) is requested


class TestStart:
    SHOW = "#!/bin/sh\nenv -0 > $TMPDIR/../environment\n"

    @pytest.fixture
    def installation(self, installation: Installation) -> Installation:
        """A tritonserver that writes down what it was given."""
        installation.binary.write_text(self.SHOW)
        installation.binary.chmod(0o755)
        return installation

    def show(self, launch: Launch, folder: RunFolder) -> dict[str, str]:
        with launch.start(folder, [str(launch.installation.binary)]) as server:
            assert server.wait(10) == 0
        pairs = (folder.path / "environment").read_text().rstrip("\0").split("\0")
        return dict(pair.split("=", 1) for pair in pairs)

    def test_stubs_find_their_python_and_libraries(
        self, installation: Installation, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        with_libraries = dataclasses.replace(installation, libraries=(Path("/a"), Path("/b")))
        shown = self.show(make_launch(with_libraries), folder)
        assert shown["LD_LIBRARY_PATH"] == "/a:/b:/mine"
        assert shown["PATH"] == f"{Path(sys.executable).parent}:/usr/bin:/bin"
        assert shown["TMPDIR"] == str(folder.temporary)

    def test_the_allocator_keeps_buffers_unless_the_user_says_otherwise(
        self, installation: Installation, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
        shown = self.show(make_launch(installation), folder)
        assert shown["MALLOC_MMAP_THRESHOLD_"] == str(32 << 20)
        assert shown["MALLOC_TRIM_THRESHOLD_"] == "7"

    def test_instances_read_what_the_command_line_says(
        self, installation: Installation, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        override = parse_override("precision=bf16")
        launch = Launch(
            installation=installation,
            stores=[],
            flags=parse(),
            overrides={"m": [override]},
            cache=CacheSettings(folder=tmp_path / "cache"),
            replay_interval_s=2.5,
            record=RecordSettings(folder=tmp_path / "r\u00e9cord", share=0.5, inputs="digest", keep_s=60.0),
        )
        for name, value in self.show(launch, folder).items():
            if name.startswith("GRAPHKILN_"):
                monkeypatch.setenv(name, value)
        assert instances_folder() == folder.instances
        assert shared_folder() == folder.shared
        assert overrides_for("m") == [override]
        assert replay_interval_s() == 2.5
        assert launch.record is not None
        assert record_settings() == dataclasses.replace(launch.record, folder=folder.path / "record")
        assert (folder.path / "record").readlink() == launch.record.folder
        with open_cache() as cache:
            assert cache.folder == tmp_path / "cache"

    def test_a_closed_log_does_not_end_it(self, installation: Installation, folder: RunFolder) -> None:
        with make_launch(installation).start(folder, ["/bin/sh", "-c", "kill -PIPE $$; exit 7"]) as server:
            assert server.wait(30) == 7

    def test_a_cache_whose_path_a_stub_cannot_read_is_linked(
        self, installation: Installation, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        odd = tmp_path / "cäche of mine"
        odd.mkdir(mode=0o700)
        launch = Launch(installation=installation, stores=[], flags=parse(), cache=CacheSettings(folder=odd))
        shown = self.show(launch, folder)
        assert not [name for name, value in shown.items() if name.startswith("GRAPHKILN_") and not value.isascii()]
        for name, value in shown.items():
            if name.startswith("GRAPHKILN_"):
                monkeypatch.setenv(name, value)
        with open_cache() as cache:
            assert cache.folder.resolve() == odd.resolve()


class TestControl:
    @pytest.mark.parametrize(
        ("flags", "over_http", "over_grpc"),
        [
            ([], True, True),
            (["--allow-http=false"], False, True),
            (["--allow-grpc=false"], True, False),
            (["--grpc-use-ssl=true"], True, False),
        ],
    )
    def test_the_repository_is_controlled_over_what_is_on(
        self, installation: Installation, flags: list[str], over_http: bool, over_grpc: bool
    ) -> None:
        control = make_launch(installation, flags=parse(*flags)).control()
        assert isinstance(control, RepositoryControl)
        assert (bool(control.http), bool(control.grpc)) == (over_http, over_grpc)

    def test_nothing_reaches_a_server_without_both(self, installation: Installation) -> None:
        off = parse("--allow-grpc=false", "--allow-http=false")
        assert make_launch(installation, flags=off).control() is None


class TestLoadedModels:
    """In explicit mode, a restarted server loads what was loaded before it ended."""

    def test_the_first_start_is_as_the_user_typed(self) -> None:
        assert LoadedModels().arguments(["--load-model=m"]) == ["--load-model=m"]

    def test_a_restart_loads_what_was_loaded(self) -> None:
        typed = ["--load-model=m", "--load-model", "x", "--log-info=true"]
        assert LoadedModels(["m", "n"]).arguments(typed) == ["--log-info=true", "--load-model=m", "--load-model=n"]
        assert LoadedModels([]).arguments(["--load-model=m"]) == []

    def test_every_model_is_what_the_stores_hold(self) -> None:
        """Triton would take every folder of a store for one, and start twice for those that are not models."""
        for typed in (["--load-model=*"], ["--load-model", "*"]):
            loaded = LoadedModels().arguments(["--log-info=true", *typed], ["a", "b"])
            assert loaded == ["--log-info=true", "--load-model=a", "--load-model=b"]
        for typed in (["--load-model=a"], ["--load-model=*", "--load-model=a"], []):  # the second is Triton's to refuse
            assert LoadedModels().arguments(typed, ["a", "b"]) == typed
        assert LoadedModels(["b"]).arguments(["--load-model=*"], ["a", "b"]) == ["--load-model=b"]


def test_models_that_are_known_to_be_bad_are_logged_and_not_tried(fake_store: StoreOfFakes, logged: list[str]) -> None:
    fake_store.add("m", 1)
    fake_store.add("odd", 1)
    fake_store.add("odd", 2)
    (fake_store.folder / "broken").mkdir()
    (fake_store.folder / "broken" / "config.pbtxt").touch()
    os.mkfifo(fake_store.folder / "odd" / "2" / "pipe")
    found = scan_stores([fake_store.folder])
    assert may_all_load(["--load-model=m", "--load-model", "odd"], found)
    assert not may_all_load(["--log-info=true"], found)
    assert logged == []
    os.mkfifo(fake_store.folder / "odd" / "1" / "pipe")
    found = scan_stores([fake_store.folder])
    for name, words in (("broken", "make broken/1"), ("nowhere", "no store"), ("odd", "neither a file nor a folder")):
        assert not may_all_load(["--load-model=m", f"--load-model={name}"], found)
        assert words in logged[-1]


def test_a_version_is_proven_as_it_would_be_served(
    installation: Installation, fake_store: StoreOfFakes, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Candidate, float, int]] = []

    def admit(candidate: Candidate, *, deadline_s: float, stopped: Callable[[], bool]) -> Verdict:
        assert not stopped()
        seen.append((candidate, deadline_s, read_config(candidate.config).max_batch_size))
        return Verdict("no")

    monkeypatch.setattr("graphkiln_backend.server.admission.admit", admit)
    fake_store.add("m", 4, config="")
    model = ShownModel(
        stored=scan_stores([fake_store.folder])["m"], versions=(4,), config=ModelConfigProto(max_batch_size=9)
    )
    launch = dataclasses.replace(
        make_launch(installation, fake_store.folder),
        overrides={"m": [parse_override("precision=bf16")]},
        load_deadline_s=7,
    )
    assert launch._admit(folder.temporary, model, 4, lambda: False).reason == "no"
    ((candidate, deadline_s, max_batch_size),) = seen
    assert candidate.folder == fake_store.folder / "m" / "4"
    assert [override.value for override in candidate.overrides] == ["bf16"]
    assert (deadline_s, max_batch_size) == (7, 9)


# How a server is started so that its readiness means something.

WHOLE = ("--strict-readiness=false", "--exit-on-error=true")


def test_a_server_that_may_serve_everything_serves_everything_or_nothing() -> None:
    readiness = Readiness()
    readiness.choose(parse("--http-port=1"), loads=True)
    assert readiness.arguments == WHOLE


def test_one_that_did_not_serves_what_it_can_and_the_next_one_tries_again() -> None:
    readiness = Readiness()
    readiness.choose(parse(), loads=True)
    assert readiness.fall_back()
    readiness.choose(parse(), loads=True)
    assert readiness.arguments == ()
    assert not readiness.fall_back()
    readiness.choose(parse(), loads=True)
    assert readiness.arguments == WHOLE


def test_one_that_has_nothing_to_load_or_something_bad_is_strict() -> None:
    readiness = Readiness()
    readiness.choose(parse(), loads=False)
    assert readiness.arguments == ()
    assert not readiness.fall_back()


@pytest.mark.parametrize("flag", ["--strict-readiness=true", "--strict-readiness=false", "--exit-on-error=false"])
def test_the_users_own_word_counts(flag: str) -> None:
    readiness = Readiness()
    readiness.choose(parse(flag), loads=True)
    assert readiness.arguments == ()


def test_what_loads_without_end_is_known_for_one_start() -> None:
    readiness = Readiness()
    readiness.choose(parse(), loads=True)
    readiness.endless.add("m version 1")
    readiness.fall_back()
    readiness.choose(parse(), loads=True)
    assert readiness.endless == {"m version 1"}
    readiness.choose(parse(), loads=True)
    assert readiness.endless == set()
