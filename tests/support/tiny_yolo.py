"""ONNX files with outputs of the YOLO kinds and random weights that find something: 64 x 64 pixels, three classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from graphkiln_converters.sources.pytorch import export_module

SIDE, CLASSES = 64, 3
STRIDES = (8, 16, 32)
NAMES = {0: "cat", 1: "dog", 2: "owl"}
FOUND = 300


class Raw(nn.Module):
    """Boxes as center and size in pixels around the cells of three strides, and class scores."""

    def __init__(self, anchors: int, values: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.anchors = anchors
        self.layers = nn.ModuleList(nn.Conv2d(3, anchors * values, stride, stride=stride) for stride in STRIDES)
        for layer in self.layers:
            fan = layer.weight[0].numel()
            nn.init.normal_(layer.weight, std=1.5 / fan**0.5, generator=generator)
            nn.init.normal_(layer.bias, std=0.5, generator=generator)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`[batch, 3, 64, 64]` -> `[batch, boxes, 4 + scores]`."""
        return torch.cat([self._level(images, *pair) for pair in zip(self.layers, STRIDES, strict=True)], 1)

    def _level(self, images: torch.Tensor, layer: nn.Module, stride: int) -> torch.Tensor:
        found = layer(images)
        cells = SIDE // stride
        rows = found.reshape(-1, self.anchors, found.shape[1] // self.anchors, cells * cells).permute(0, 1, 3, 2)
        places = torch.arange(cells) * stride + stride / 2
        centers = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1).reshape(-1, 2)
        boxes = torch.cat((centers + stride * rows[..., :2].tanh(), 2 * stride * rows[..., 2:4].exp().clamp(max=4)), -1)
        return torch.cat((boxes, rows[..., 4:].sigmoid()), -1).flatten(1, 2)


class V8(Raw):
    """`[batch, 4 + classes, boxes]`."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__(1, 4 + classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).transpose(1, 2)


class V5(Raw):
    """`[batch, boxes, 5 + classes]`."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__(3, 5 + classes)


class EndToEnd(V8):
    """`[batch, 300, 6]`: the best boxes of an image with their best class, then zeros."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = super().forward(images).transpose(1, 2)
        center, half = rows[..., :2], rows[..., 2:4] / 2
        scores, classes = rows[..., 4:].max(-1)
        found = torch.cat((center - half, center + half, scores.unsqueeze(-1), classes.unsqueeze(-1).float()), -1)
        order = scores.topk(40, 1).indices.unsqueeze(-1).expand(-1, -1, 6)
        return nn.functional.pad(found.gather(1, order), (0, 0, 0, FOUND - 40))


class Parts(V8):
    """Boxes and scores apart, as a NonMaxSuppression takes them."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().forward(images)
        center, half = found[:, :2], found[:, 2:4] / 2
        return torch.cat((center - half, center + half), 1).transpose(1, 2), found[:, 4:]


def write_yolo(module: nn.Module, path: Path, *, batch: int | None = None, names: dict[int, str] | None = None) -> Path:
    """Writes a module as a file, with a batch that varies or with a fixed one, and with the names of classes."""
    outputs = ["boxes", "scores"] if isinstance(module, Parts) else ["output0"]
    model = export_module(
        module.eval(),
        (images(batch or 2),),
        {},
        dynamic_shapes=None if batch else ({0: torch.export.Dim("batch")},),
        input_names=["images"],
        output_names=outputs,
        description="a tiny YOLO",
    )
    proto = onnx_ir.to_proto(model)
    if isinstance(module, Parts):
        _select(proto)
    if names is not None:
        helper.set_model_props(proto, {"names": repr(names)})
    onnx.save(proto, path)
    return path


def images(count: int) -> torch.Tensor:
    """FP32 `[count, 3, 64, 64]`."""
    return torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(4))


def _select(model: onnx.ModelProto) -> None:
    """Ends a graph of boxes and scores in a NonMaxSuppression, whose selection is all that it returns."""
    told = {"most": np.array([5], np.int64), "iou": np.array([0.5], np.float32), "least": np.array([0.4], np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in told.items())
    model.graph.node.append(helper.make_node("NonMaxSuppression", ["boxes", "scores", *told], ["selected"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("selected", TensorProto.INT64, ["chosen", 3]))
