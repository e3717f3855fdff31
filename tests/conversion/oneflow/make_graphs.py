"""Make `operators.zip` and `models.zip`: graphs saved by OneFlow, with OneFlow's outputs.

Requires Python 3.10 with oneflow 0.9.0, flowvision 0.2.1, numpy 1.23.5, and, on LD_LIBRARY_PATH,
nvidia-cudnn-cu11 8.5.0.96 and nvidia-cublas-cu11 11.10.3.66 (the build for CUDA runs on a CPU, too).

    python make_graphs.py operators OUT [DONE]    # one folder an operation; compress OUT to operators.zip
    python make_graphs.py models OUT              # small models; compress OUT to models.zip
    python make_graphs.py flowvision OUT NAME...  # whole models

If OneFlow ends the process at an operation, start again with the folder DONE.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import flowvision.models as library
import numpy as np
import oneflow as flow
import oneflow._oneflow_internal as internal
import oneflow.nn.functional as F
from oneflow import nn

ROWS = (2, 3, 6)
MAPS = (2, 4, 8, 8)
VOLUMES = (2, 3, 4, 6, 6)

ON_ROWS = {
    # activations
    "relu": F.relu,
    "sigmoid": F.sigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": lambda x: F.elu(x, 1.2),
    "selu": F.selu,
    "celu": nn.CELU(1.3),
    "mish": F.mish,
    "silu": F.silu,
    "softsign": F.softsign,
    "gelu": F.gelu,
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "quick_gelu": lambda x: flow._C.quick_gelu(x),
    "glu": lambda x: F.glu(x, 2),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "relu6": nn.ReLU6(),
    "log_sigmoid": F.logsigmoid,
    "hardshrink": nn.Hardshrink(0.5),
    "softshrink": nn.Softshrink(0.3),
    "threshold": nn.Threshold(0.1, 7.0),
    "softmax": lambda x: flow.softmax(x, dim=1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    # element by element
    "tanh": flow.tanh,
    "exp": flow.exp,
    "log": lambda x: flow.log(x * x + 1),
    "log1p": lambda x: flow.log1p(x * x),
    "expm1": flow.expm1,
    "abs": flow.abs,
    "neg": lambda x: -x,
    "square": flow.square,
    "sqrt": lambda x: flow.sqrt(x * x),
    "rsqrt": lambda x: flow.rsqrt(x * x + 1),
    "reciprocal": lambda x: flow.reciprocal(x + 9),
    "floor": flow.floor,
    "ceil": flow.ceil,
    "round": flow.round,
    "sign": flow.sign,
    "sin": flow.sin,
    "cos": flow.cos,
    "tan": flow.tan,
    "asin": lambda x: flow.asin(flow.tanh(x)),
    "acos": lambda x: flow.acos(flow.tanh(x)),
    "atan": flow.atan,
    "sinh": flow.sinh,
    "cosh": flow.cosh,
    "asinh": flow.asinh,
    "acosh": lambda x: flow.acosh(x * x + 1.5),
    "atanh": lambda x: flow.atanh(flow.tanh(x) * 0.9),
    "erf": flow.erf,
    "isnan": flow.isnan,
    "isinf": flow.isinf,
    "clamp": lambda x: flow.clamp(x, -0.5, 0.5),
    "clamp_min": lambda x: flow.clamp(x, min=-0.5),
    "clamp_max": lambda x: flow.clamp(x, max=0.5),
    # arithmetic
    "scalar_add": lambda x: x + 3,
    "scalar_sub": lambda x: x - 2.5,
    "scalar_rsub": lambda x: 3.0 - x,
    "scalar_div": lambda x: x / 6.0,
    "scalar_rdiv": lambda x: 2.0 / (x + 9),
    "scalar_pow": lambda x: (x * x + 1) ** 0.5,
    "scalar_rpow": lambda x: 2**x,
    "scalar_fmod": lambda x: flow.fmod(x, 2.0),
    "scalar_floordiv": lambda x: flow.floor_divide(x, 2.0),
    "mul": lambda x: x * x,
    "sub": lambda x: x - x.flip(2),
    "div": lambda x: x / (x * x + 1),
    "pow": lambda x: flow.pow(x * x + 1, x),
    "fmod": lambda x: flow.fmod(x, x * x + 1),
    "maximum": lambda x: flow.maximum(x, x.flip(2)),
    "minimum": lambda x: flow.minimum(x, x * 0.5),
    "broadcast_maximum": lambda x: flow.maximum(x, x[:, :1]),
    "broadcast_minimum": lambda x: flow.minimum(x, x[:, :1]),
    "add_n": lambda x: flow.add(x, x * 2) + x.flip(1),
    "atan2": lambda x: flow.atan2(x, x + 1),
    "addcmul": lambda x: flow.addcmul(x, x, x, value=0.5),
    # comparisons and choices
    "greater": lambda x: x > x.flip(2),
    "greater_equal": lambda x: x >= x.flip(2),
    "less": lambda x: x < x.flip(2),
    "less_equal": lambda x: x <= x.flip(2),
    "equal": lambda x: x == x.flip(2),
    "not_equal": lambda x: x != x.flip(2),
    "scalar_greater": lambda x: (x > 0).to(flow.float32),
    "scalar_greater_equal": lambda x: (x >= 0.5).to(flow.int32),
    "scalar_less": lambda x: (x < 0).to(flow.int64),
    "scalar_less_equal": lambda x: x <= 0,
    "scalar_equal": lambda x: x == 0,
    "scalar_not_equal": lambda x: x != 0,
    "logical_and": lambda x: flow.logical_and(x > 0, x < 1),
    "logical_or": lambda x: flow.logical_or(x > 1, x < -1),
    "logical_xor": lambda x: flow.logical_xor(x > 0, x < 1),
    "logical_not": lambda x: flow.logical_not(x > 0),
    "where": lambda x: flow.where(x > 0, x, x * 2),
    "where_scalar_y": lambda x: flow.where(x > 0, x, 0.5),
    "where_scalar_x": lambda x: flow.where(x > 0, 0.5, x),
    "where_scalar_xy": lambda x: flow.where(x > 0, 0.5, 2.5),
    "masked_fill": lambda x: x.masked_fill(x > 0, -3.0),
    "cast": lambda x: x.to(flow.int32).to(flow.float32) * 1.5,
    "double": lambda x: x.to(flow.float64) * 2,
    # reductions and orders
    "sum": lambda x: x.sum(dim=(1, 2)),
    "max": lambda x: x.max(dim=2)[0],
    "min": lambda x: x.min(dim=2)[0],
    "amax": lambda x: flow.amax(x, dim=2),
    "amin": lambda x: flow.amin(x, dim=1, keepdim=True),
    "prod": lambda x: flow.prod(x, dim=2),
    "mean": lambda x: x.mean(dim=2, keepdim=True),
    "std": lambda x: x.std(dim=2),
    "var": lambda x: x.var(dim=2, unbiased=True),
    "var_biased": lambda x: x.var(dim=1, unbiased=False, keepdim=True),
    "norm": lambda x: flow.linalg.norm(x, dim=2),
    "normalize": lambda x: F.normalize(x, dim=1),
    "logsumexp": lambda x: flow.logsumexp(x, dim=2),
    "argmax": lambda x: flow.argmax(x, dim=1),
    "argmin": lambda x: flow.argmin(x, dim=2),
    "topk": lambda x: flow.topk(x, 3, dim=2),
    "sort": lambda x: flow.sort(x, dim=2)[0],
    "argsort": lambda x: flow.argsort(x, dim=2, descending=True),
    "cumsum": lambda x: flow.cumsum(x, dim=2),
    "any": lambda x: (x > 1).any(dim=2),
    "all": lambda x: (x > -2).all(dim=2),
    # arrangement
    "tril": flow.tril,
    "triu": lambda x: flow.triu(x, 1),
    "flip": lambda x: flow.flip(x, [1, 2]),
    "roll": lambda x: flow.roll(x, (1, -2), (1, 2)),
    "repeat": lambda x: x.repeat(1, 2, 3),
    "tile": lambda x: flow.tile(x, (1, 2, 1)),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 4, -1, -1),
    "stack": lambda x: flow.stack([x, x * 2], dim=1),
    "stack_first": lambda x: flow.stack([x, x * 2], dim=0).sum(0),
    "chunk": lambda x: flow.cat(flow.chunk(x, 3, dim=2)[::-1], dim=2),
    "split": lambda x: flow.cat(flow.split(x, 2, dim=2)[::-1], dim=2),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "flatten": lambda x: x.flatten(1),
    "transpose": lambda x: x.transpose(1, 2),
    "reshape": lambda x: x.reshape(x.shape[0], 9, 2),
    "select": lambda x: x[:, 1],
    "last": lambda x: x[:, :, -1],
    "strided": lambda x: x[:, :, ::2],
    "ellipsis": lambda x: x[..., 1:4],
    "gather": lambda x: flow.gather(x, 2, flow.argsort(x, dim=2)),
    "pad": lambda x: F.pad(x, (1, 2), value=0.5),
    "pad_negative": lambda x: F.pad(x, (-1, -2)),
    "one_hot": lambda x: F.one_hot(flow.argmax(x, dim=2), 6),
    # constants, also with the batch in them
    "full": lambda x: x + flow.full((x.shape[0], 3, 6), 2.5),
    "ones": lambda x: x * flow.ones(1, 3, 6),
    "zeros_joined": lambda x: flow.cat([x, flow.zeros(x.shape[0], 1, 6)], dim=1),
    "zeros_like": lambda x: x + flow.zeros_like(x),
    "ones_like": lambda x: x + flow.ones_like(x),
    "arange": lambda x: x + flow.arange(0, 6, dtype=flow.float32),
    "linspace": lambda x: x + flow.linspace(0, 1, 6),
    "eye": lambda x: flow.matmul(x, flow.eye(6)),
    # products
    "einsum": lambda x: flow.einsum("bij,bkj->bik", x, x),
    "bmm": lambda x: flow.bmm(x, x.permute(0, 2, 1)),
    "matmul": lambda x: flow.matmul(x, x.transpose(1, 2)),
    # one dimension
    "avg_pool1d": lambda x: F.avg_pool1d(x, 3, 2, 1),
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 2, 1),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 4),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 2),
    "interpolate1d": lambda x: F.interpolate(x, size=9, mode="linear", align_corners=False),
    "interpolate1d_nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
}
ON_MAPS = {
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d_inside": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool2d_ceil": lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    "avg_pool2d_ceil_padded": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d_divisor": lambda x: F.avg_pool2d(x, 2, 2, divisor_override=3),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d_ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "max_pool2d_indices": lambda x: F.max_pool2d(x, 2, 2, return_indices=True),
    "max_pool2d_dilated": lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (4, 4)),
    "adaptive_avg_pool2d_uneven": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "adaptive_avg_pool2d_one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool2d_same": lambda x: F.adaptive_avg_pool2d(x, 8),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (4, 4)),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
    "bilinear_aligned": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
    "bilinear_size": lambda x: F.interpolate(x, size=(5, 11), mode="bilinear", align_corners=False),
    "bilinear_uneven": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=False),
    "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "nearest_size": lambda x: F.interpolate(x, size=(5, 11), mode="nearest"),
    "nearest_uneven": lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False),
    "bicubic_aligned": lambda x: F.interpolate(x, size=(11, 5), mode="bicubic", align_corners=True),
    "area": lambda x: F.interpolate(x, size=(4, 4), mode="area"),
    "reflection_pad2d": nn.ReflectionPad2d(2),
    "replication_pad2d": nn.ReplicationPad2d((1, 2, 3, 0)),
    "constant_pad2d": nn.ConstantPad2d(1, 2.0),
    "zero_pad2d": nn.ZeroPad2d((0, 1, 2, 3)),
    "pixel_shuffle": nn.PixelShuffle(2),
    "unfold": nn.Unfold(3, padding=1, stride=2),
    "fold": lambda x: nn.Fold((8, 8), 2, stride=2)(nn.Unfold(2, stride=2)(x)),
    "fold_overlapping": lambda x: nn.Fold((8, 8), 3, padding=1, stride=2)(nn.Unfold(3, padding=1, stride=2)(x)),
}
ON_VOLUMES = {
    "max_pool3d": lambda x: F.max_pool3d(x, 2, 2),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2, 2),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, (2, 3, 3)),
    "trilinear": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=False),
    "nearest3d": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
}


class Warp(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("map", flow.tensor(np.array([[[0.7, 0.1, 0.2], [0.1, 0.8, 0.0]]], "f4")))

    def forward(self, x):
        grid = F.affine_grid(self.map.expand(2, -1, -1), (2, 4, 6, 6), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


class Picked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("index", flow.tensor(np.array([[2], [0]])))

    def forward(self, x):
        return flow.gather_nd(x.permute(1, 0, 2), self.index).permute(1, 0, 2)


MODULES = {
    "conv1d": (nn.Conv1d(3, 5, 3, padding=1), ROWS),
    "conv3d": (nn.Conv3d(3, 4, 3, padding=1), VOLUMES),
    "conv2d_grouped": (nn.Conv2d(4, 8, 3, stride=2, padding=(1, 0), dilation=(1, 2), groups=2), MAPS),
    "deconv1d": (nn.ConvTranspose1d(3, 5, 4, stride=2, padding=1), ROWS),
    "deconv2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), MAPS),
    "deconv2d_grouped": (nn.ConvTranspose2d(4, 8, 3, stride=2, groups=2, dilation=2, bias=False), MAPS),
    "deconv3d": (nn.ConvTranspose3d(3, 2, 2, stride=2), VOLUMES),
    "batch_norm1d": (nn.BatchNorm1d(3), ROWS),
    "batch_norm_rows": (nn.BatchNorm1d(6), (2, 6)),
    "batch_norm_plain": (nn.BatchNorm2d(4, affine=False), MAPS),
    "batch_norm3d": (nn.BatchNorm3d(3), VOLUMES),
    "group_norm": (nn.GroupNorm(2, 4), MAPS),
    "instance_norm": (nn.InstanceNorm2d(4, affine=True), MAPS),
    "instance_norm_plain": (nn.InstanceNorm2d(4), MAPS),
    "layer_norm": (nn.LayerNorm(6), ROWS),
    "layer_norm_two": (nn.LayerNorm((3, 6)), ROWS),
    "layer_norm_plain": (nn.LayerNorm(6, elementwise_affine=False), ROWS),
    "linear": (nn.Linear(6, 4), ROWS),
    "linear_rows": (nn.Linear(6, 4), (2, 6)),
    "prelu": (nn.PReLU(3), ROWS),
    "prelu_one": (nn.PReLU(), ROWS),
    "dropout": (nn.Dropout(0.5), ROWS),
    "identity": (nn.Identity(), ROWS),
    "embedding": (nn.Embedding(10, 4), (2, 5)),
    "grid_sample": (Warp(), MAPS),
    "gather_nd": (Picked(), ROWS),
}


def updated(x):
    y = x.clone()
    y[:, 1:3, 2:5] = x[:, 0:2, 1:4] * 2
    return y


def updated_front(x):
    y = x + 0
    y[:, :2] = x[:, 1:] * 2
    return y


ON_ROWS.update({
    "slice_update": updated, "slice_update_front": updated_front, "add_three": lambda x: flow._C.add([x, x * 2, x.flip(1)]),
    "reflection_pad1d": nn.ReflectionPad1d(2), "replication_pad1d": nn.ReplicationPad1d((1, 2)),
    "floor_div": lambda x: flow.floor_divide(x, x * x + 1),
    "broadcast_pow": lambda x: flow.pow(x * x + 1, x[:, :1]), "broadcast_like": lambda x: flow.broadcast_like(x[:, :1], x),
    "reshape_like": lambda x: x.reshape(x.shape[0], 18).view_as(x), "identity_op": lambda x: flow._C.identity(x),
    "clone": lambda x: x.clone() * 1.0, "scalar_int": lambda x: (x.to(flow.int32) + 2 - 5) * 3, "flatten_all": lambda x: flow.flatten(x, 1),
})
ON_VOLUMES.update({"adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, (2, 3, 3))})


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


# What a GPU's graphs hold and a CPU cannot run: the graph is saved with it, the answers are those of the CPU's form.
class LayerNormOfGpu(nn.LayerNorm):
    def forward(self, x):
        return flow._C.layer_norm_affine(
            x, self.weight, self.bias, begin_norm_axis=2, begin_params_axis=2, epsilon=self.eps
        )


class LayerNormPlainOfGpu(nn.LayerNorm):
    def forward(self, x):
        return flow._C.layer_norm(x, begin_norm_axis=2, begin_params_axis=2, epsilon=self.eps)


class GroupNormOfGpu(nn.GroupNorm):
    def forward(self, x):
        return flow._C.group_norm(x, self.weight, self.bias, True, self.num_groups, self.eps)


class BiasGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(flow.zeros(6))

    def forward(self, x):
        return F.gelu(x + self.bias)


class BiasGeluOfGpu(BiasGelu):
    def forward(self, x):
        return flow._C.fused_bias_add_gelu(x, self.bias, axis=2)


OF_GPU = {
    "gpu_layer_norm": (nn.LayerNorm(6), LayerNormOfGpu(6), ROWS),
    "gpu_layer_norm_plain": (
        nn.LayerNorm(6, elementwise_affine=False),
        LayerNormPlainOfGpu(6, elementwise_affine=False),
        ROWS,
    ),
    "gpu_group_norm": (nn.GroupNorm(2, 4), GroupNormOfGpu(2, 4), MAPS),
    "gpu_bias_gelu": (BiasGelu(), BiasGeluOfGpu(), ROWS),
}


class Cnn(nn.Module):
    """Convolution with bias, batch norm, explicit padding, a residual, squeeze-and-excitation, a classifier."""

    def __init__(self):
        super().__init__()
        self.pad, self.first, self.norm = nn.ZeroPad2d(1), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8)
        self.squeeze, self.classes = nn.Conv2d(8, 8, 1), nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.first(self.pad(x))))
        x = x + self.norm2(self.second(x))
        x = x * F.sigmoid(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        return self.classes(F.max_pool2d(x, 2).mean(dim=(2, 3)))


class SeveralEnds(nn.Module):
    """Three inputs; three outputs that are computed in another order than they are answered in."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, a, b, c):
        joined = self.first(a) + self.second(b)
        last = flow.softmax(joined * c, dim=-1)
        values, indices = flow.topk(joined, 2, dim=1)
        return values, indices, last


class Tokens(nn.Module):
    """A class token that is expanded to the batch, attention, a distilled head: DeiT in small."""

    def __init__(self, width=24, heads=3, places=16):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 8, stride=8), nn.Parameter(flow.randn(1, 1, width))
        self.places, self.heads = nn.Parameter(flow.randn(1, places + 1, width)), heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 48), nn.Linear(48, width)
        self.head, self.teacher = nn.Linear(width, 10), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = flow.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        batch, count, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = flow.softmax(flow.matmul(qkv[0], qkv[1].transpose(-2, -1)) * 0.35, dim=-1)
        x = x + self.out(flow.matmul(weights, qkv[2]).transpose(1, 2).reshape(batch, count, width))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return (self.head(x[:, 0]) + self.teacher(x[:, 1:].mean(dim=1))) / 2


class Segmenter(nn.Module):
    """A backbone, a transposed convolution, and two ways of resampling."""

    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.BatchNorm2d(8)
        self.up, self.side = nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1), nn.Conv2d(8, 6, 1)

    def forward(self, x):
        low = F.relu(self.norm(self.down(x)))
        high = self.up(low) + F.interpolate(self.side(low), scale_factor=2, mode="nearest")
        return F.interpolate(high, size=x.shape[-2:], mode="bilinear", align_corners=False), low


class MixesSamples(nn.Module):
    """Subtracts the mean of the batch: such a model has no batch that could vary."""

    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True)


def swin():
    from flowvision.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=16,
        patch_size=2,
        in_chans=3,
        num_classes=10,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
    )


def models():
    return {
        "cnn": (Cnn(), [(2, 3, 16, 16)]),
        "several_ends": (SeveralEnds(), [(2, 6), (2, 3), (2, 4)]),
        "tokens": (Tokens(), [(2, 3, 32, 32)]),
        "tokens_batch_1": (Tokens(), [(1, 3, 32, 32)]),
        "swin": (swin(), [(2, 3, 16, 16)]),
        "swin_batch_1": (swin(), [(1, 3, 16, 16)]),
        "segmenter": (Segmenter(), [(3, 3, 16, 16)]),
        "mixes_samples": (MixesSamples(), [(2, 4)]),
        "training": (nn.BatchNorm1d(4).train(), [(2, 4)]),
    }


def round_weights(module):
    """Small weights of few digits, so that the files compress; statistics that do something."""
    draw = np.random.default_rng(1)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.dtype is flow.float32:
            values = np.round(draw.standard_normal(tuple(tensor.shape)) * 32) / 128
            values = np.abs(values) + 0.5 if "running_var" in name else values
            tensor.data.copy_(flow.tensor(values.astype("f4")))


def flat(answers):
    if isinstance(answers, (tuple, list)):
        return [tensor for answer in answers for tensor in flat(answer)]
    return [] if answers is None else [answers]


def graph_of(module):
    class Graph(nn.Graph):
        def __init__(self):
            super().__init__()
            self.m = module

        def build(self, *inputs):
            answers = flat(self.m(*inputs))
            return tuple(answers) if len(answers) > 1 else answers[0]

    return Graph()


def inputs_of(shapes, integers=False):
    draw = np.random.default_rng(1)
    return [draw.integers(0, 10, s) if integers else draw.standard_normal(s).astype("f4") for s in shapes]


def write(folder, graph, inputs, answers):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    flow.save(graph, str(folder / "model"))
    named = {f"INPUT_{i}": array for i, array in enumerate(inputs)}
    named |= {f"OUTPUT_{i}": tensor.numpy() for i, tensor in enumerate(answers)}
    np.savez_compressed(folder / "reference.npz", **named)


def save(folder, module, shapes, integers=False):
    round_weights(module)
    graph, inputs = graph_of(module), inputs_of(shapes, integers)
    write(folder, graph, inputs, flat(graph(*map(flow.tensor, inputs))))


def save_of_gpu(folder, module, on_gpu, shape):
    """The graph of one form, the answers and weights of the other."""
    for each in (module.eval(), on_gpu.eval()):
        round_weights(each)
    save(folder, module, [shape])
    graph = graph_of(on_gpu)
    try:
        graph._compile(flow.tensor(inputs_of([shape])[0]))
    except RuntimeError as error:
        print(folder.name, "has no kernel here, as expected:", str(error)[:60])
    internal.nn.graph.SaveJobToIR(graph._full_job_proto.SerializeToString(), str(folder / "model"))


def save_operators(out, done):
    cases = {name: (Function(f), ROWS) for name, f in ON_ROWS.items()}
    cases |= {name: (Function(f), MAPS) for name, f in ON_MAPS.items()}
    cases |= {name: (Function(f), VOLUMES) for name, f in ON_VOLUMES.items()}
    for name, (module, shape) in {**cases, **MODULES}.items():
        if name not in done:
            print("DOING", name, flush=True)
            try:
                save(out / name, module.eval(), [shape], integers=name == "embedding")
            except Exception as error:
                print("FAILED", name, repr(error)[:200], flush=True)
    for name, arguments in OF_GPU.items():
        if name not in done:
            print("DOING", name, flush=True)
            save_of_gpu(out / name, *arguments)


def save_flowvision(out, name):
    module, size = getattr(library, name)(), {"inception_v3": 299}.get(name, 384 if name.endswith("384") else 224)
    for tensor in module.parameters():
        if tensor.ndim > 1 and not tensor.numpy().any():  # heads that start from 0
            tensor.data.copy_(flow.randn(*tensor.shape) * 0.05)
    module.train()
    with flow.no_grad():  # statistics that do something
        module(flow.tensor(inputs_of([(4, 3, size, size)])[0]))
    module.eval()
    for each in module.modules():  # LeViT: what is neither parameter nor buffer is not saved
        for key, value in list(vars(each).items()):
            if isinstance(value, flow.Tensor):
                delattr(each, key)
                each.register_buffer(key, value)
    graph, inputs = graph_of(module), inputs_of([(2, 3, size, size)])
    write(out / name, graph, inputs, flat(graph(flow.tensor(inputs[0]))))
    print("saved", name, flush=True)


def main():
    flow.manual_seed(0)
    what, out, *rest = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    if what == "operators":
        save_operators(out, set(Path(rest[0]).read_text().split()) if rest else set())
    elif what == "models":
        for name, (module, shapes) in models().items():
            save(out / name, module if name == "training" else module.eval(), shapes)
    else:
        for name in rest:
            save_flowvision(out, name)
    os._exit(0)  # OneFlow 0.9.0 can hang at the end of the process


main()
