"""Updates that were lost: the gradient was not zero, and yet the weight did not move.

In bfloat16 a weight of 1 does not notice anything below 0.004; a thousand updates of 0.001 leave it where it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["DeadUpdates"]

_SAMPLED = 16384  # elements per parameter


class DeadUpdates:
    """Compares weights before and after an optimizer step, on copies of at most 16384 evenly spaced elements per
    parameter.

    Args:
        names: names of the parameters, by `id`.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._before: list[tuple[str, Tensor, Tensor, Tensor]] = []

    def before(self, optimizer: Optimizer) -> None:
        """Copies weights and notes where gradients are not zero. Groups with a learning rate of 0 are left out."""
        self._before = [
            (self._names.get(id(p), "?"), p, _sample(p), _sample(p.grad) != 0)
            for group in optimizer.param_groups
            if not (isinstance(group.get("lr"), float) and group["lr"] == 0.0)
            for p in group["params"]
            if p.grad is not None and p.grad.layout is torch.strided and p.numel()
        ]

    def after(self) -> dict[str, float]:
        """Share of elements per parameter whose update was lost, of those with a gradient; one read from the device."""
        pairs = [(name, ((_sample(p) == old) & moving).sum(), moving.sum()) for name, p, old, moving in self._before]
        self._before = []
        if not pairs:
            return {}
        device = pairs[0][1].device
        lost = torch.stack([count.to(device) for _, count, _ in pairs]).tolist()
        moving = torch.stack([count.to(device) for _, _, count in pairs]).tolist()
        return {name: dead / of for (name, _, _), dead, of in zip(pairs, lost, moving, strict=True) if of}


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLED)].clone()
