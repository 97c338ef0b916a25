"""Whole models in a region of another device: they run, stay near float32, obey plans and are computed again alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import halfwise.torch as hw
from halfwise.errors import PolicyError
from halfwise.torch.emulation import emulated_region, emulation

FULL = torch.float32
COMPUTES = ("float16", "bfloat16", "tensorfloat32", "float8")
RESULTS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "tensorfloat32": FULL, "float8": torch.bfloat16}


class Attention(nn.Module):
    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.inner, self.weights = nn.MultiheadAttention(8, 2, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x, x, x, need_weights=self.weights)[0]
        return output


def recurrent(kind: Callable[..., nn.Module]) -> Callable[[Tensor], Tensor]:
    layer = kind(8, 8, batch_first=True)
    return lambda x: layer(x)[0]


def packed(kind: Callable[..., nn.Module]) -> Callable[[Tensor], Tensor]:
    layer = kind(8, 8, batch_first=True, bidirectional=True)
    return lambda x: layer(pack_padded_sequence(x, [5, 4, 2], batch_first=True))[0].data


MODELS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": lambda: nn.Linear(8, 8),
    "conv": lambda: nn.Conv1d(5, 8, 3),
    "batch norm": lambda: nn.Sequential(nn.Conv1d(5, 4, 1), nn.BatchNorm1d(4), nn.ReLU()),
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
    "packed lstm": lambda: packed(nn.LSTM),
    "packed gru": lambda: packed(nn.GRU),
    "attention": lambda: Attention(weights=False),
    "attention with weights": lambda: Attention(weights=True),
    "vmap": lambda: lambda x: torch.func.vmap(lambda row: row @ row.T)(x),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compute", COMPUTES)
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
    assert output.dtype is RESULTS[compute]
    output, exact = output.detach().float(), exact.detach()
    assert float((output - exact).norm() / exact.norm()) < tolerance
    assert float((gradient - exact_gradient).norm() / exact_gradient.norm()) < tolerance
    assert not torch.equal(output, exact)  # something was rounded


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("compute", COMPUTES)
def test_encoder_layers_also_on_their_fast_path(compute: str, train: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(train)
    x = torch.randn(3, 5, 8)
    results: list[torch.dtype] = []
    hook = layer.linear2.register_forward_hook(lambda *call: results.append(call[2].dtype))
    with torch.no_grad():
        with emulated_region("cuda", compute):
            output = layer(x)
        hook.remove()
        exact = layer(x)
    assert output.dtype is FULL  # of a layer norm
    assert 0.0 < float((output - exact).norm() / exact.norm()) < 0.1
    if RESULTS[compute] is not FULL:  # autocast turns the fast path off
        assert results == [RESULTS[compute]]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compute", COMPUTES)
def test_checkpointing_computes_again_in_the_same_precision(compute: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    x = torch.randn(2, 8, requires_grad=True)

    def gradient(run: Callable[[Tensor], Any]) -> Tensor:
        model.zero_grad()
        with emulation(compute):
            with emulated_region("cuda", compute):
                loss = run(x).float().square().sum()
            loss.backward()
        weight = model[0].weight
        assert isinstance(weight, Tensor)
        assert weight.grad is not None
        return weight.grad.clone()

    assert torch.equal(gradient(model), gradient(lambda x: checkpoint(model, x, use_reentrant=reentrant)))


@pytest.mark.parametrize("compute", COMPUTES)
def test_a_plan_is_obeyed_within(compute: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    for module in model:
        module.register_forward_hook(lambda _, args, output: seen.append((args[0].dtype, output.dtype)))
    plan = hw.Plan.manual({"0": "float32", "1": "bfloat16"}, default="float16")
    with hw.apply(model, plan), emulated_region("cuda", compute):
        model(torch.ones(1, 4))
    half = torch.float16
    assert seen == [(FULL, FULL), (FULL, torch.bfloat16), (torch.bfloat16, half)]


def test_regions_nest() -> None:
    x = torch.ones(2, 2)
    with emulated_region("cuda", "float16"):
        with emulated_region("cuda", "bfloat16"):
            assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.float16
        with torch.autocast("cpu", enabled=False):
            assert (x @ x).dtype is FULL
        with emulated_region("cuda", "float32"):
            assert (x @ x).dtype is FULL
            with torch.autocast("cpu"):
                assert (x @ x).dtype is torch.float16
        with emulated_region("tpu", "bfloat16"):
            assert (x @ x).dtype is torch.bfloat16
        assert x.half().softmax(0).dtype is FULL


def test_recurrent_layers_cast_their_weights_for_each_use() -> None:
    """As cuDNN's kernel does: gradients of two uses add up in float32."""
    layer = nn.RNN(1, 1, nonlinearity="relu", bias=False)
    weight = dict(layer.named_parameters())["weight_ih_l0"]
    nn.init.ones_(weight)
    with emulated_region("cuda", "float16"):
        first, second = (layer(torch.ones(1, 1, 1))[0].float().sum() * 4e4 for _ in range(2))
    (first + second).backward()
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(8e4, rel=1e-3)


def test_a_region_in_float32_changes_nothing() -> None:
    x = torch.randn(4, 4)
    with emulated_region("cuda", "float32"):
        assert torch.equal(x @ x, torch.mm(x, x))
        assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_the_cpus_own_region_and_what_cannot_be_emulated() -> None:
    with emulated_region("cpu", "float16"):
        assert torch.ones(2).half().softmax(0).dtype is torch.float16
    with emulated_region("cpu", "float8"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with pytest.raises(PolicyError, match="cannot emulate 'int8'"), emulated_region("cuda", "int8"):
        pass
    with pytest.raises(PolicyError, match="cannot emulate device 'mps'"), emulated_region("mps", "float16"):
        pass
