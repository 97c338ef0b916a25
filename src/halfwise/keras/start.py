"""How a guarded training begins: what precision was asked for, and the engine that carries it out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import keras

from halfwise.core.options import plan_of_policy
from halfwise.core.plan import Default, Plan, Rule
from halfwise.core.policy import disabled
from halfwise.keras.apply import applied_plan
from halfwise.keras.engine import Engine
from halfwise.keras.execution import Execution
from halfwise.keras.names import named_layers, routes
from halfwise.keras.optimizer import UNSCALED, scale_settings, set_optimizer, watched
from halfwise.keras.policy import undecided_layers, wanted_by
from halfwise.keras.probe import tapped_layers
from halfwise.keras.training_step import OwnStep

__all__ = ["begin_engine", "plan_of_policies", "plan_wanted"]

_FORMATS = ("float32", "bfloat16", "float16")


def begin_engine(
    model: keras.Model, execution: Execution, policy: str | Plan | None, *, optimizer: Any = None, **options: Any
) -> Engine:
    """The engine for a training of `model`, which is built, with its optimizer watched and its precision in force.

    Args:
        model: the model; compiled, or with `optimizer` given.
        execution: runs its steps.
        policy: what was asked for; None for what the model itself says.
        optimizer: where it is not the model's own.
        options: those of `Engine`.
    """
    if options.get("timing") is not None:
        options["timing"].check_paths(named_layers(model), type(model).__name__)
    plan, in_force = plan_wanted(model, policy)
    if disabled():
        plan, in_force, options["guard"] = plan_of_policies(model), True, False
    undecided = _decide(model)
    own = optimizer if optimizer is not None else model.optimizer
    try:
        ours = watched(own, UNSCALED if plan is None else scale_settings(plan, own))
        if plan is not None and plan.uses("float16") and plan.loss_scale is None:
            plan = replace(plan, loss_scale=ours.settings)
        if optimizer is None:
            set_optimizer(model, ours)
        if isinstance(execution.step, OwnStep):
            execution.step.optimizer = ours
        if not ours.built:
            ours.build(model.trainable_variables)
        return Engine(model, ours, execution, plan, in_force=in_force, undecided=undecided, **options)
    except BaseException:
        if optimizer is None:
            set_optimizer(model, own)
        layers = named_layers(model)
        for path, mark in undecided.items():
            layers[path]._dtype_policy = mark
        raise


def plan_wanted(model: keras.Model, policy: str | Plan | None) -> tuple[Plan | None, bool]:
    """`(plan, in force already)`; the plan is None for `"auto"`, which makes one later."""
    wanted = policy
    if wanted is None:
        if (standing := applied_plan(model)) is not None:
            return standing, True
        wanted = wanted_by(model)
    if wanted is None:
        return plan_of_policies(model), True
    if isinstance(wanted, Plan):
        return wanted, False
    if wanted == "auto":
        return None, False
    return plan_of_policy(wanted, framework="keras", model=type(model).__name__), False


def plan_of_policies(model: keras.Model) -> Plan:
    """What the layers' own policies say, as a plan: the commonest format as its default, the other layers by name."""
    formats = {
        path: layer.compute_dtype
        for path, layer in tapped_layers(model).items()
        if layer.compute_dtype in _FORMATS and not routes(layer)
    }
    common = Counter(formats.values()).most_common(1)[0][0] if formats else "float32"
    name = "float32" if common == "float32" else f"mixed_{common}"
    plan = Plan(
        framework="keras",
        model=type(model).__name__,
        default=Default(compute=common, reason="policy", detail=f"policy {name!r}"),
    )
    for path, compute in formats.items():
        if plan.compute(path) != compute:
            plan = plan.with_rule(Rule(path=path, compute=compute, reason="manual", detail="the layer's own policy"))
    return plan


def _decide(model: keras.Model) -> dict[str, Any]:
    """Takes the mark "undecided" off the layers: they train in float32 until there is a plan. Returns the marks."""
    undecided = undecided_layers(model)
    marks = {path: layer._dtype_policy for path, layer in undecided.items()}
    for layer in undecided.values():
        layer._dtype_policy = keras.DTypePolicy("float32")
    return marks
