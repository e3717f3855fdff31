"""Engines are found by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints, entry_points

import pytest

from graphkiln_backend.engines.base import Support
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.registry import BUILT_IN, GROUP, engine_names, load_engine, probe
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import EngineUnavailable


def test_the_built_in_engines_are_entry_points() -> None:
    ours = entry_points(group=GROUP)
    assert {entry.name: entry.value for entry in ours if entry.value.startswith("graphkiln_")} == BUILT_IN
    assert "onnxruntime" in engine_names()
    assert isinstance(load_engine("onnxruntime"), OnnxRuntimeEngine)


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(EngineUnavailable, match="did you mean 'onnxruntime'"):
        load_engine("onnxrutime")


class Toy:
    def probe(self, device: Device) -> Support:
        return Support(ok=device == CPU, reason="" if device == CPU else "toys are for the cpu")


class TestThirdParties:
    @pytest.fixture(autouse=True)
    def _entries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entries = [
            EntryPoint("toy", f"{__name__}:Toy", GROUP),
            EntryPoint("openvino", "graphkiln_no_such_module:Engine", GROUP),
            EntryPoint("broken", "graphkiln_no_such_module:Engine", GROUP),
        ]
        monkeypatch.setitem(BUILT_IN, "openvino", "graphkiln_no_such_module:Engine")
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **by: list(EntryPoints(entries).select(**by)))
        monkeypatch.setattr(EntryPoint, "load", lambda self: Toy if self.name == "toy" else __import__(self.module))

    def test_an_engine_of_another_distribution_is_found_by_its_entry_point(self) -> None:
        assert engine_names() == ["broken", "onnxruntime", "openvino", "tensorrt", "toy"]
        assert probe("toy", CPU) == Support(ok=True)
        assert probe("toy", Device.gpu()) == Support(ok=False, reason="toys are for the cpu")

    def test_a_built_in_engine_without_its_runtime_names_the_extra(self) -> None:
        with pytest.raises(EngineUnavailable, match=r"known but its runtime is not installed.*graphkiln\[openvino\]"):
            load_engine("openvino")

    @pytest.mark.parametrize("name", ["openvino", "broken", "nonesuch"])
    def test_a_probe_answers_and_does_not_raise(self, name: str) -> None:
        support = probe(name, CPU)
        assert not support.ok
        assert name in support.reason
