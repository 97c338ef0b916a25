"""Gradients of one step: unscaled, measured, clipped, whatever their kind.

The measure is the norm over all gradients. A step is sound where the squared norm is finite in float32: that catches
inf and NaN, and also the finite gradient of 1e30 that would freeze Adam for good (its second moment overflows).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Gradients"]


class Gradients:
    """The gradients that parameters have, as dense real tensors that share their memory.

    Parameters without a gradient are left out. Sparse gradients are coalesced in place, complex ones are seen as pairs
    of real numbers.

    Attributes:
        groups: the tensors by device and dtype, as torch's fused operations want them.
    """

    __slots__ = ("groups",)

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                gradient = parameter.grad = gradient.coalesce()
                gradient = gradient._values()
            if gradient.is_conj():
                gradient = parameter.grad = gradient.resolve_conj()
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient)
            groups.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        self.groups = list(groups.values())

    def unscale_(self, scale: float) -> None:
        """Divides the gradients by `scale` in place.

        As `torch.amp.GradScaler` does it: times its reciprocal, rounded to float32.
        """
        for group in self.groups:
            device = group[0].device
            found = torch.zeros(1, dtype=torch.float32, device=device)
            inverse = torch.full((1,), scale, dtype=torch.float64, device=device).reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm over all gradients: no dimensions, the first one's device, float32 (float64 where all are)."""
        norms = [norm for group in self.groups for norm in torch._foreach_norm(group)]
        if not norms:
            return torch.zeros((), dtype=torch.float32)
        if len(self.groups) > 1:
            norms = [norm.to(norms[0].device, torch.float32) for norm in norms]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def clip_(self, norm: Tensor, max_norm: float) -> None:
        """Scales the gradients in place so that their norm, which is `norm`, becomes at most `max_norm`.

        As `torch.nn.utils.clip_grad_norm_` does it.
        """
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for group in self.groups:
            torch._foreach_mul_(group, factor.to(group[0].device))
