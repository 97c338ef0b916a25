"""Checks that cost next to nothing: made on every step of a watched loop.

Nothing here waits for an accelerator: results stay on the device and are read a step later there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfwise.torch.nested import floating_tensors
from halfwise.torch.tracing.records import measure, values_of

__all__ = ["highest", "is_unsound", "squared_norm"]

_LARGEST = float(torch.finfo(torch.float32).max)


def squared_norm(parameters: Sequence[Tensor]) -> Tensor | float:
    """Sum of squares over all gradients; not below inf where one holds NaN or inf or is too large to square in float32.

    A number where all gradients lie on a CPU; else a float32 scalar on the device. Gradients are left as they are.
    """
    gradients = [_values(p.grad) for p in parameters if p.grad is not None]
    if not gradients or gradients[0].is_meta:
        return 0.0
    first = gradients[0]
    if any(g.dtype is not first.dtype or g.device != first.device for g in gradients):
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32).to(first.device) for g in gradients]
    else:
        norms = list(torch._foreach_norm(gradients))
    if first.device.type == "cpu":
        total = 0.0
        for norm in norms:
            value = norm.item()
            total += value * value  # `**` raises an error where this gives inf
        return total if total <= _LARGEST else math.inf if total == total else math.nan
    return torch.stack(norms).float().square().sum()


def _values(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        values = values_of(gradient)
        gradient = gradient.to_dense() if values is None else values
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def highest(output: Any) -> list[Tensor]:
    """The largest value of each floating-point tensor in a model's output, NaN where it holds one; on its device."""
    if isinstance(output, Tensor) and output.is_floating_point():
        extent = measure(output.detach())
        return [] if extent is None else [extent[1]]
    return [extent[1] for tensor in floating_tensors(output) if (extent := measure(tensor.detach())) is not None]


def is_unsound(value: Tensor | float) -> bool:
    """NaN or +inf. A model's output may hold -inf on purpose (masked logits), so that passes."""
    number = float(value)
    return math.isnan(number) or number == math.inf
