"""Gradients of one step: unscaled, measured, clipped, whatever their kind.

The measure is the norm over all gradients. A step is sound where the squared norm is finite in float32: that catches
inf and NaN, and also the finite gradient of 1e30 that would freeze Adam for good (its second moment overflows).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["LARGEST_NORM", "clip", "dense_views", "total_norm", "unscale"]

LARGEST_NORM: float = float(torch.finfo(torch.float32).max) ** 0.5
"""A norm above this has no finite square in float32 (about 1.8e19)."""


def dense_views(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients as dense real tensors that share their memory; parameters without a gradient are left out.

    Sparse gradients are coalesced in place, complex ones are seen as pairs of real numbers.
    """
    views = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            gradient = parameter.grad = gradient.coalesce()
            gradient = gradient._values()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        views.append(gradient)
    return views


def unscale(views: list[Tensor], scale: float) -> None:
    """Divides the gradients by `scale` in place.

    As `torch.amp.GradScaler` does it: times its reciprocal, rounded to float32.
    """
    for group in _by_device_and_dtype(views):
        device = group[0].device
        found = torch.zeros(1, device=device)
        inverse = torch.full((1,), scale, dtype=torch.float64, device=device).reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse)


def total_norm(views: list[Tensor]) -> Tensor:
    """The 2-norm over all gradients, float32, no dimensions, on the device of the first; zero where there are none."""
    if not views:
        return torch.zeros(())
    with torch.no_grad():
        norms = [norm for group in _by_device_and_dtype(views) for norm in torch._foreach_norm(group)]
        first = norms[0]
        if not all(norm.dtype is torch.float32 and norm.device == first.device for norm in norms):
            norms = [norm.to(first.device, torch.float32) for norm in norms]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip(views: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales the gradients in place so that their norm is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` does it.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in _by_device_and_dtype(views):
        torch._foreach_mul_(group, factor.to(group[0].device))


def _by_device_and_dtype(views: list[Tensor]) -> Iterable[list[Tensor]]:
    first = views[0] if views else None
    if first is None:
        return ()
    if all(view.dtype is first.dtype and view.device == first.device for view in views):
        return (views,)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        groups.setdefault((view.device, view.dtype), []).append(view)
    return groups.values()
