"""Samples of two runs are compared place by place; an emulated product is told as one operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfwise.torch.emulation import emulated_region
from halfwise.torch.preflighting.samples import SampledTrace, errors_against
from halfwise.torch.region import region


def _float32() -> AbstractContextManager[object]:
    return region("cpu", "float32")


def _cuda_half() -> AbstractContextManager[object]:
    return emulated_region("cuda", "float16")


def _trace(
    model: nn.Module, x: Tensor, make_region: Callable[[], AbstractContextManager[Any]], *, emulated: bool = False
) -> SampledTrace:
    with SampledTrace(model, emulated=emulated) as trace:
        with make_region():
            loss = model(x).float().sum()
        loss.backward()
    trace.settle()
    return trace


class Rounds(nn.Module):
    """Angles in the thousands, whose sine half precision does not know."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.fc(x) * self.scale)


def test_an_emulated_product_is_one_operation_in_half() -> None:
    trace = _trace(nn.Linear(4, 4), torch.ones(2, 4), _cuda_half, emulated=True)
    products = [r for r in trace.records if r.operation == "aten.addmm" and r.direction == "forward"]
    assert [record.dtype for record in products] == ["float16"]
    assert len(products[0].inputs) == 3
    plain = _trace(nn.Linear(4, 4), torch.ones(2, 4), _cuda_half)
    assert [r.dtype for r in plain.records if r.operation == "aten.addmm" and r.direction == "forward"] == ["float32"]


def test_an_overflow_of_an_emulated_product_is_the_products() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model.get_parameter("0.weight"), 3e4)
    trace = _trace(model, torch.ones(2, 4), _cuda_half, emulated=True)
    first = next(record for record in trace.records if not record.finite)
    assert (first.operation, first.place.module, first.dtype) == ("aten.addmm", "0", "float16")


def test_a_gradient_that_overflows_in_an_emulated_product_is_the_products() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.constant_(model.get_parameter("1.weight"), 1e3)
    with SampledTrace(model, emulated=True) as trace:
        with _cuda_half():
            loss = model(torch.ones(2, 4)).float().sum() * 100
        loss.backward()
    first = next(record for record in trace.settle() if not record.finite)
    assert first.place.module == "1"
    assert (first.direction, first.of, first.operation, first.dtype) == ("backward", "aten.addmm", "aten.mm", "float16")


@pytest.mark.parametrize(("scale", "wrong"), [(1.0, False), (4000.0, True)])
def test_errors_of_what_operations_make(scale: float, wrong: bool) -> None:
    model, x = Rounds(scale), torch.randn(16, 4)
    reference = _trace(model, x, _float32)
    trace = _trace(model, x, _cuda_half, emulated=True)
    errors = errors_against(trace, reference)
    by_name = {trace.records[index].operation: error for index, error in errors.items()}
    assert 0.0 < by_name["aten.addmm"] < 1e-2
    assert 0.0 < by_name["aten.mul"] < 1e-2
    assert (by_name["aten.sin"] > 0.2) is wrong


def test_places_that_ran_a_different_number_of_times_are_not_compared() -> None:
    class Repeats(nn.Module):
        times = 1

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = torch.tanh(x)
            return x

    model, x = Repeats(), torch.ones(3, requires_grad=True)
    reference = _trace(model, x, _float32)
    assert set(errors_against(_trace(model, x, _float32), reference).values()) == {0.0}
    model.times = 2
    found = _trace(model, x, _float32)
    names = {found.records[index].operation for index in errors_against(found, reference)}
    assert "aten.tanh" not in names


def test_the_operation_that_raises_is_kept() -> None:
    model = nn.Linear(4, 4)
    trace = SampledTrace(model)
    with pytest.raises(RuntimeError), trace:
        model(torch.ones(2, 4)).masked_fill(torch.ones(2, 4) > 0, 1.0).half().masked_fill(torch.ones(2, 4) > 0, -1e9)
    assert trace.failure is not None
    assert (trace.failure.operation, trace.failure.direction) == ("aten.masked_fill", "forward")


def test_a_large_tensor_is_sampled() -> None:
    model = nn.Identity()
    with SampledTrace(model) as trace:
        torch.arange(100_000, dtype=torch.float32) * 2
    sizes = [sample.numel() for sample in trace.samples.values()]
    assert sizes
    assert all(2048 < size <= 4096 for size in sizes)
