"""`diagnose`: one step of any closure, examined without a training loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from halfwise.core.diagnosis import Diagnosis
from halfwise.core.policy import compute_format
from halfwise.errors import PolicyError, UsageError
from halfwise.torch.closure import Closure, as_closures
from halfwise.torch.localise import localise
from halfwise.torch.region import device_type_of, region
from halfwise.torch.snapshot import modes_kept
from halfwise.torch.tracing.dead import silent_overflow

__all__ = ["diagnose"]

_ALLOWED = '"mixed_float16", "mixed_bfloat16", "float32"'


def diagnose(
    model: nn.Module,
    closure: Closure | Sequence[Closure],
    *,
    policy: str = "mixed_float16",
    loss_scale: float = 65536.0,
) -> Diagnosis:
    """Whether one step of `closure` would fail under `policy`, where, and what to do about it.

    The closure is run a few times: in the policy's precision, in float32, with and without the loss scale. Weights are
        never
    touched; gradients, buffers, random generators and training mode are as before afterwards.

    A step that looks healthy is also compared with float32 for overflow that a later operation turned into finite,
    wrong values (a hand-written RMS norm at 300 gives exactly 0).

    Args:
        model: what the closure runs; compiled and wrapped models too (they run eagerly meanwhile).
        closure: runs forward and returns the loss, or `(loss, anything)`. It must not enter `torch.autocast` itself,
            else float32 cannot be compared with. A list stands for one step that accumulates over its closures.
        policy: `"mixed_float16"`, `"mixed_bfloat16"` or `"float32"`.
        loss_scale: what the loss is multiplied with; float16 only (other formats use 1).

    Returns:
        A diagnosis; `diagnosis.healthy` where nothing has to be done, and `print(diagnosis.text())` for the screen.

    Raises:
        PolicyError: the policy is unknown, `"auto"`, or no name.
        UsageError: the model is no module, the closure returns no loss, or the loss scale is no positive number.

    Example:
        >>> import torch, halfwise.torch as hw
        >>> model = torch.nn.Linear(64, 2)
        >>> _ = torch.nn.init.constant_(model.weight, 40.0)
        >>> diagnosis = hw.diagnose(model, lambda: model(torch.full((1, 64), 60.0)).mean())
        >>> diagnosis.verdict, diagnosis.operation
        ('overflow_at_every_scale', 'aten.addmm')
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"diagnose(model={model!r}): it must be a torch.nn.Module: hw.diagnose(model, closure)")
    closures = as_closures(closure)
    if not isinstance(policy, str):
        raise PolicyError(
            f"diagnose(policy={policy!r}): it must be a policy's name. Allowed: {_ALLOWED}; "
            "to examine a plan, hw.apply(model, plan) first."
        )
    if policy == "auto":
        raise PolicyError(
            'diagnose(policy="auto"): "auto" has no precision of its own before evidence is gathered. '
            f"Allowed: {_ALLOWED}; try the one you mean to train in."
        )
    half_format = compute_format(policy)
    is_number = isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool)
    if not (is_number and math.isfinite(loss_scale) and loss_scale > 0):
        raise UsageError(f"diagnose(loss_scale={loss_scale!r}): it must be a finite number above 0, such as 65536.0")
    device_type = device_type_of(model)
    with modes_kept(model):
        found = localise(
            model,
            closures,
            half=lambda: region(device_type, half_format),
            full=lambda: region(device_type, "float32"),
            half_format=half_format,
            loss_scale=loss_scale if half_format == "float16" else 1.0,
        )
        if found.verdict != "not_reproducible":
            return found
        silent = None
        if half_format != "float32":
            silent = silent_overflow(
                model,
                closures,
                half=lambda: region(device_type, half_format),
                full=lambda: region(device_type, "float32"),
                half_format=half_format,
            )
    return silent or Diagnosis("healthy")
