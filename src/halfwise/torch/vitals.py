"""Checks that cost next to nothing: made on every step of a watched loop.

Nothing here waits for an accelerator: results stay on the device and are read a step later there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfwise.torch.gradients import dense_views, total_norm
from halfwise.torch.trace import measure

__all__ = ["floating_tensors", "highest", "is_unsound", "squared_norm"]

_LARGEST = torch.finfo(torch.float32).max


def squared_norm(parameters: Sequence[Tensor]) -> Tensor | float:
    """Sum of squares over all gradients; not finite in float32 where one holds NaN or inf, or is too large for Adam.

    On a CPU a dot product per contiguous float32 gradient, one pass at memory speed; elsewhere torch's fused norms, unread.
    """
    total = 0.0
    others: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.device.type == "cpu" and gradient.dtype is torch.float32 and gradient.is_contiguous():
            flat = gradient.view(-1)
            total += torch.dot(flat, flat).item()
        else:
            others.append(parameter)
    if not others:
        return total
    with torch.no_grad():
        return total_norm(dense_views(others)).square() + total


def highest(output: Any) -> list[Tensor]:
    """The largest value of each floating-point tensor in a model's output, NaN where it holds one; on its device."""
    return [extent[1] for tensor in floating_tensors(output) if (extent := measure(tensor)) is not None]


def is_unsound(value: Tensor | float) -> bool:
    """NaN, +inf, or too large for float32. A model's output may hold -inf on purpose (masked logits), so that passes."""
    number = float(value)
    return math.isnan(number) or number > _LARGEST


def floating_tensors(values: Any) -> Iterator[Tensor]:
    """The floating-point tensors in nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        if values.is_floating_point() and values.numel():
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from floating_tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from floating_tensors(value)
