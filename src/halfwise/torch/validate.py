"""What `MixedPrecision` accepts: one clear error for each thing that it cannot use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from halfwise.errors import UsageError

__all__ = ["as_optimizers", "check_max_norm", "check_model", "check_module"]

_HALF = (torch.float16, torch.bfloat16)


def as_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    """One optimizer or several, as a tuple of at least one."""
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not optimizers or not all(isinstance(item, Optimizer) for item in optimizers):
        raise UsageError(f"optimizer is {optimizer!r}; give a torch.optim.Optimizer, or a non-empty list of them")
    return optimizers


def check_model(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Checks that the optimizers train parameters of `model`, in float32.

    Raises:
        UsageError: they do not.
    """
    check_module(model)
    half = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype in _HALF]
    if half:
        raise UsageError(
            f"the model is already in half precision: trainable parameters {_some(half)} are {_dtype(model, half[0])}. "
            "Small updates would be lost (a weight of 1.0 in bfloat16 ignores every update below 0.004). "
            "Keep float32 weights: call model.float() before you make the optimizer; "
            "halfwise computes in half precision from them"
        )
    trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in trained):
        raise UsageError(
            "the optimizer has no trainable parameters; make it from model.parameters() with requires_grad=True"
        )
    if any(p.requires_grad and p.dtype in _HALF for p in trained):
        raise UsageError("the optimizer holds trainable parameters in half precision; make it from float32 parameters")
    own = {id(p) for p in model.parameters()}
    strangers = sum(1 for o in optimizers if not any(id(p) in own for g in o.param_groups for p in g["params"]))
    if strangers == len(optimizers):
        raise UsageError("the optimizer has no parameters of this model; make it from this model's model.parameters()")


def check_module(model: object) -> None:
    """Checks that `model` is a module whose parameters have values."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is {type(model).__name__}; give a torch.nn.Module")
    if any(nn.parameter.is_lazy(p) for p in (*model.parameters(), *model.buffers())):
        raise UsageError("the model has lazy parameters without a shape yet; run one batch through it first")
    if any(p.is_meta for p in model.parameters()):
        raise UsageError(
            "the model has parameters on the meta device, without values; move it with to_empty() and load weights"
        )


def check_max_norm(max_norm: float | None) -> None:
    """Checks a norm to clip to."""
    if max_norm is None:
        return
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0.0:
        raise UsageError(f"the norm to clip to is {max_norm!r}; give a positive number, or None")


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _dtype(model: nn.Module, name: str) -> str:
    return str(dict(model.named_parameters())[name].dtype).removeprefix("torch.")
