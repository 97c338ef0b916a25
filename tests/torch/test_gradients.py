"""Gradients of every kind, against torch's own functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfwise.core.guard import LARGEST_NORM
from halfwise.torch.gradients import Gradients


def parameters_with(*grads: Tensor | None) -> list[nn.Parameter]:
    made = []
    for grad in grads:
        parameter = nn.Parameter(
            torch.zeros_like(grad.to_dense() if grad is not None and grad.is_sparse else grad)
            if grad is not None
            else torch.zeros(2)
        )
        parameter.grad = grad
        made.append(parameter)
    return made


def test_norm_and_clipping_are_bit_for_bit_torchs() -> None:
    torch.manual_seed(0)
    shapes = [(3, 4), (7,), (2, 3, 5)]
    ours = parameters_with(*(torch.randn(s) * 3 for s in shapes))
    theirs = parameters_with(*(p.grad.clone() for p in ours if p.grad is not None))
    expected = nn.utils.clip_grad_norm_(theirs, 0.7)
    found = Gradients(ours)
    norm = found.norm()
    found.clip_(norm, 0.7)
    assert torch.equal(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("scale", [65536.0, 3.0, 2.0**-14])
def test_unscaling_is_bit_for_bit_torchs(scale: float) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(100))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD([parameter])
    scaler.scale(torch.zeros(1))
    parameter.grad = torch.randn(100)
    (ours,) = parameters_with(parameter.grad.clone())
    scaler.unscale_(optimizer)
    Gradients([ours]).unscale_(scale)
    assert ours.grad is not None
    assert torch.equal(ours.grad, parameter.grad)


def test_sparse_gradients_count_every_row_once() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 0]]), torch.tensor([[3.0], [4.0], [1.0]]), (4, 1), check_invariants=True
    )
    (parameter,) = parameters_with(sparse)
    found = Gradients([parameter])
    assert float(found.norm()) == pytest.approx((4.0**2 + 4.0**2) ** 0.5)
    found.unscale_(2.0)
    assert parameter.grad is not None
    assert parameter.grad.to_dense().flatten().tolist() == [2.0, 0.0, 2.0, 0.0]


def test_complex_gradients_are_seen_as_pairs() -> None:
    (parameter,) = parameters_with(torch.tensor([3.0 + 4.0j]))
    found = Gradients([parameter])
    assert float(found.norm()) == 5.0
    found.unscale_(2.0)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.5 + 2.0j]


def test_mixed_dtypes_and_missing_gradients() -> None:
    parameters = parameters_with(torch.tensor([3.0]), None, torch.tensor([4.0], dtype=torch.float64))
    found = Gradients(parameters)
    assert [len(group) for group in found.groups] == [1, 1]
    assert float(found.norm()) == 5.0
    found.unscale_(2.0)
    assert [float(view) for group in found.groups for view in group] == [1.5, 2.0]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e30, -1e20])
def test_what_would_break_adam_is_not_sound(bad: float) -> None:
    assert not float(Gradients(parameters_with(torch.tensor([1.0, bad]))).norm()) <= LARGEST_NORM


def test_the_largest_sound_norm_has_a_finite_square() -> None:
    assert torch.isfinite(torch.tensor(LARGEST_NORM).square())
    assert float(Gradients(parameters_with(torch.tensor([1e19]))).norm()) <= LARGEST_NORM


def test_no_gradients_have_norm_zero() -> None:
    assert float(Gradients([]).norm()) == 0.0
