"""The GPUs and the processor of a machine, as compiled artifacts know them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln_backend.engines import hardware
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.graph.precision import Precision


class TestGpus:
    @pytest.fixture(autouse=True)
    def _forget(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        hardware.gpus.cache_clear()
        yield
        hardware.gpus.cache_clear()

    def test_gpus_of_the_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho 'GPU-1, NVIDIA H100 80GB HBM3, 9.0, 580.65.06'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert hardware.identity(Device.gpu(0)) == "NVIDIA H100 80GB HBM3, compute capability 9.0, driver 580.65.06"
        with pytest.raises(
            EngineUnavailable, match=r"there is no GPU 1 here; GPUs: gpu:0 \(NVIDIA H100.*instance_group"
        ):
            hardware.gpu(Device.gpu(1))

    @pytest.mark.parametrize("text", ["", "#!/bin/sh\nexit 9\n"])
    def test_no_gpus_without_a_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        if text:
            (tmp_path / "nvidia-smi").write_text(text)
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}")
        assert hardware.gpus() == ()
        with pytest.raises(EngineUnavailable, match="GPUs: none"):
            hardware.identity(Device.gpu(0))

    @pytest.mark.parametrize(
        ("chosen", "names"),
        [
            ("", []),
            ("1,0", ["A", "B"]),
            ("0, 7, 1", ["B"]),
            ("GPU-a", ["A"]),
            ("GPU-", []),
            ("MIG-5c1e", ["B"]),
        ],
    )
    def test_visible_gpus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, names: list[str]) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho 'GPU-b, B, 8.0, 1'\necho 'GPU-a, A, 9.0, 1'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert [gpu.name for gpu in hardware.gpus()] == names


INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu avx512f amx_tile

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu avx512f amx_tile
"""


class TestCpu:
    @pytest.fixture(autouse=True)
    def _forget(self) -> Iterator[None]:
        hardware._cpu.cache_clear()
        yield
        hardware._cpu.cache_clear()

    def identity(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "cpuinfo")
        hardware._cpu.cache_clear()
        return hardware.identity(CPU)

    def test_identity_of_the_cpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.identity(tmp_path, monkeypatch, INTEL)
        digest = hashlib.sha256(b"amx_tile avx512f fpu").hexdigest()[:16]
        assert found == f"Intel(R) Xeon(R) Platinum 8480+, instruction sets {digest}"


@pytest.mark.parametrize(
    ("line", "precision", "missing"),
    [
        ("flags\t: sse avx512_bf16", Precision.BF16, ""),
        ("Features\t: fp asimd bf16", Precision.BF16, ""),
        ("Features\t: fp asimd asimdhp", Precision.FP16, ""),
        ("flags\t: sse avx2", Precision.FP32, ""),
        ("nothing\t: known", Precision.BF16, ""),
        ("flags\t: sse avx2", Precision.BF16, "this CPU has no instructions for bf16 (avx512_bf16, amx_bf16, bf16)"),
        ("flags\t: avx512_bf16", Precision.FP16, "this CPU has no instructions for fp16"),
    ],
)
def test_missing_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, precision: Precision, missing: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "cpuinfo")
    found = hardware.missing_instructions(precision)
    assert found.startswith(missing) if missing else not found


@pytest.mark.parametrize(
    ("line", "saturates"),
    [
        ("flags\t: sse avx2", True),
        ("flags\t: sse avx2 avx_vnni", False),
        ("flags\t: sse avx2 avx512f avx512_vnni", False),
        ("Features\t: fp asimd asimddp", False),
        ("nothing\t: known", False),
    ],
)
def test_saturating_int8_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, saturates: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "cpuinfo")
    assert hardware.saturates_products_of_bytes() == saturates
