"""`graphkiln inspect` and `graphkiln verify` on the committed example."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from converting import Convert
from running import run_command, run_here

from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest, sha256_of
from graphkiln_backend.passes.node_costs import census


class TestInspect:
    def test_inspect_shows_a_version(self, digits: Path) -> None:
        shown = run_here("inspect", digits).stdout
        for words in ("INPUT_0 FP32[batch,1,32,32]", "4 Conv", "47,036", "opset 18", "- PASS", "DigitsNet"):
            assert words in shown
        assert max(map(len, shown.splitlines())) <= 80

    @pytest.mark.slow
    def test_operations_and_parameters_of_resnet(self, run: Convert) -> None:
        """ResNet-18 has 1.82 G multiply-adds and 11.69 M parameters (He et al. 2015, table 1: 1.8e9)."""
        found = census(run("torchvision:resnet18") / "model.onnx")
        assert found.flops == pytest.approx(2 * 1.814e9, rel=0.01)
        assert found.parameters == pytest.approx(11.69e6, rel=0.01)


class TestVerify:
    @pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
    def test_the_example(self, digits: Path, repository: Path, engine: str) -> None:
        finished = run_here("verify", digits, "--engine", engine, "--samples", repository / "docs" / "digits")
        assert finished.returncode == 0, finished.stderr
        lines = finished.stdout.splitlines()
        assert [line.split(":")[0] for line in lines] == [
            f"fp32 on {engine}, source model",
            f"fp32 on {engine}, saved graph",
            f"fp32 on {engine}, your samples",
            "ran",
        ]
        assert "top-1 agreement 5/5" in lines[2]

    def test_a_changed_graph_fails(self, digits: Path, tmp_path: Path) -> None:
        version = shutil.copytree(digits / "1", tmp_path / "1")
        with np.load(version / "golden.npz") as archive:
            arrays = {key: archive[key] * (1.01 if key.startswith("source/") else 1) for key in archive.files}
        np.savez_compressed(version / "golden.npz", **arrays)
        manifest = Manifest.read(version / MANIFEST_FILE)
        assert manifest.golden is not None
        golden = replace(manifest.golden, sha256=sha256_of(version / "golden.npz"))
        replace(manifest, golden=golden).write(version / MANIFEST_FILE)
        finished = run_command("verify", version)
        assert finished.returncode == 1
        assert "the outputs changed" in finished.stderr

    def test_an_unknown_engine_is_refused_with_the_nearest(self, digits: Path) -> None:
        finished = run_here("verify", digits, "--engine", "onnxrutime")
        assert finished.returncode != 0
        assert "did you mean 'onnxruntime'" in finished.stderr
