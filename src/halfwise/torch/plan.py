"""A plan before training: the evidence of a few rehearsed steps instead of the first real ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from halfwise.core.objective import Objective
from halfwise.core.options import check_options
from halfwise.core.plan import Plan
from halfwise.core.planner import EVIDENCE_STEPS
from halfwise.core.targets import HERE
from halfwise.core.timing import TimingTable
from halfwise.torch.closure import Closure, as_closures, split_loss
from halfwise.torch.evidence import Evidence, WholeStep
from halfwise.torch.region import device_type_of, region
from halfwise.torch.snapshot import rehearsal
from halfwise.torch.validate import check_module

__all__ = ["plan"]


def plan(
    model: nn.Module,
    closure: Closure | Sequence[Closure],
    *,
    timing: TimingTable | None = None,
    tolerance: float = 0.1,
    objective: Objective = "time",
    target: str = HERE,
    earlier: Plan | None = None,
) -> Plan:
    """What `"auto"` would choose for `model` on this device, or on other hardware.

    Nothing is changed: weights, gradients, buffers, generators.

    Args:
        model: the module to plan for, parameters in float32.
        closure: returns the loss, or a tuple that begins with it. Several closures are several batches; their losses'
            spread is the noise that rounding is compared with.
        timing: seconds per layer and format; None measures them here.
        tolerance: share of training's own noise that rounding may add: of that spread for all layers together, of the
            variance of each layer's gradients. Default a tenth.
        objective: what to save: `"time"`, `"memory"` (what is kept for the backward pass), or `"balanced"`.
        target: `"here"`, or other hardware, such as `"cuda:ampere"` (`halfwise.core.targets`). Its times are estimates.
        earlier: a plan that exists: a layer changes only where it gains more than its measurements are spread.

    Raises:
        UsageError: an argument cannot be used as given; PolicyError: an unknown objective or target.

    Example:
        >>> import torch, halfwise.torch as hw
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> timing = hw.TimingTable({"0": {"float32": 2e-3, "bfloat16": 1e-3}})
        >>> hw.plan(model, lambda: model(torch.ones(8, 8)).square().mean(), timing=timing).compute("0")
        'bfloat16'
    """
    check_module(model)
    check_options(guard=True, tolerance=tolerance, objective=objective, timing=timing)
    closures = as_closures(closure)
    evidence = Evidence(model, tolerance=tolerance, timing=timing, objective=objective, target=target, earlier=earlier)
    for number in range(max(EVIDENCE_STEPS, len(closures))):
        with rehearsal(model), evidence.observing(), region(device_type_of(model), "float32"):
            loss, _ = split_loss(closures[number % len(closures)]())
            loss.backward()
            evidence.record_gradients()
            evidence.add_step(float(loss.detach()))
    return evidence.plan(WholeStep(model, closures[-1:]))
