"""Finding a tritonserver, reading its flags, and the run folder, without starting anything."""

from __future__ import annotations

import dataclasses
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import installation as finding
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.installation import Installation, find_installation
from graphkiln_backend.server.launch import command_line
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.shared_memory import SharedMemoryPlan, plan_shared_memory
from graphkiln_backend.triton.instance_status import InstanceStatus, StatusFile, read_counters, read_statuses

KNOWN = {
    **dict.fromkeys(("http-port", "http-address", "grpc-port", "allow-http", "backend-config", "log-file"), True),
    **dict.fromkeys(("backend-directory", "model-repository", "reuse-http-port", "log-verbose"), True),
    "disable-auto-complete-config": False,
}
MEMORY = SharedMemoryPlan(region_bytes=1 << 20, needed_bytes=0)
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def fake_container(root: Path, python: str = PYTHON) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tritonserver").write_text("#!/bin/sh\n")
    (root / "backends" / "python").mkdir(parents=True)
    (root / "backends" / "python" / "triton_python_backend_stub").write_bytes(f"\0libpython{python}.so.1.0\0".encode())
    (root / "backends" / "python" / "libtriton_python.so").write_bytes(b"")
    return root


class TestInstallation:
    def test_the_container_comes_before_the_wheel(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(finding, "_CONTAINER", fake_container(tmp_path))
        assert find_installation().binary == tmp_path / "bin" / "tritonserver"

    def test_the_wheel_is_found(self) -> None:
        found = find_installation()
        assert found.stub.parent.name == PYTHON
        assert found.flags["http-port"]
        assert found.flags["disable-auto-complete-config"] is False

    def test_a_container_of_another_python_is_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(finding, "_CONTAINER", fake_container(tmp_path, python="3.6"))
        with pytest.raises(ServerSetupError, match=f"built for another Python than {PYTHON}"):
            find_installation()

    def test_a_missing_libpython_names_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(finding.sysconfig, "get_config_var", lambda _: "/nonexistent")
        monkeypatch.setattr(finding.sys, "base_prefix", "/nonexistent")
        with pytest.raises(ServerSetupError, match=f"apt-get install libpython{PYTHON}"):
            find_installation()

    def test_a_program_that_does_not_run(self, tmp_path: Path) -> None:
        broken = tmp_path / "tritonserver"
        broken.write_text("#!/bin/sh\necho 'cannot open shared object file' >&2; exit 127\n")
        broken.chmod(0o755)
        found = Installation(binary=broken, backends=tmp_path, caches=tmp_path, stub=tmp_path, libraries=())
        with pytest.raises(ServerSetupError, match="cannot open shared object file"):
            _ = found.flags


class TestFlags:
    def test_arguments_stay_as_typed(self) -> None:
        typed = ["--http-port", "9000", "--backend-config=a,b=c", "--log-file=a b=c", "--disable-auto-complete-config"]
        flags = TritonFlags.parse(typed, KNOWN)
        assert list(flags.arguments) == typed
        assert flags.values["backend-config"] == "a,b=c"
        assert flags.values["log-file"] == "a b=c"

    def test_model_stores_are_taken_out(self) -> None:
        flags = TritonFlags.parse(["--model-repository", "a", "--model-repository=b"], KNOWN)
        assert flags.stores == (Path("a"), Path("b"))
        assert flags.arguments == ()

    def test_the_last_value_counts(self) -> None:
        endpoint = TritonFlags.parse(["--http-port=1", "--http-port=2"], KNOWN).endpoint("http")
        assert endpoint is not None
        assert endpoint.port == 2

    def test_endpoints(self) -> None:
        flags = TritonFlags.parse(["--allow-http=false", "--grpc-port=7"], KNOWN)
        assert [(e.protocol, e.port) for e in flags.endpoints()] == [("gRPC", 7), ("metrics", 8002)]

    def test_a_port_that_may_be_shared_is_not_checked(self) -> None:
        with socket.socket() as holder:
            holder.bind(("0.0.0.0", 0))
            holder.listen()
            port = holder.getsockname()[1]
            others = ["--allow-grpc=false", "--allow-metrics=false"]
            known = {**KNOWN, "allow-grpc": True, "allow-metrics": True}
            TritonFlags.parse([f"--http-port={port}", "--reuse-http-port=true", *others], known).check_ports()
            with pytest.raises(ServerSetupError, match=f"port {port} "):
                TritonFlags.parse([f"--http-port={port}", *others], known).check_ports()


class TestRunFolder:
    @pytest.fixture
    def installation(self, tmp_path: Path) -> Installation:
        root = fake_container(tmp_path / "triton")
        stub = root / "backends" / "python" / "triton_python_backend_stub"
        return Installation(
            binary=root / "bin" / "tritonserver",
            backends=root / "backends",
            caches=root / "caches",
            stub=stub,
            libraries=(),
        )

    def test_never_holds_a_space(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        spaced = tmp_path / "with space"
        spaced.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(spaced))
        with RunFolder() as folder:
            assert " " not in str(folder.path)
            assert folder.path.is_dir()
        assert not folder.path.exists()

    def test_links_only_stores_that_triton_cannot_take(self, tmp_path: Path) -> None:
        plain, spaced = tmp_path / "plain", tmp_path / "a store; rm -rf"
        with RunFolder() as folder:
            first, second = folder.link_stores([plain, spaced])
            assert first == plain
            assert second.parent.parent == folder.path
            assert second.readlink() == spaced

    def test_holds_the_users_backends_beside_ours(self, installation: Installation, tmp_path: Path) -> None:
        extra = tmp_path / "extra"
        (extra / "mine").mkdir(parents=True)
        with RunFolder() as folder:
            folder.assemble_backends(installation, extra)
            assert {path.name for path in folder.backends.iterdir()} == {
                "python",
                "graphkiln",
                "onnxruntime",
                "oneflow",
                "mine",
            }

    def test_an_installed_oneflow_backend_keeps_its_seat(self, installation: Installation, tmp_path: Path) -> None:
        (tmp_path / "extra" / "oneflow").mkdir(parents=True)
        with RunFolder() as folder:
            assert "oneflow" not in folder.assemble_backends(installation, tmp_path / "extra")
            assert (folder.backends / "oneflow").resolve() == (tmp_path / "extra" / "oneflow").resolve()

    def test_our_defaults_give_way_to_the_users_flags(self, installation: Installation) -> None:
        with RunFolder() as folder:
            quiet = command_line(
                installation, folder, [Path("/s")], TritonFlags.parse([], KNOWN), MEMORY, complete=True
            )
            loud = command_line(
                installation, folder, [], TritonFlags.parse(["--log-verbose=1"], KNOWN), MEMORY, complete=False
            )
        assert "--log-info=false" in quiet
        assert "--model-repository=/s" in quiet
        assert "--backend-config=python,shm-default-byte-size=1048576" in quiet
        assert "--log-info=false" not in loud
        assert loud[-1] == "--log-verbose=1"


class TestInstanceStatus:
    STATUS = InstanceStatus(
        pid=1,
        model="m",
        version=3,
        engine="e",
        device="cpu",
        precision="fp32",
        nodes={},
        products={},
        threads=2,
        load_ms=1.5,
        warmup_ms=0.5,
        self_test="",
        self_test_error=-1.0,
        fallbacks=0,
    )

    def test_counts_what_is_computing(self, tmp_path: Path) -> None:
        file = StatusFile(tmp_path, "m_0", self.STATUS)
        assert read_statuses(tmp_path) == [self.STATUS]
        with file:
            assert read_counters(tmp_path) == {"m_0.1": (1, 0)}
        assert read_counters(tmp_path) == {"m_0.1": (1, 1)}
        file.close()
        assert list(tmp_path.iterdir()) == []

    def test_an_instance_that_ends_late_leaves_its_successor_alone(self, tmp_path: Path) -> None:
        successor_status = dataclasses.replace(self.STATUS, pid=self.STATUS.pid + 1)
        ending = StatusFile(tmp_path, "m_0", self.STATUS)
        successor = StatusFile(tmp_path, "m_0", successor_status)
        ending.close()
        assert read_statuses(tmp_path) == [successor_status]
        with successor:
            assert list(read_counters(tmp_path).values()) == [(1, 0)]
        successor.close()

    def test_a_failed_batch_is_over_too(self, tmp_path: Path) -> None:
        file = StatusFile(tmp_path, "m_0", self.STATUS)
        with pytest.raises(ZeroDivisionError), file:
            _ = 1 / 0
        assert read_counters(tmp_path) == {"m_0.1": (1, 1)}
        file.close()

    def test_publishes_nothing_without_a_supervisor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GRAPHKILN_RUN_FOLDER", raising=False)
        assert StatusFile.publish("m_0", self.STATUS) is None


class TestSharedMemory:
    MB = 1 << 20

    def store(self, folder: Path, *, rows: int, instances: int) -> Path:
        (folder / "m").mkdir(parents=True)
        (folder / "m" / "config.pbtxt").write_text(
            f'backend: "graphkiln" max_batch_size: {rows} instance_group {{ count: {instances} }}'
            'input { name: "x" data_type: TYPE_FP32 dims: [1000, 250] }'
            'output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
        )
        return folder

    def test_a_region_holds_the_largest_batch(self, tmp_path: Path) -> None:
        planned = plan_shared_memory([self.store(tmp_path, rows=8, instances=2)], free_bytes=1000 * self.MB)
        assert 8_000_000 < planned.region_bytes < 16_000_000
        assert planned.needed_bytes == 2 * planned.region_bytes

    def test_too_little_is_an_error_with_the_fix(self, tmp_path: Path) -> None:
        with pytest.raises(ServerSetupError, match=r"has 16 MB left, but 2 model instances need .*--shm-size=\d+m"):
            plan_shared_memory([self.store(tmp_path, rows=8, instances=2)], free_bytes=16 * self.MB)

    def test_regions_grow_on_demand_where_memory_is_scarce(self, tmp_path: Path) -> None:
        planned = plan_shared_memory([self.store(tmp_path, rows=8, instances=2)], free_bytes=30 * self.MB)
        assert planned.region_bytes == self.MB
