"""Weight gradients are judged beside float32's and beside their own noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfwise.torch.preflighting.compare import Comparison, compare_gradients
from halfwise.torch.preflighting.observe import Run, observe
from halfwise.torch.region import region


def _run(model: nn.Module, closure: Callable[[], Any]) -> Run:
    layers = {"fc": model}
    return observe(model, closure, lambda: region("cpu", "float32"), 1.0, layers, traced=False)


def _compare(changed: Callable[[torch.Tensor], torch.Tensor], *, cancels: float = 0.0) -> Comparison:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4, bias=False), torch.randn(64, 8)
    sign = torch.ones(64, 1)
    if cancels:  # each sample comes again with the other sign, but for this share
        x = torch.cat([x[:32], x[:32]])
        sign[32:] = cancels - 1.0
    reference = _run(model, lambda: (model(x) * sign).square().mean() if not cancels else (model(x) * sign).sum())
    gradients = {key: changed(gradient) for key, gradient in reference.gradients.items()}
    run = Run(0.0, reference.replay, None, None, gradients, reference.layers)
    return compare_gradients({"fc": model}, [reference], [run], "float16")["fc"]


def test_equal_gradients() -> None:
    found = _compare(lambda gradient: gradient)
    assert found.cosine == pytest.approx(1.0)
    assert (found.relative_error, found.dead, found.wrong) == (0.0, False, False)


def test_errors_up_to_a_half_are_tolerated() -> None:
    assert not _compare(lambda gradient: gradient * 1.4).wrong
    found = _compare(lambda gradient: gradient * -1.0)
    assert found.cosine == pytest.approx(-1.0)
    assert found.relative_error == pytest.approx(2.0)
    assert found.wrong
    assert not found.dead


def test_a_dead_layer() -> None:
    found = _compare(torch.zeros_like)
    assert (found.cosine, found.relative_error, found.dead, found.wrong) == (None, 1.0, True, True)


def test_what_is_not_finite_is_wrong() -> None:
    found = _compare(lambda gradient: gradient * float("inf"))
    assert found.wrong
    assert found.cosine is None


def test_a_sum_that_cancels_out_may_be_wrong_by_rounding() -> None:
    found = _compare(lambda gradient: gradient * -1.0, cancels=1e-3)
    assert found.relative_error == pytest.approx(2.0, abs=1e-3)
    assert not found.wrong


def test_a_gradient_that_is_rounding_itself_may_be_0() -> None:
    assert _compare(torch.zeros_like, cancels=1e-1).dead
    assert not _compare(torch.zeros_like, cancels=1e-4).dead


def test_squares_of_tiny_gradients_do_not_vanish() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4, bias=False), torch.randn(64, 8)
    reference = _run(model, lambda: model(x).sum() * 1e-30)
    found = compare_gradients({"fc": model}, [reference], [reference], "float16")
    assert found["fc"].cosine == pytest.approx(1.0)


def test_a_layer_without_gradients_is_left_out() -> None:
    model = nn.Linear(8, 4)
    frozen = nn.Linear(8, 4).requires_grad_(False)
    reference = _run(model, lambda: model(torch.ones(2, 8)).sum())
    assert compare_gradients({"fc": frozen}, [reference], [reference], "float16") == {}
