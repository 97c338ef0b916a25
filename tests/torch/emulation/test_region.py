"""The CPU acting as CUDA: dtypes by its lists, values as native half gives them, and everything put back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfwise.torch as hw
from halfwise.errors import PolicyError
from halfwise.torch.emulation import emulated_region, emulation

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FULL = torch.float32


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    with torch.autocast("cpu", dtype=torch.float16):  # the CPU's own lists: softmax stays in half, BCE is allowed
        assert torch.ones(2).half().softmax(0).dtype is torch.float16
        F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2))
    assert not torch.is_autocast_enabled("cpu")


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
            "layer_norm": F.layer_norm(low, (4,)),
            "group_norm": F.group_norm(low[None], 2),
            "cross_entropy": F.cross_entropy(low, torch.zeros(4, dtype=torch.long)),
            "mse_loss": F.mse_loss(low, low),
            "upsample": F.interpolate(low.view(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
        }
        widest = {"addcmul": torch.addcmul(x, low, low), "cat": torch.cat([x, low])}
        kept = {"relu": low.relu(), "add": low + low, "mean": low.mean(), "max_pool": F.max_pool1d(low, 2)}
        asked_for = low.sum(dtype=torch.float64)
    assert {name: t.dtype for name, t in lowered.items()} == dict.fromkeys(lowered, half)
    assert {name: t.dtype for name, t in raised.items()} == dict.fromkeys(raised, FULL)
    assert {name: t.dtype for name, t in widest.items()} == dict.fromkeys(widest, FULL)
    assert {name: t.dtype for name, t in kept.items()} == dict.fromkeys(kept, half)
    assert asked_for.dtype is torch.float64


def test_binary_cross_entropy_is_refused() -> None:
    with emulated_region("cuda", "float16"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2))


@pytest.mark.parametrize("compute", HALVES)
def test_a_product_is_that_of_native_half_up_to_the_order_of_additions(compute: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 128, generator=generator), torch.randn(128, 32, generator=generator)
    with emulated_region("cuda", compute):
        emulated = a @ b
    half = HALVES[compute]
    exact = a.to(half).double() @ b.to(half).double()
    ulp = torch.finfo(half).eps * exact.abs().clamp_min(1.0)
    assert (emulated.double() - exact).abs().le(ulp).all()
    assert (emulated == exact.to(half)).float().mean() > 0.99


def test_double_precision_and_integers_are_left_alone() -> None:
    with emulated_region("cuda", "float16"):
        x = torch.ones(2, 2, dtype=torch.float64)
        assert (x @ x).dtype is torch.float64
        assert x.softmax(0).dtype is torch.float64
        assert torch.ones(2, dtype=torch.long).sum().dtype is torch.long


def test_gradients_are_rounded_on_their_way_back() -> None:
    weight, x = torch.ones(1, 1, requires_grad=True), torch.full((1, 1), 1.0, requires_grad=True)
    with emulated_region("cuda", "float16"):
        y = F.linear(x, weight)
    y.backward(torch.full_like(y, 2.0**-24))
    assert weight.grad is not None
    assert (weight.grad.dtype, float(weight.grad)) == (FULL, 2.0**-24)
    weight.grad = torch.zeros_like(weight)
    with emulated_region("cuda", "float16"):
        loss = F.linear(x, weight).float() * 2.0**-26  # below what float16 holds
    loss.backward()
    assert float(weight.grad) == 0.0


def test_a_weight_that_is_used_twice_has_one_cast() -> None:
    """Its gradients, 4e4 and 4e4, add up in float16, as they do on CUDA, unless the cache is off."""
    for cached, expected in ((True, float("inf")), (False, 8e4)):
        weight = torch.ones(1, 1, requires_grad=True)
        with emulated_region("cuda", "float16"), torch.autocast("cpu", dtype=torch.float16, cache_enabled=cached):
            one = torch.ones(1, 1)
            loss = (F.linear(one, weight).float() + F.linear(one, weight).float()) * 4e4
        loss.backward()
        assert weight.grad is not None
        assert float(weight.grad) == pytest.approx(expected, rel=1e-3)


def test_a_weight_that_changed_is_cast_anew() -> None:
    weight, one = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with emulated_region("cuda", "float16"):
        assert float(F.linear(one, weight).detach()) == 1.0
        with torch.no_grad():
            weight.mul_(3.0)
        assert float(F.linear(one, weight).detach()) == 3.0


class Scaled(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype is FULL
        return x * 2.0

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2.0


def recurrent(kind: Callable[..., nn.Module]) -> Callable[[Tensor], Tensor]:
    layer = kind(8, 8, batch_first=True)
    return lambda x: layer(x)[0]


def scaled(x: Tensor) -> Tensor:
    result: Tensor = Scaled.apply(x @ x.transpose(1, 2))  # type: ignore[no-untyped-call]
    return result


MODELS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": lambda: nn.Linear(8, 8),
    "conv": lambda: nn.Conv1d(5, 8, 3),
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "batch norm": lambda: nn.Sequential(nn.Conv1d(5, 4, 1), nn.BatchNorm1d(4), nn.ReLU()),
    "custom function": lambda: scaled,
    "vmap": lambda: lambda x: torch.func.vmap(lambda row: row @ row.T)(x),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compute", ["float16", "bfloat16", "tensorfloat32", "float8"])
def test_models_run_and_stay_near_float32(name: str, compute: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(3, 5, 8, requires_grad=True)
    with emulation(compute):
        with emulated_region("cuda", compute):
            output = model(x)
        weights = torch.randn(output.shape)
        (gradient,) = torch.autograd.grad((output.float() * weights).sum(), x)
    exact = model(x)
    (exact_gradient,) = torch.autograd.grad((exact * weights).sum(), x)
    tolerance = {"float16": 0.01, "bfloat16": 0.1, "tensorfloat32": 0.01, "float8": 0.3}[compute]
    output, exact = output.detach().float(), exact.detach()
    assert float((output - exact).norm() / exact.norm()) < tolerance
    assert float((gradient - exact_gradient).norm() / exact_gradient.norm()) < tolerance
    assert not torch.equal(output, exact)  # something was rounded


def test_tensorfloat32_and_float8_are_what_they_say() -> None:
    one_and_a_bit = torch.full((1, 1), 1.0 + 2.0**-12)
    with emulated_region("cuda", "tensorfloat32"):
        product = one_and_a_bit @ torch.ones(1, 1)
        assert (product.dtype, float(product)) == (FULL, 1.0)
        assert float((one_and_a_bit * 1.0)[0]) == float(one_and_a_bit)
    x = torch.tensor([[448.0, 1.06]])
    with emulated_region("cuda", "float8"):
        result = F.linear(x, torch.tensor([[0.0, 1.0]]))
    assert (result.dtype, float(result)) == (torch.bfloat16, 1.0)


def test_checkpointing_computes_again_in_the_same_precision() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(2, 8)

    def gradient(run: Callable[[Tensor], Any]) -> Tensor:
        model.zero_grad()
        with emulation("float16"):
            with emulated_region("cuda", "float16"):
                loss = run(x).float().square().sum()
            loss.backward()
        weight = model[0].weight
        assert isinstance(weight, Tensor)
        assert weight.grad is not None
        return weight.grad.clone()

    assert torch.equal(gradient(model), gradient(lambda x: checkpoint(model, x, use_reentrant=False)))


def test_a_plan_is_obeyed_within() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    for module in model:
        module.register_forward_hook(lambda _, args, output: seen.append((args[0].dtype, output.dtype)))
    with hw.apply(model, hw.Plan.manual({"0": "float32"}, default="float16")), emulated_region("cuda", "float16"):
        model(torch.ones(1, 4))
    assert seen == [(FULL, FULL), (FULL, torch.float16)]


def test_regions_nest_and_an_error_leaves_nothing_behind() -> None:
    x = torch.ones(2, 2)
    with emulated_region("cuda", "float16"):
        with emulated_region("cuda", "bfloat16"):
            assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.float16
        with torch.autocast("cpu", enabled=False):
            assert (x @ x).dtype is FULL
        with emulated_region("cuda", "float32"):
            assert (x @ x).dtype is FULL
    with pytest.raises(ZeroDivisionError), emulated_region("cuda", "float16"):
        raise ZeroDivisionError


def test_threads_share_it() -> None:
    found: list[torch.dtype] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        with emulated_region("cuda", "float16"):
            barrier.wait(timeout=30)
            found.append(torch.ones(2, 2).half().softmax(0).dtype)
            barrier.wait(timeout=30)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [FULL] * 4


def test_the_cpus_own_region_and_unknown_formats() -> None:
    with emulated_region("cpu", "float16"):
        assert torch.ones(2).half().softmax(0).dtype is torch.float16
    with pytest.raises(PolicyError, match="cannot emulate 'int8'"), emulated_region("cuda", "int8"):
        pass
