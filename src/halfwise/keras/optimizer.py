"""The model's optimizer under a plan: it scales the loss wherever something computes in float16.

Keras wraps the optimizer only where the model's own policy is called `mixed_float16`. With a policy map, with a policy
per layer, or in a float32 model with float16 layers nothing is scaled, and small gradients vanish without a word.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
from keras.src.saving.serialization_lib import SerializableDict
from keras.src.utils.tracking import DotNotTrackScope

from halfwise.core.loss_scale import CEILING, LossScaleSettings
from halfwise.core.plan import Plan
from halfwise.keras.loss_scale import LossScaleOptimizer

__all__ = ["UNSCALED", "scale_settings", "set_optimizer", "settle_optimizer", "watched"]

UNSCALED = LossScaleSettings(initial=1.0, floor=1.0, ceiling=1.0)
"""A loss scale that stays at 1: gradients are checked, and nothing is scaled."""


def settle_optimizer(model: keras.Model, plan: Plan) -> tuple[Any, Any] | None:
    """Has the optimizer of a compiled model scale the loss where the plan needs it.

    The optimizer's own iterations and moments stay. A loss scale that it has already stays where it stands.

    Returns:
        The optimizer before and now; None where it is the same.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not plan.uses("float16") or _is_ours(optimizer):
        return None
    set_optimizer(model, watched(optimizer, scale_settings(plan, optimizer)))
    return optimizer, model.optimizer


def scale_settings(plan: Plan, optimizer: keras.optimizers.Optimizer) -> LossScaleSettings:
    """How the loss scale moves under the plan; what the user gave a Keras `LossScaleOptimizer` counts."""
    if not plan.uses("float16"):
        return UNSCALED
    if isinstance(optimizer, LossScaleOptimizer) and optimizer.settings != UNSCALED:
        return optimizer.settings
    settings = plan.loss_scale or LossScaleSettings()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not _is_ours(optimizer):
        initial = min(float(optimizer.initial_scale), CEILING)
        floor = min(settings.floor, initial)
        settings = replace(settings, initial=initial, floor=floor, growth_interval=int(optimizer.dynamic_growth_steps))
    return settings


def watched(optimizer: keras.optimizers.Optimizer, settings: LossScaleSettings) -> LossScaleOptimizer:
    """The optimizer with the check of its gradients, in place of Keras' own loss scaling where it has that."""
    if _is_ours(optimizer):
        if settings == UNSCALED and not optimizer.transparent:  # the user's own, which comes back afterwards
            return LossScaleOptimizer.of(optimizer.inner_optimizer, settings)
        return optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return LossScaleOptimizer.of(optimizer, settings)
    ours = LossScaleOptimizer.of(optimizer.inner_optimizer, settings)
    if optimizer.built:
        ours.build(optimizer._trainable_variables)
        scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        ours.dynamic_scale.assign(min(max(scale, settings.floor), settings.ceiling))
        ours.step_counter.assign(optimizer.step_counter)
    return ours


def set_optimizer(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives the compiled model another optimizer without compiling it anew: metrics and losses keep their state."""
    with DotNotTrackScope():
        model.optimizer = optimizer
    config = dict(model._compile_config.config)
    unscaled = _is_ours(optimizer) and optimizer.settings == UNSCALED
    config["optimizer"] = optimizer.inner_optimizer if unscaled else optimizer
    model._compile_config = SerializableDict(**config)
    if model.built and model.trainable_variables and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _is_ours(optimizer: object) -> bool:
    return isinstance(optimizer, LossScaleOptimizer)
