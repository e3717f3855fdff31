"""The GPUs and the processor of a machine, as compiled artifacts know them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln_backend.engines import hardware
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import EngineUnavailable


class TestGpus:
    @pytest.fixture(autouse=True)
    def _forget(self) -> Iterator[None]:
        hardware.gpus.cache_clear()
        yield
        hardware.gpus.cache_clear()

    def test_are_read_from_the_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 9.0, 580.65.06'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert hardware.identity(Device.gpu(0)) == "NVIDIA H100 80GB HBM3, compute capability 9.0, driver 580.65.06"
        with pytest.raises(
            EngineUnavailable, match=r"there is no GPU 1 here; GPUs: gpu:0 \(NVIDIA H100.*instance_group"
        ):
            hardware.gpu(Device.gpu(1))

    @pytest.mark.parametrize("text", ["", "#!/bin/sh\nexit 9\n"])
    def test_a_machine_without_a_driver_has_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        if text:
            (tmp_path / "nvidia-smi").write_text(text)
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}")
        assert hardware.gpus() == ()
        with pytest.raises(EngineUnavailable, match="GPUs: none"):
            hardware.identity(Device.gpu(0))
