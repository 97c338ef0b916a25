"""What can be told without running anything: weights stored in half, and optimizers whose epsilon such weights lose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from halfwise.core.formats import get_format
from halfwise.core.hazards import Hazard
from halfwise.torch.names import named_layers

__all__ = ["half_weights", "lost_optimizer_epsilons"]

_HALF = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def half_weights(model: nn.Module) -> list[Hazard]:
    """The hazard that trainable weights are stored in half precision, once for each format."""
    found: dict[str, list[tuple[str, nn.Module, str]]] = {}
    for path, module in named_layers(model):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.dtype in _HALF:
                found.setdefault(_HALF[parameter.dtype], []).append((path, module, name))
    hazards = []
    for format_name, holders in found.items():
        path, module, name = holders[0]
        first = f"{path}.{name}" if path else name
        more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
        lost = get_format(format_name).eps / 2
        why = "GradScaler refuses to unscale their gradients" if format_name == "float16" else "nothing warns of it"
        hazards.append(
            Hazard(
                kind="half_weights",
                module=path,
                module_class=type(module).__name__,
                detail=f"{first}{more} in {format_name}: a weight of 1 ignores every update below {lost:.1g}; {why}",
                fix=("model.float()  # before the optimizer is made; the policy computes in half from them",),
            )
        )
    return hazards


def lost_optimizer_epsilons(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Hazard]:
    """The hazard that an optimizer adds an epsilon to weights' statistics in a format in which it is zero."""
    places = {
        id(parameter): (path, type(module).__name__, f"{path}.{name}" if path else name)
        for path, module in named_layers(model)
        for name, parameter in module.named_parameters(recurse=False)
    }
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or eps <= 0.0:
                continue
            for parameter in group["params"]:
                format_name = _HALF.get(parameter.dtype)
                if format_name is None or not parameter.requires_grad:
                    continue
                if eps > get_format(format_name).largest_rounded_to_zero:
                    continue
                path, kind, name = places.get(id(parameter), ("", "", "a parameter"))
                optimizer_name = type(optimizer).__name__
                return [
                    Hazard(
                        kind="epsilon",
                        module=path,
                        module_class=kind,
                        detail=f"{optimizer_name}'s eps {eps:g} is 0 in {format_name}, which {name} is stored in: "
                        "its first step divides by zero",
                        fix=(
                            "model.float()  # before the optimizer is made",
                            f"eps=1e-4  # or, with weights in {format_name}, an epsilon that it can hold",
                        ),
                    )
                ]
    return []
