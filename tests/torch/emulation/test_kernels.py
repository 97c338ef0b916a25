"""Dtypes by CUDA's lists, and values where a CPU's own kernels in half are poor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfwise.torch.emulation import emulated_region
from halfwise.torch.emulation.casts import WeightCasts
from halfwise.torch.emulation.kernels import kernels
from halfwise.torch.emulation.lists import CARELESS, CATEGORIES, RECURRENT

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FULL = torch.float32


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_there_is_a_kernel_for_each_operation() -> None:
    assert set(kernels(WeightCasts(), lambda: False)) == {*CATEGORIES, *CARELESS, *RECURRENT}


@pytest.mark.parametrize("compute", HALVES)
def test_dtypes_are_those_of_cuda(compute: str) -> None:
    half, x = HALVES[compute], torch.rand(4, 4) + 0.5
    low = x.to(half)
    with emulated_region("cuda", compute):
        lowered = {
            "matmul": x @ x,
            "linear": F.linear(x, x),
            "conv": F.conv2d(x.view(1, 1, 4, 4), x[:1, :3].expand(3, 3).reshape(1, 1, 3, 3)),
            "einsum": torch.einsum("ij,jk->ik", x, x),
            "attention": F.scaled_dot_product_attention(x[None], x[None], x[None]),
            "prelu": F.prelu(x, x[0, :1]),
        }
        raised = {
            "softmax": low.softmax(1),
            "log_softmax": F.log_softmax(low, 1),
            "exp": low.exp(),
            "pow": low**2.0,
            "sum": low.sum(),
            "sum over a dimension": low.sum(1),
            "cumsum": low.cumsum(0),
            "norm": low.norm(),
            "norm over a dimension": low.norm(dim=1),
            "norm of an older signature": torch.ops.aten.norm.Scalar(low, 3.0),
            "the same over a dimension": torch.ops.aten.norm.ScalarOpt_dim(low, 3.0, [1]),
            "layer_norm": F.layer_norm(low, (4,)),
            "group_norm": F.group_norm(low[None], 2),
            "cross_entropy": F.cross_entropy(low, torch.zeros(4, dtype=torch.long)),
            "mse_loss": F.mse_loss(low, low),
            "upsample": F.interpolate(low.view(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
        }
        widest = {"addcmul": torch.addcmul(x, low, low), "dot": x[0].dot(low[0]), "cat": torch.cat([x, low])}
        kept = {"relu": low.relu(), "add": low + low, "mean": low.mean(), "dot of half": low[0].dot(low[0])}
        asked_for = low.sum(dtype=torch.float64)
    assert {name: t.dtype for name, t in lowered.items()} == dict.fromkeys(lowered, half)
    assert {name: t.dtype for name, t in raised.items()} == dict.fromkeys(raised, FULL)
    assert {name: t.dtype for name, t in widest.items()} == dict.fromkeys(widest, FULL)
    assert {name: t.dtype for name, t in kept.items()} == dict.fromkeys(kept, half)
    assert asked_for.dtype is torch.float64


def test_what_overflows_in_half_and_not_on_cuda() -> None:
    with emulated_region("cuda", "float16"):
        big = torch.full((70_000,), 1.0).half()
        assert float(big.sum()) == 70_000.0
        assert float((big * 12).exp()[0]) == pytest.approx(162754.8, rel=1e-3)
        assert float((big[:1] * 300) ** 2) == 9e4
        assert float((big * 300).norm()) == pytest.approx(300 * 70_000**0.5, rel=1e-3)
        assert float(F.mse_loss(big * 300, big * 0)) == 9e4


def test_formats_that_autocast_does_not_mix_are_refused() -> None:
    x = torch.ones(3)
    with emulated_region("cuda", "float16"):
        assert torch.dot(x.half(), x.half()).dtype is torch.float16
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.dot(x.bfloat16(), x.bfloat16())


def test_binary_cross_entropy_is_refused() -> None:
    with emulated_region("cuda", "float16"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2))


def test_double_precision_integers_and_other_devices_are_left_alone() -> None:
    with emulated_region("cuda", "float16"):
        x = torch.ones(2, 2, dtype=torch.float64)
        assert (x @ x).dtype is torch.float64
        assert x.softmax(0).dtype is torch.float64
        assert torch.ops.aten.norm.Scalar(x, 3.0).dtype is torch.float64
        assert torch.ones(2, dtype=torch.long).sum().dtype is torch.long
        assert (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).dtype is FULL


@pytest.mark.parametrize("compute", HALVES)
def test_cross_entropy_of_confident_logits_in_half_is_not_0(compute: str) -> None:
    logits = torch.tensor([[11.5, 1.0, 0.0, 2.0]])
    with emulated_region("cuda", compute):
        half = logits @ torch.eye(4)
        loss = F.cross_entropy(half, torch.tensor([0]))
    assert (half.dtype, loss.dtype) == (HALVES[compute], FULL)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, torch.tensor([0]))), rel=1e-2)


def test_the_gradient_of_cross_entropy_comes_from_rounded_probabilities() -> None:
    """As CUDA computes it: from the log-probabilities that it kept, in half."""
    logits = torch.tensor([[2.0, 1.7, -6.0]]).bfloat16().requires_grad_()
    with emulated_region("cuda", "bfloat16"):
        loss = F.cross_entropy(logits, torch.tensor([0]))
    loss.backward()
    wide = F.log_softmax(logits.detach().float(), 1)
    from_rounded, from_wide = (
        (kept.exp() - torch.tensor([1.0, 0.0, 0.0])).bfloat16() for kept in (wide.bfloat16().float(), wide)
    )
    assert not torch.equal(from_rounded, from_wide)
    assert logits.grad is not None
    assert torch.equal(logits.grad, from_rounded)


CAREFUL: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 3),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 8),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "col2im": lambda x: F.fold(x.reshape(4, 128, 256)[:, :100], 16, 5, padding=2),
    "im2col": lambda x: F.unfold(x[:, :, 0], 5, padding=2),
    "instance_norm": lambda x: F.instance_norm(x),  # by way of batch_norm
    "rrelu": lambda x: F.rrelu(x, 0.25, 0.25, training=True),
}


@pytest.mark.parametrize("name", CAREFUL)
@pytest.mark.parametrize("compute", HALVES)
def test_sums_outside_the_lists_are_kept_in_float32(name: str, compute: str) -> None:
    half = HALVES[compute]
    low = (random(4, 8, 16, 16, 16) + 3.0).to(half).requires_grad_()
    full = low.detach().float().requires_grad_()
    with emulated_region("cuda", compute):
        y = CAREFUL[name](low)
    exact = CAREFUL[name](full)
    gradient = random(*y.shape).to(half)
    (found,) = torch.autograd.grad(y, low, gradient)
    (expected,) = torch.autograd.grad(exact, full, gradient.float())
    assert torch.equal(y, exact.to(half))
    assert torch.equal(found, expected.to(half))


def test_running_statistics_are_updated_where_they_are() -> None:
    x = (random(8, 4, 5) + 3.0).half()
    for dtype in (torch.float32, torch.float16):
        mean, var = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
        with emulated_region("cuda", "float16"):
            F.batch_norm(x, mean, var, training=True, momentum=1.0)
        torch.testing.assert_close(mean.float(), x.float().mean((0, 2)), rtol=2e-3, atol=0.0)
