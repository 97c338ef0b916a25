"""Products: values as native half gives them, gradients rounded on their way back, tensorfloat32 and float8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfwise.torch.emulation import emulated_region, emulation
from halfwise.torch.rounding import rounded

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FULL = torch.float32
A_BIT = 2.0**-12  # below half an ulp of tensorfloat32 at 1


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("compute", HALVES)
def test_a_product_is_that_of_native_half_up_to_the_order_of_additions(compute: str) -> None:
    half, a, b = HALVES[compute], random(64, 128), random(128, 32)
    with emulated_region("cuda", compute):
        emulated = a @ b
    exact = a.to(half).double() @ b.to(half).double()
    ulp = torch.finfo(half).eps * exact.abs().clamp_min(1.0)
    assert (emulated.double() - exact).abs().le(ulp).all()
    assert (emulated == exact.to(half)).float().mean() > 0.99
    assert ((a.to(half) @ b.to(half)).double() - emulated.double()).abs().le(ulp).all()


@pytest.mark.parametrize("compute", HALVES)
def test_gradients_are_those_of_native_half(compute: str) -> None:
    half, grads = HALVES[compute], []
    for native in (False, True):
        x, w = random(16, 8).requires_grad_(), random(4, 8).mul(2.0).requires_grad_()
        with torch.autocast("cpu", dtype=half) if native else emulated_region("cuda", compute):
            y = F.linear(x, w)
        y.backward(random(16, 4).to(half))
        assert x.grad is not None
        assert w.grad is not None
        assert x.grad.dtype is w.grad.dtype is FULL
        assert torch.equal(x.grad, x.grad.to(half).float())  # rounded
        grads.append(torch.cat([x.grad, w.grad]))
    assert (grads[0] - grads[1]).abs().max() <= torch.finfo(half).eps * grads[1].abs().max()


def test_a_gradient_below_half_precision_is_lost() -> None:
    weight, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    for factor, expected in ((2.0**-24, 2.0**-24), (2.0**-26, 0.0)):  # the smallest that float16 holds, and below
        weight.grad = torch.zeros_like(weight)
        with emulated_region("cuda", "float16"):
            loss = F.linear(x, weight).float() * factor
        loss.backward()
        assert float(weight.grad) == expected


def test_a_mask_that_half_precision_does_not_hold_is_minus_infinity() -> None:
    q, mask = random(1, 2, 4), torch.full((2, 2), -1e9)
    with emulated_region("cuda", "float16"):
        scores = torch.baddbmm(mask[None], q, q.mT)
    assert scores.isneginf().all()


def test_tensorfloat32_rounds_the_operands_of_products_alone() -> None:
    x = torch.full((1, 1), 1.0 + A_BIT)
    with emulated_region("cuda", "tensorfloat32"):
        product = x @ torch.ones(1, 1)
        assert (product.dtype, float(product)) == (FULL, 1.0)
        assert float(x * 1.0) == 1.0 + A_BIT
        F.binary_cross_entropy(torch.full((1,), 0.5), torch.ones(1))  # there is no autocast to refuse it
        with torch.autocast("cpu", enabled=False):
            assert float(x @ torch.ones(1, 1)) == 1.0 + A_BIT
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ x).dtype is torch.bfloat16


def test_tensorfloat32_rounds_the_gradient_that_enters_a_product() -> None:
    x, w = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1, requires_grad=True)
    with emulated_region("cuda", "tensorfloat32"):
        y = F.linear(x, w)
    y.backward(torch.full((1, 1), 1.0 + A_BIT))
    assert x.grad is not None
    assert float(x.grad) == 1.0


def test_float8_rounds_both_operands_of_a_layer_and_the_gradient() -> None:
    x, w = random(8, 16), random(4, 16)
    leaf_x, leaf_w, bias = x.clone().requires_grad_(), w.clone().requires_grad_(), torch.full((4,), 1.0625 + A_BIT)
    with emulated_region("cuda", "float8"):
        y = F.linear(leaf_x * 1.0, leaf_w, bias)
    e4m3_x = rounded(x.bfloat16().float(), "float8_e4m3fn", scaled=True)
    e4m3_w = rounded(w, "float8_e4m3fn", scaled=True)
    assert torch.equal(y, F.linear(e4m3_x, e4m3_w, torch.full((4,), 1.0625)).bfloat16())
    gradient = random(8, 4).bfloat16()
    e5m2 = rounded(gradient.float(), "float8_e5m2", scaled=True)
    assert not torch.equal(e5m2, gradient.float())
    y.backward(gradient)
    assert leaf_w.grad is not None
    assert leaf_x.grad is not None
    torch.testing.assert_close(leaf_w.grad, e5m2.T @ e4m3_x)
    torch.testing.assert_close(leaf_x.grad, (e5m2 @ e4m3_w).bfloat16().float())


def test_float8_is_for_layers_and_the_rest_is_bfloat16() -> None:
    x = torch.tensor([[448.0, 1.06]])
    to_second = torch.tensor([[0.0, 1.0]])
    with emulated_region("cuda", "float8"):
        layer, attention = F.linear(x, to_second), x[None] @ to_second[None].mT
        with emulated_region("cuda", "bfloat16"):
            plain = F.linear(x, to_second)
        assert F.linear(x, to_second).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert F.linear(x, to_second).dtype is torch.float16
        convolved = F.conv1d(x[None], to_second[None])
    assert [float(t) for t in (layer, attention, plain, convolved)] == [1.0, 1.0625, 1.0625, 1.0625]


@pytest.mark.parametrize("compute", ["float16", "tensorfloat32", "float8"])
def test_second_derivatives_pass(compute: str) -> None:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        with emulation(compute):
            with emulated_region("cuda", compute):
                y = torch.tanh(F.linear(x, w)).float().sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            (found,) = torch.autograd.grad(slope.square().sum(), w)
        return found

    x, w = random(4, 8).requires_grad_(), random(3, 8).mul(0.1).requires_grad_()
    exact = torch.autograd.grad(
        torch.autograd.grad(torch.tanh(F.linear(x, w)).sum(), x, create_graph=True)[0].square().sum(), w
    )[0]
    assert float((penalty(x, w) - exact).norm() / exact.norm()) < (0.15 if compute == "float8" else 0.01)


@pytest.mark.parametrize("compute", ["float16", "tensorfloat32", "float8"])
def test_transforms_of_functions(compute: str) -> None:
    layer, x = nn.Linear(8, 8), random(3, 8)

    def loss(row: Tensor) -> Tensor:
        with emulated_region("cuda", compute):
            return layer(row[None]).float().square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(x).detach()
    exact = torch.func.vmap(torch.func.grad(lambda row: layer(row[None]).square().sum()))(x).detach()
    assert not torch.equal(found, exact)
    assert float((found - exact).norm() / exact.norm()) < (0.2 if compute == "float8" else 0.01)
    inf = torch.full((1, 1), torch.inf)
    with emulated_region("cuda", compute):
        _, value = torch.func.grad_and_value(lambda x: (x @ torch.ones(1, 1)).float().sum())(inf)
    assert value.isnan() if compute == "float8" else value.isinf()  # e4m3 has no infinity
