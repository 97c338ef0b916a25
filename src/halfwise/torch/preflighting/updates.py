"""Updates that are lost: too small to move a weight that is stored in half precision."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfwise.torch.preflighting.observe import parameters_of

__all__ = ["dead_updates"]

_HALF = (torch.float16, torch.bfloat16)


def dead_updates(
    layers: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], gradients: Mapping[int, Tensor]
) -> dict[str, float]:
    """Path -> share of the layer's half-precision weights that the optimizer's next update would not move.

    The update is what a copy of the optimizer does to float32 copies of the weights. Weights whose update is exactly
    zero in float32 too are not counted.

    Args:
        layers: by path.
        optimizers: left as they are.
        gradients: by id of the parameter, not scaled, in float32.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.dtype in _HALF and p.requires_grad for p in held):
            moved |= _updated(optimizer, gradients)
    found: dict[str, float] = {}
    for path, module in layers.items():
        dead = counted = 0
        for parameter in parameters_of(module):
            if parameter.dtype not in _HALF or id(parameter) not in moved:
                continue
            before, after = moved[id(parameter)]
            meant = before != after
            counted += int(meant.sum())
            dead += int((meant & (after.to(parameter.dtype) == parameter.detach())).sum())
        if counted:
            found[path] = dead / counted
    return found


def _updated(optimizer: Optimizer, gradients: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """By id of the parameter, its float32 copy before and after a step."""
    originals = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        twin = copy.deepcopy(optimizer)
        twins = [p for group in twin.param_groups for p in group["params"]]
        before: dict[int, Tensor] = {}
        for original, parameter in zip(originals, twins, strict=True):
            parameter.data = original.detach().float().clone()
            parameter.grad = gradients[id(original)].clone() if id(original) in gradients else None
            before[id(original)] = parameter.detach().clone()
            _raise_state(twin, parameter)
        twin.step()
    except Exception:  # an optimizer that cannot be copied, or wants a closure: nothing is known of its updates
        return {}
    return {
        id(original): (before[id(original)], parameter.detach())
        for original, parameter in zip(originals, twins, strict=True)
    }


def _raise_state(optimizer: Optimizer, parameter: Tensor) -> None:
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype in _HALF:
            state[name] = value.float()
