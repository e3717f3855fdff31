"""PyTorch modules as source models: names of inputs and outputs, rejected inputs, and export errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir
import pytest
import torch
from torch import nn

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources import pytorch
from graphkiln_converters.sources.base import InputSpec
from graphkiln_converters.sources.pytorch import (
    TorchModel,
    export_module,
    freeze,
    input_specs,
    named_outputs,
    to_array,
    to_tensor,
    varying_lengths,
)

ONE, TWO, THREE = (torch.full((2,), float(number)) for number in (1, 2, 3))


class Pair(NamedTuple):
    scores: torch.Tensor
    features: torch.Tensor | None


class Sum(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": left + right, "difference": left - right}


class Refusing(nn.Module):
    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def forward(self, image: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        raise ValueError(self.message)


def model(module: nn.Module, *names: str, **options: Any) -> TorchModel:
    inputs = tuple(InputSpec(name=name, shape=(4,)) for name in names)
    return TorchModel(module=freeze(module), description="a test", libraries=("torch",), inputs=inputs, **options)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("keys", [1, 5, 40])
@pytest.mark.parametrize("kind", ["booleans", "for each head", "for each key", "infinities", "smallest numbers"])
def test_a_query_that_sees_no_key_gets_the_answer_of_pytorch(kind: str, keys: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, size, 4, generator=generator) for size in (3, keys, keys))
    seen = torch.rand(2, 1, 3, keys, generator=generator) > 0.4
    seen[0, 0, 1] = False  # and a whole sample, below
    masks = {
        "booleans": seen,
        "for each head": seen.repeat(1, 4, 1, 1),
        "for each key": seen[:, :, :1] & torch.tensor([True, False]).reshape(2, 1, 1, 1),
        "infinities": torch.where(seen, 0.5, -torch.inf),
        "smallest numbers": torch.where(seen, 0.5, torch.finfo(torch.float32).min),
    }
    feeds = {"q": query, "k": key, "v": value, "mask": masks[kind]}
    graph = export_module(
        Attention().eval(),
        tuple(feeds.values()),
        {},
        dynamic_shapes=({0: torch.export.Dim("batch")},) * 4,
        input_names=list(feeds),
        output_names=["y"],
        description="attention",
    )
    onnx_ir.save(graph, tmp_path / "model.onnx")
    with OnnxRuntimeEngine().build_reference(tmp_path / "model.onnx") as session:
        got = session.run({name: tensor.numpy() for name, tensor in feeds.items()})["y"]
    np.testing.assert_allclose(got, Attention()(*feeds.values()).numpy(), rtol=1e-5, atol=1e-5)


class TestNamedOutputs:
    @pytest.mark.parametrize(
        ("outputs", "names"),
        [
            (ONE, ["output"]),
            ([ONE, (TWO, THREE)], ["output_0", "output_1_0", "output_1_1"]),
            ({0: ONE, "features": None, "other": TWO}, ["0", "other"]),
            (Pair(ONE, None), ["scores"]),
            ({"heads": (ONE, TWO), "rest": {"last": THREE}}, ["heads_0", "heads_1", "last"]),
        ],
    )
    def test_outputs_in_every_container_are_named(self, outputs: Any, names: list[str]) -> None:
        found = named_outputs(outputs)
        assert list(found) == names
        assert next(iter(found.values())) is ONE

    @pytest.mark.parametrize(("outputs", "kind"), [("text", "str"), ((ONE, 3), "int"), ([None], "NoneType")])
    def test_an_output_that_is_not_a_tensor_is_refused(self, outputs: Any, kind: str) -> None:
        with pytest.raises(ConversionError, match=f"returns a {kind}, expected tensors"):
            named_outputs(outputs)


class TestRun:
    FEEDS = {"left": np.ones((3, 4), "f4"), "right": np.full((3, 4), 2, "f4")}  # noqa: RUF012

    @pytest.mark.parametrize("keywords", [True, False])
    def test_by_position_and_by_name(self, keywords: bool) -> None:
        outputs = model(Sum(), "left", "right", keywords=keywords).run(self.FEEDS)
        assert {name: array[0, 0] for name, array in outputs.items()} == {"sum": 3, "difference": -1}

    def test_a_rejected_input_shows_shapes_and_the_first_line(self) -> None:
        refusing = model(Refusing("four channels only\nand more"), "image")
        with pytest.raises(
            ConversionError, match=r"a test rejects an input of image \[3, 4\]: four channels only"
        ) as caught:
            refusing.run({"image": np.zeros((3, 4), "f4")})
        assert "and more" not in caught.value.message
        assert "--shape" in caught.value.hint


class TestFp64:
    def test_fp64_outputs_leave_the_module_in_fp32(self) -> None:
        made = model(nn.Linear(3, 2), "input")
        x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
        (wide,), (own,) = made.run_in_fp64({"input": x}).values(), made.run({"input": x}).values()
        assert (wide.dtype, own.dtype) == (np.dtype("f8"), np.dtype("f4"))
        np.testing.assert_allclose(own, wide, rtol=1e-5)


class TestExport:
    @pytest.mark.parametrize(
        ("message", "hint"),
        [
            ("No ONNX function found for aten.bessel", "basic ones in forward"),
            ("Operator is not supported", "basic ones in forward"),
            ("Could not guard on data-dependent expression", "torch.where"),
            ("something else", "torch.export.export"),
        ],
    )
    def test_an_export_error_names_the_cause_and_a_workaround(
        self, monkeypatch: pytest.MonkeyPatch, message: str, hint: str
    ) -> None:
        def fails(*_: Any, **__: Any) -> None:
            places = 'File "/home/user/model.py", line 3\n  File "/x/torch/y.py", line 4'
            raise ValueError("Failed to export") from RuntimeError(f"{message}\n\n  {places}")

        monkeypatch.setattr(torch.onnx, "export", fails)
        with pytest.raises(ConversionError) as caught:
            export_module(Sum(), (), {}, dynamic_shapes=None, input_names=[], output_names=[], description="a test")
        assert caught.value.message == (
            f'PyTorch cannot export a test: {message} File "/home/user/model.py", line 3 '
            'File "/home/user/model.py", line 3'
        )
        assert hint in caught.value.hint


class TestShapes:
    @pytest.mark.parametrize("shape", [["batch", 4], [2, 4]])
    def test_a_size_that_became_fixed_is_refused(self, shape: list[str | int]) -> None:
        image = onnx_ir.Value(name="image", shape=onnx_ir.Shape(shape))
        graph = onnx_ir.Graph([image], [], nodes=[])
        exported = onnx_ir.Model(graph, ir_version=10)
        with pytest.raises(ConversionError, match="takes only 4 in dimension 1 of input 'image'") as caught:
            pytorch._check_dynamic(exported, [InputSpec(name="image", shape=(4,), dynamic={0: (2, 8)})])
        assert "--dynamic" in caught.value.hint
        pytorch._check_dynamic(exported, [InputSpec(name="image", shape=(4,))])


# `len` of tensors during the export of a module.

HERE = sys.modules[__name__]


def counted(tensor: torch.Tensor) -> Any:
    return len(tensor)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image) * counted(image)


class Decorated(Counting):
    """A decorated `forward`, as in transformers: the function that is called is in another file."""

    forward = torch.no_grad()(Counting.forward)


@pytest.mark.parametrize("kind", [Counting, Decorated])
def test_len_of_a_tensor_is_its_first_size_during_export(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        varying = torch.empty(3, 2)
    with varying_lengths(kind()):
        assert "len" in vars(HERE), "the file of the module's code is changed"
        assert counted(varying) == 3
        assert counted([1, 2]) == 2  # type: ignore[arg-type]
    assert "len" not in vars(HERE)


# Tensors as arrays and back, of every type that both have.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_and_arrays_convert_both_ways(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0], [2.5, -3.0]]).to(dtype)
    array = to_array(tensor.T)
    assert array.shape == (2, 2)
    np.testing.assert_array_equal(array.astype("f4"), tensor.T.float().numpy())
    back = to_tensor(array)
    assert back.dtype is dtype
    assert bool((back == tensor.T).all())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_types_that_triton_lacks_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConversionError, match=f"a tensor of {dtype} cannot be served"):
        to_array(torch.zeros(2, dtype=dtype))


# Input specs from an example input.


class Two(nn.Module):
    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return image * scale


IMAGE, SCALE = torch.zeros(2, 3, 8, 8), torch.zeros(2, 1, dtype=torch.float64)


class TestNames:
    @pytest.mark.parametrize(
        ("example", "names"),
        [
            (IMAGE, ["image"]),
            ([IMAGE, SCALE], ["image", "scale"]),
            ({"scale": SCALE, "image": IMAGE}, ["scale", "image"]),
        ],
    )
    def test_names_are_those_of_forward_or_of_the_example(self, example: Any, names: list[str]) -> None:
        assert [spec.name for spec in input_specs(Two(), example)] == names


class TestSpecs:
    @pytest.mark.parametrize(
        ("tensor", "high"),
        [
            (torch.tensor([[3, 99]]), 100),
            (torch.tensor([[0]], dtype=torch.int32), 1),
            (torch.tensor([[-5]]), 1),
            (torch.zeros(2, 0, dtype=torch.int64), 2),
            (torch.full((1, 1), 7.5), 2),
            (torch.tensor([[True]]), 2),
        ],
    )
    def test_the_range_of_integers_is_that_of_the_example(self, tensor: torch.Tensor, high: int) -> None:
        (spec,) = input_specs(Two(), tensor)
        assert spec.high == high
