"""Steps that the device itself leaves out, so that the host need not wait before it queues them.

Reading "was everything finite?" makes the host wait for the device, and the device then waits for the host to queue the
optimizer's step. Fused optimizers take a flag on the device, under which their step changes nothing (the protocol of
`torch.amp.GradScaler`). So the step is queued first, and the flag is read while the device works on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfwise.core.guard import LARGEST_NORM

__all__ = ["can_suppress", "step_unless_unsound"]


def can_suppress(optimizers: Sequence[Optimizer]) -> bool:
    """True where every optimizer takes the flag: those made with `fused=True`."""
    return all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)


def step_unless_unsound(optimizers: Sequence[Optimizer], norm: Tensor, loss: Tensor) -> None:
    """Steps the optimizers; on the device nothing changes where the gradients' norm or the loss is not sound.

    Args:
        optimizers: those for which `can_suppress` is true.
        norm: norm of the unscaled gradients, a float32 scalar.
        loss: the loss, a scalar.
    """
    unsound = ~(norm <= LARGEST_NORM) | ~torch.isfinite(loss.to(norm.device))
    flag = unsound.to(torch.float32)
    for optimizer in optimizers:
        optimizer.grad_scale, optimizer.found_inf = None, flag  # type: ignore[attr-defined]  # GradScaler's protocol
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
