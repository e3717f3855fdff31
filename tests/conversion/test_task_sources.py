"""Detectors, segmenters and embeddings from their files to proven versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from converting import Convert
from tiny_detectors import SIDE, tiny_detector
from tiny_transformers import save_model
from tiny_yolo import NAMES, V8, Parts, write_yolo

from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task
from graphkiln_converters.detection.torchvision import TwoStage

pytestmark = pytest.mark.slow


def masked() -> TwoStage:
    return TwoStage(tiny_detector("masked"), (SIDE, SIDE))


def pointed() -> TwoStage:
    return TwoStage(tiny_detector("keypoints"), (SIDE, SIDE))


def proven(version: Path, task: type[Task], words: str) -> Manifest:
    manifest = Manifest.read(version / MANIFEST_FILE)
    assert isinstance(manifest.task, task)
    assert words in manifest.verification[0].verdict, "the task is not in the proof"
    assert manifest.verification[0].verdict.endswith("PASS")
    assert all(spec.shape[0] == "batch" for spec in manifest.signature.outputs)
    return manifest


def test_a_yolo_file_with_a_fixed_batch(tmp_path: Path, run: Convert) -> None:
    path = write_yolo(V8(), tmp_path / "yolo.onnx", batch=1, names=NAMES)
    manifest = proven(run(str(path), task="detection"), Detection, "detections matched")
    assert manifest.preprocess is not None
    assert manifest.preprocess.letterbox is not None
    assert "of the kind yolov8" in manifest.conversion.notes[0]  # type: ignore[union-attr]


def test_a_selection_with_a_fixed_batch(tmp_path: Path, run: Convert) -> None:
    path = write_yolo(Parts(), tmp_path / "selected.onnx", batch=1)
    proven(run(str(path), task="detection", boxes="xyxy"), Detection, "detections matched")


@pytest.mark.parametrize("kind", ["masked", "pointed"])
def test_a_detector_of_two_stages_has_a_dynamic_batch(kind: str, run: Convert) -> None:
    version = run(f"python:{__file__}:{kind}", task="detection", shape=[f"3x{SIDE}x{SIDE}"])
    task = proven(version, Detection, "detections matched").task
    assert isinstance(task, Detection)
    assert [kind for kind, name in (("masked", task.masks), ("pointed", task.keypoints)) if name] == [kind]


@pytest.mark.parametrize(
    ("kind", "task", "words"),
    [
        *((kind, Detection, "detections matched") for kind in ("yolos", "rt_detr")),
        ("segformer", Segmentation, "pixels"),
    ],
)
def test_a_folder_of_transformers(kind: str, task: type[Task], words: str, tmp_path: Path, run: Convert) -> None:
    """More are in the families."""
    shape = save_model(kind, tmp_path / kind)
    assert proven(run(f"huggingface:{tmp_path / kind}", shape=[shape]), task, words).preprocess is not None


def test_a_detector_on_a_backbone_of_timm(tmp_path: Path, run: Convert) -> None:
    """For example facebook/detr-resnet-50."""
    levels = [1, 2, 3, 4]
    backbone = {"model_type": "timm_backbone", "backbone": "resnet10t", "features_only": True, "out_indices": levels}
    shape = save_model("detr", tmp_path / "detr", backbone_config=backbone)
    proven(run(f"huggingface:{tmp_path / 'detr'}", shape=[shape]), Detection, "detections matched")


def test_a_classifier_of_timm_embeds(run: Convert) -> None:
    version = run("timm:resnet10t", task="embedding", shape=["3x64x64"])
    manifest = proven(version, Embedding, "cos")
    assert manifest.signature.outputs[0].shape == ("batch", 512)


def test_a_depth_map_is_unchanged(tmp_path: Path, run: Convert) -> None:
    import transformers

    config = transformers.DPTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=64,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8] * 4,
        fusion_hidden_size=8,
    )
    transformers.DPTForDepthEstimation(config).save_pretrained(tmp_path / "dpt")
    transformers.DPTImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(tmp_path / "dpt")
    manifest = Manifest.read(run(f"huggingface:{tmp_path / 'dpt'}") / MANIFEST_FILE)
    assert manifest.task is None
    (depth,) = manifest.signature.outputs
    assert depth.shape == ("batch", 64, 64)
    assert manifest.preprocess is not None
    assert (manifest.preprocess.resize, manifest.preprocess.interpolation) == ((64, 64), "bicubic")
