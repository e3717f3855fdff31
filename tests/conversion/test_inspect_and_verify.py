"""`graphkiln inspect` and `graphkiln verify`, on the committed example and on what is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zoo
from converting import Convert
from running import run_command, run_here

from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.passes.node_costs import census


class TestInspect:
    def test_shows_what_a_version_is(self, digits: Path) -> None:
        shown = run_here("inspect", digits).stdout
        for words in ("INPUT_0 FP32[batch,1,32,32]", "4 Conv", "47,036", "opset 18", "- PASS", "DigitsNet"):
            assert words in shown
        assert max(map(len, shown.splitlines())) <= 80

    def test_json(self, digits: Path) -> None:
        document = json.loads(run_here("inspect", digits / "1", "--json").stdout)
        assert document["operators"]["Conv"] == 4
        assert document["verification"][0]["step"] == "export"
        assert document["signature"]["inputs"][0]["name"] == "INPUT_0"

    def test_a_graph_without_a_manifest(self, tmp_path: Path) -> None:
        version = zoo.add(tmp_path, "bare", zoo.scale(("batch", 3)))
        assert "came without a manifest" in run_command("inspect", version).stdout

    @pytest.mark.slow
    def test_the_arithmetic_is_that_of_the_books(self, run: Convert) -> None:
        """ResNet-18 has 1.82 G multiply-adds and 11.69 M parameters (He et al. 2015, table 1: 1.8e9)."""
        found = census(run("torchvision:resnet18") / "model.onnx")
        assert found.flops == pytest.approx(2 * 1.814e9, rel=0.01)
        assert found.parameters == pytest.approx(11.69e6, rel=0.01)

    @pytest.mark.parametrize(("path", "words"), [("nowhere", "there is no folder"), ("tests", "has no version folder")])
    def test_a_mistake(self, repository: Path, path: str, words: str) -> None:
        finished = run_here("inspect", repository / path)
        assert finished.returncode == 2
        assert words in finished.stderr


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
        golden = replace(manifest.golden, sha256=sha256(version / "golden.npz"))
        replace(manifest, golden=golden).write(version / MANIFEST_FILE)
        finished = run_command("verify", version)
        assert finished.returncode == 1
        assert "the outputs changed" in finished.stderr

    def test_nothing_to_compare_with(self, tmp_path: Path) -> None:
        finished = run_here("verify", zoo.add(tmp_path, "bare", zoo.scale(("batch", 3))))
        assert finished.returncode == 1
        assert "has no golden samples" in finished.stderr

    @pytest.mark.parametrize(
        ("flags", "words"),
        [(["--engine", "onnxrutime"], "did you mean 'onnxruntime'"), (["--precision", "fp61"], "did you mean 'fp16'")],
    )
    def test_a_mistake(self, digits: Path, flags: list[str], words: str) -> None:
        finished = run_here("verify", digits, *flags)
        assert finished.returncode != 0
        assert words in finished.stderr

    def test_json(self, digits: Path) -> None:
        document = json.loads(run_here("verify", digits, "--json").stdout)
        assert document["verdicts"][0]["relative_l2"] < 1e-5
        assert document["placement"]["precision"] == "fp32"


def sha256(path: Path) -> str:
    from graphkiln_backend.graph.manifest import sha256_of

    return sha256_of(path)
