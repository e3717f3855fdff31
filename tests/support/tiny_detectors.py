"""Detectors of torchvision's classes on backbones of two convolutions, with random weights that find something."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from graphkiln_converters.detection.torchvision import Ssd
from graphkiln_converters.torch_libraries import import_torchvision

detection = import_torchvision().models.detection
SIDE, CLASSES, CHANNELS = 64, 4, 32


class Pyramid(nn.Module):
    """Features at strides of 8 and 16."""

    out_channels = CHANNELS

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Conv2d(3, CHANNELS, 8, stride=8)
        self.coarse = nn.Conv2d(CHANNELS, CHANNELS, 2, stride=2)

    def forward(self, image: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
        fine = self.fine(image)
        return OrderedDict([("0", fine), ("1", self.coarse(fine))])


def tiny_detector(kind: str) -> Any:
    """A detector in evaluation mode: `ssd`, `retinanet`, `fcos`, `faster`, `masked` or `keypoints`."""
    torch.manual_seed(0)
    model = _MAKERS[kind]().eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("weight"):
                spread = 1.2 / parameter[0].numel() ** 0.5
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(requires_grad=False)


def batched_ssd() -> Ssd:
    """Make an SSD for batches, for `graphkiln convert python:tiny_detectors:batched_ssd`."""
    return Ssd(tiny_detector("ssd"), (SIDE, SIDE))


def images(count: int) -> torch.Tensor:
    """FP32 `[count, 3, 64, 64]`."""
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2))


def _anchors(each: int) -> Any:
    shapes = (0.5, 1.0, 2.0)[:each]
    return detection.anchor_utils.AnchorGenerator(((16,), (32,)), (shapes, shapes))


def _ssd() -> Any:
    anchors = detection.anchor_utils.DefaultBoxGenerator([[2], [2]])
    head = detection.ssd.SSDHead([CHANNELS, CHANNELS], anchors.num_anchors_per_location(), CLASSES)
    return detection.ssd.SSD(Pyramid(), anchors, (SIDE, SIDE), CLASSES, head=head, detections_per_img=30)


def _retinanet() -> Any:
    return detection.RetinaNet(Pyramid(), CLASSES, anchor_generator=_anchors(3), detections_per_img=30)


def _fcos() -> Any:
    return detection.FCOS(Pyramid(), CLASSES, anchor_generator=_anchors(1), detections_per_img=30)


def _two_stage(kind: str, **heads: Any) -> Any:
    ops = import_torchvision().ops
    settings = {
        "rpn_anchor_generator": _anchors(3),
        "box_roi_pool": ops.MultiScaleRoIAlign(["0", "1"], output_size=3, sampling_ratio=2),
        "rpn_pre_nms_top_n_test": 60,
        "rpn_post_nms_top_n_test": 40,
        "box_detections_per_img": 15,
        "box_head": detection.faster_rcnn.TwoMLPHead(CHANNELS * 9, 16),
        "box_predictor": detection.faster_rcnn.FastRCNNPredictor(16, CLASSES),
    }
    return getattr(detection, kind)(Pyramid(), **settings, **heads)


def _faster() -> Any:
    return _two_stage("FasterRCNN")


def _masked() -> Any:
    ops = import_torchvision().ops
    return _two_stage(
        "MaskRCNN",
        mask_roi_pool=ops.MultiScaleRoIAlign(["0", "1"], output_size=4, sampling_ratio=2),
        mask_head=detection.mask_rcnn.MaskRCNNHeads(CHANNELS, (8,), 1),
        mask_predictor=detection.mask_rcnn.MaskRCNNPredictor(8, 8, CLASSES),
    )


def _keypoints() -> Any:
    ops = import_torchvision().ops
    return _two_stage(
        "KeypointRCNN",
        keypoint_roi_pool=ops.MultiScaleRoIAlign(["0", "1"], output_size=4, sampling_ratio=2),
        keypoint_head=detection.keypoint_rcnn.KeypointRCNNHeads(CHANNELS, (8,)),
        keypoint_predictor=detection.keypoint_rcnn.KeypointRCNNPredictor(8, 5),
    )


_MAKERS = {
    "ssd": _ssd,
    "retinanet": _retinanet,
    "fcos": _fcos,
    "faster": _faster,
    "masked": _masked,
    "keypoints": _keypoints,
}
