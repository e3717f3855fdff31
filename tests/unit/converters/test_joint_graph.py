"""What a joint graph is made from: batch norms as scale and shift, ReLUs not in place, plain attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.joint_graph import FrozenNorm, differentiable, joint_module, plain_attention


def forward(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {"output": module(*inputs)}


def trained(norm: nn.Module) -> nn.Module:
    """In evaluation mode, with statistics and parameters that are not those of a new one."""
    torch.manual_seed(0)
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2)
    return norm.eval()


class TestNorms:
    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize(
        ("norm", "shape"),
        [
            (nn.BatchNorm1d, (2, 3)),
            (nn.BatchNorm1d, (2, 3, 7)),
            (nn.BatchNorm2d, (2, 3, 4, 5)),
            (nn.BatchNorm3d, (2, 3, 2, 2, 2)),
        ],
    )
    def test_a_frozen_one_computes_the_same(
        self, norm: type[nn.BatchNorm2d], shape: tuple[int, ...], affine: bool
    ) -> None:
        original = trained(norm(3, affine=affine, eps=1e-3))
        x = torch.randn(shape)
        torch.testing.assert_close(FrozenNorm(original)(x), original(x))

    def test_a_frozen_one_has_nothing_to_train_or_update(self) -> None:
        frozen = FrozenNorm(trained(nn.BatchNorm2d(3)))
        assert list(frozen.parameters()) == []
        before = {name: value.clone() for name, value in frozen.state_dict().items()}
        frozen.train()(torch.randn(2, 3, 4, 4))
        assert all(torch.equal(before[name], value) for name, value in frozen.state_dict().items())


class TestDifferentiable:
    def test_the_original_stays_as_it_is(self) -> None:
        module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True)))
        copy = differentiable(module)
        assert isinstance(module[1][0], nn.BatchNorm2d)  # type: ignore[index]
        assert module[1][1].inplace  # type: ignore[index]
        assert isinstance(copy[1][0], FrozenNorm)  # type: ignore[index]
        assert not copy[1][1].inplace  # type: ignore[index]
        assert copy[0].weight is not module[0].weight  # type: ignore[index]

    def test_it_computes_the_same(self) -> None:
        module = nn.Sequential(nn.Conv2d(3, 3, 1), trained(nn.BatchNorm2d(3)), nn.ReLU(inplace=True)).eval()
        x = torch.randn(2, 3, 4, 4)
        torch.testing.assert_close(differentiable(module)(x), module(x))

    def test_norms_of_the_callers_choice(self) -> None:
        module = nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3))
        replaced = differentiable(module, lambda norm: nn.Linear(norm.num_features, 1))
        assert isinstance(replaced[0], nn.Linear)  # type: ignore[index]
        assert isinstance(replaced[1], nn.LayerNorm)  # type: ignore[index]


class TestAttention:
    def test_is_restored(self) -> None:
        before = torch.backends.mha.get_fastpath_enabled()
        with plain_attention():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() == before

    def test_is_restored_after_an_error(self) -> None:
        before = torch.backends.mha.get_fastpath_enabled()
        with pytest.raises(RuntimeError, match="inside"), plain_attention():
            raise RuntimeError("inside")
        assert torch.backends.mha.get_fastpath_enabled() == before


class TestJointModule:
    def test_outputs_then_the_gradients_of_inputs(self) -> None:
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).requires_grad_(requires_grad=False)
        x = torch.randn(2, 4, requires_grad=True)
        joint = joint_module(module, forward, "output", [x], dynamic_shapes=None, description="a test")
        output, gradient = joint(x.detach())
        expected = module(x)
        (reference,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(output, expected.detach())
        torch.testing.assert_close(gradient, reference)
        assert joint.differentiated == []
        assert list(joint.parameters()) == []

    def test_gradients_of_parameters_are_named(self) -> None:
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))
        x = torch.randn(1, 4)
        joint = joint_module(module, forward, "output", [x], dynamic_shapes=None, description="a test")
        _, *gradients = joint(x)
        assert joint.differentiated == ["0.weight", "0.bias", "2.weight"]
        module(x).sum().backward()
        for name, gradient in zip(joint.differentiated, gradients, strict=True):
            torch.testing.assert_close(gradient, module.get_parameter(name).grad)

    def test_only_the_named_output_is_differentiated(self) -> None:
        class Two(nn.Module):
            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"square": x * x, "cube": x**3}

        x = torch.tensor([[2.0, 3.0]], requires_grad=True)
        joint = joint_module(Two(), lambda m, i: m(*i), "cube", [x], dynamic_shapes=None, description="a test")
        square, cube, gradient = joint(x.detach())
        assert [tensor.tolist() for tensor in (square, cube, gradient)] == [[[4, 9]], [[8, 27]], [[12, 27]]]

    def test_a_module_that_cannot_be_differentiated(self) -> None:
        class Detached(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.detach()

        x = torch.ones(2, 3, requires_grad=True)
        with pytest.raises(ConversionError, match="no gradient graph for a test") as caught:
            joint_module(Detached(), forward, "output", [x], dynamic_shapes=None, description="a test")
        assert "in place" in caught.value.hint
