"""Keras' loss-scale optimizer, bounded, and with the one check that no bad step passes.

`keras.optimizers.LossScaleOptimizer` halves its scale without a floor and doubles it without a ceiling, looks at the
gradients only before it divides them by the scale, and asks whether they are finite, not whether they can be squared.
So 166 bad steps in a row end in NaN weights, and one finite gradient of 1e30 freezes Adam for good. Here a step is
applied where the sum of the squares of the *unscaled* gradients is finite in float32, and the scale moves as
`halfwise.core.loss_scale` says: that is the specification, which `_move` restates in operations of the backend.

A scale that is fixed at 1 is how training in float32 and bfloat16 gets the same check: nothing is multiplied, divided
or updated but the counters, and what is saved is the state of the inner optimizer alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import keras
import numpy as np
from keras import ops

from halfwise.core.loss_scale import CEILING, LOWEST_FLOOR, LossScaleSettings
from halfwise.errors import UsageError

__all__ = ["LossScaleOptimizer"]

_BACKEND = keras.config.backend()
_LARGEST_NORM = float(np.finfo(np.float32).max) ** 0.5  # a larger norm has no finite square in float32
_EXTRA = ("floor", "ceiling", "growth_factor", "backoff_factor", "hysteresis", "growth_delay")
_DEFAULTS = {field.name: field.default for field in fields(LossScaleSettings)}
_OURS = ("hysteresis_left", "skipped_steps", "skips_in_a_row", "gradient_norm")  # variables that Keras' own has not


@keras.saving.register_keras_serializable(package="halfwise")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss, unscales the gradients, and applies them with `inner_optimizer` where they are sound.

    A drop-in replacement of `keras.optimizers.LossScaleOptimizer`. A step is sound where the sum over all gradients of
    (gradient / scale)^2 is finite in float32. A step that is not changes nothing of the inner optimizer: no weight,
    slot, accumulator or average, and not `iterations`.

    Args:
        inner_optimizer: the optimizer to wrap. One that is already built keeps its iterations and moments.
        initial_scale: the first loss scale; default 32768. One below `floor=1` lowers the floor to itself.
        dynamic_growth_steps: sound steps in a row before the scale grows; default 2000.
        name: the optimizer's name.
        floor, ceiling, growth_factor, backoff_factor, hysteresis, growth_delay: as in
            `halfwise.core.loss_scale.LossScaleSettings`; the defaults move the scale as Keras does, within 1 and 2^24.

    Attributes:
        dynamic_scale: variable, no dimensions, float32: the loss scale.
        step_counter: variable, int: sound steps counted towards the next growth.
        hysteresis_left: variable, int: overflows until the scale backs off.
        skipped_steps: variable, int: steps not applied, since the optimizer was built.
        skips_in_a_row: variable, int: steps not applied since the last one that was.
        gradient_norm: variable, no dimensions, float32: the 2-norm of the last step's unscaled gradients; infinite or
            NaN exactly where the step was not applied. Of sparse gradients the stored rows count. Under
            `tf.distribute` it is an upper bound: the root of replicas times the sum of the replicas' squared norms.

    The variables exist once the optimizer is built. An attribute that this class does not have is the inner
    optimizer's, to read and to set: `optimizer.beta_1`.

    Raises:
        PolicyError: a setting is out of range (also a ValueError).
        UsageError: the inner optimizer scales the loss itself (also a ValueError).

    Source: Keras' class of the same name; Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.

    Example:
        >>> import keras
        >>> from halfwise.keras.loss_scale import LossScaleOptimizer
        >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
        >>> weight = keras.Variable(1.0)
        >>> optimizer.build([weight])
        >>> float(optimizer.scale_loss(0.5))
        2.0
        >>> for gradient in (4.0, float("inf")):
        ...     optimizer.apply([keras.ops.array(gradient)], [weight])
        >>> weight.numpy().item(), float(optimizer.dynamic_scale), int(optimizer.skipped_steps)
        (0.5, 2.0, 1)
    """

    initial_scale: float
    dynamic_growth_steps: int
    step_counter: Any
    dynamic_scale: Any
    hysteresis_left: Any
    skipped_steps: Any
    skips_in_a_row: Any
    gradient_norm: Any

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
        *,
        floor: float = 1.0,
        ceiling: float = CEILING,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        hysteresis: int = 1,
        growth_delay: int = 0,
        **kwargs: Any,
    ) -> None:
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise UsageError(
                "LossScaleOptimizer(inner_optimizer) was given a loss-scale optimizer, which would divide the "
                "gradients by its own scale as well; give its inner optimizer: optimizer.inner_optimizer"
            )
        initial = _plain(initial_scale)
        if floor == 1.0 and isinstance(initial, int | float) and initial < floor:
            floor = max(initial, LOWEST_FLOOR)
        settings = LossScaleSettings(
            initial=initial,
            floor=floor,
            ceiling=ceiling,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=_plain(dynamic_growth_steps),
            hysteresis=hysteresis,
            growth_delay=growth_delay,
        )
        super().__init__(inner_optimizer, settings.initial, settings.growth_interval, name, **kwargs)
        self._was_asked_to_scale = self._has_said_so = False
        self.use(settings)

    @classmethod
    def of(
        cls, inner: keras.optimizers.Optimizer, settings: LossScaleSettings, name: str | None = None
    ) -> LossScaleOptimizer:
        """`inner` under a loss scale that moves as `settings` say; of a loss-scale optimizer, its inner optimizer."""
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            inner = inner.inner_optimizer
        optimizer = cls(inner, name=name)
        optimizer.use(settings)
        return optimizer

    @property
    def settings(self) -> LossScaleSettings:
        """How the loss scale moves."""
        return self._settings

    def use(self, settings: LossScaleSettings) -> None:
        """Moves the loss scale by other settings from now on.

        They are constants of functions that were compiled before: compile those again. The variables keep their
        values: assign `settings.initial` to `dynamic_scale` where the new scale shall be in force at once.
        """
        self._settings = settings
        self.initial_scale = settings.initial
        self.dynamic_growth_steps = settings.growth_interval

    @property
    def transparent(self) -> bool:
        """True where the scale is fixed at 1, so that the optimizer only checks."""
        return self._settings.initial == self._settings.floor == self._settings.ceiling == 1.0

    def build(self, var_list: Sequence[Any]) -> None:
        """Makes the variables, and those of the inner optimizer unless it has them."""
        settings = self._settings
        self.step_counter = self._scalar("step_counter", "int", -settings.growth_delay)
        self.dynamic_scale = self._scalar("dynamic_scale", "float32", settings.initial)
        self.hysteresis_left = self._scalar("hysteresis_left", "int", settings.hysteresis)
        self.skipped_steps = self._scalar("skipped_steps", "int", 0)
        self.skips_in_a_row = self._scalar("skips_in_a_row", "int", 0)
        self.gradient_norm = self._scalar("gradient_norm", "float32", 0.0)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)  # Keras' own would build the inner one again

    def _scalar(self, name: str, dtype: str, value: float) -> Any:
        initializer = keras.initializers.Constant(value)
        return self.add_variable(shape=(), dtype=dtype, initializer=initializer, aggregation="none", name=name)

    def scale_loss(self, loss: Any) -> Any:
        """`loss` times the loss scale, in float32 (a loss in half would overflow).

        A loss that is not finite is multiplied by NaN. So all its gradients are NaN, some of which could be finite.
        """
        if not self._was_asked_to_scale:
            self._was_asked_to_scale = True
        scale = self.dynamic_scale if self.built and not self.transparent else self.initial_scale
        loss = ops.convert_to_tensor(loss)
        factor = ops.where(ops.isfinite(loss), ops.convert_to_tensor(scale, dtype="float32"), float("nan"))
        return ops.multiply(loss, factor)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Unscales the gradients and updates the variables, unless a gradient is too large or not a number.

        Raises:
            UsageError: nobody said for which variables.
        """
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if not self.built:
            if variables is None:
                raise UsageError(
                    "apply(grads) was called before the optimizer was built; "
                    "call optimizer.build(variables) before, or apply(grads, variables)"
                )
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        self._say_that_the_loss_is_not_scaled("loss = optimizer.scale_loss(loss)")
        if _BACKEND == "tensorflow":
            self._apply_in_a_replica(grads, variables)
        else:
            unscaled, norm = self._measured(grads, variables or self._trainable_variables)
            sound = self._update(norm)
            if sound:  # jax.lax.cond could not carry the assignments out of its branches
                self.inner_optimizer.apply(unscaled, variables)

    def _apply_in_a_replica(self, grads: list[Any], variables: list[Any] | None) -> None:
        """`apply` on TensorFlow: all replicas skip the step, or none."""
        import tensorflow as tf

        from halfwise.keras.backends.tensorflow import run_if

        if tf.distribute.in_cross_replica_context():
            raise UsageError("apply() must be called in a replica context: within strategy.run(...)")
        unscaled, norm = self._measured(grads, variables or self._trainable_variables)
        replica = tf.distribute.get_replica_context()
        count = replica.num_replicas_in_sync
        if count > 1:  # |sum of n gradients|^2 <= n times the sum of |gradient|^2
            norm = tf.sqrt(count * replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.square(norm)))
        if not tf.distribute.has_strategy():
            run_if(self._update(norm), lambda: self.inner_optimizer.apply(unscaled, variables))
            return
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            sound = self._update(norm)
            ops.cond(sound, lambda: self.inner_optimizer.apply(unscaled, variables), lambda: None)
            return

        def together(strategy: Any, norm: Any, unscaled: Any, variables: Any) -> None:
            # a condition around what merges the replicas can only stand outside them
            sound = self._update(strategy.experimental_local_results(norm)[0])
            arguments = (self.inner_optimizer.apply, (unscaled, variables))
            ops.cond(sound, lambda: strategy.extended.call_for_each_replica(*arguments), lambda: None)

        replica.merge_call(together, args=(norm, unscaled, variables))

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Iterable[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`apply` as a function of the variables' values: `(trainable variables, optimizer variables)` afterwards.

        Raises:
            UsageError: the optimizer is not built.
        """
        if not self.built:
            raise UsageError(
                f"To call `stateless_apply`, {type(self).__name__} must be built (i.e. its variables must have been "
                "created). You can build it via `optimizer.build(trainable_variables)`."
            )
        self._say_that_the_loss_is_not_scaled(
            "with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, optimizer_variables))):\n"
            "        loss = optimizer.scale_loss(loss)"
        )
        own, slots = self._variables, _values(optimizer_variables[len(self._variables) :])
        with keras.StatelessScope(state_mapping=list(zip(own, optimizer_variables, strict=False))) as scope:
            unscaled, norm = self._measured(list(grads), self._trainable_variables)
            sound = self._update(norm)
        trained, new_slots = _either(
            sound,
            lambda: self.inner_optimizer.stateless_apply(slots, unscaled, trainable_variables),
            lambda: (_values(trainable_variables), slots),
        )
        return trained, [scope.get_current_value(variable) for variable in own] + new_slots

    def _measured(self, grads: list[Any], variables: Sequence[Any]) -> tuple[list[Any], Any]:
        """The unscaled gradients and their norm, which is not finite where they must not be applied."""
        pairs = list(zip(grads, variables, strict=False))
        taken_over = [getattr(variable, "overwrite_with_gradient", False) for _, variable in pairs]
        unscaled = [
            grad if grad is None or taken or self.transparent else _divided(grad, self.dynamic_scale)
            for grad, taken in zip(grads, taken_over, strict=True)
        ]
        present = [(g, taken) for g, taken in zip(unscaled, taken_over, strict=True) if g is not None]
        norm = _norm([g for g, taken in present if not taken])
        for g in (g for g, taken in present if taken):  # float8's scales, which no norm should be made of
            norm = ops.where(ops.all(ops.isfinite(g)), norm, float("nan"))
        return unscaled, norm

    def _update(self, norm: Any) -> Any:
        """Takes note of a step whose gradients have this norm; True where it is sound."""
        sound = ops.isfinite(norm)
        skips = ops.cast(ops.logical_not(sound), self.skipped_steps.dtype)
        self.gradient_norm.assign(norm)
        self.skipped_steps.assign_add(skips)
        self.skips_in_a_row.assign((self.skips_in_a_row + skips) * skips)
        if not self.transparent:
            self._move(sound)
        return sound

    def _move(self, sound: Any) -> None:
        """`halfwise.core.loss_scale.update`, without a branch."""
        settings, scale, left = self._settings, self.dynamic_scale.value, self.hysteresis_left.value
        counted = self.step_counter.value + 1
        grows = ops.logical_and(sound, counted >= settings.growth_interval)
        backs_off = ops.logical_and(ops.logical_not(sound), left <= 1)
        smaller = ops.maximum(scale * settings.backoff_factor, settings.floor)
        larger = ops.minimum(scale * settings.growth_factor, settings.ceiling)
        self.dynamic_scale.assign(ops.where(grows, larger, ops.where(backs_off, smaller, scale)))
        self.step_counter.assign(ops.where(grows, 0, ops.where(sound, counted, -settings.growth_delay)))
        fewer = ops.where(sound, left, ops.maximum(left - 1, 1))
        self.hysteresis_left.assign(ops.where(grows, settings.hysteresis, fewer))

    def _say_that_the_loss_is_not_scaled(self, line: str) -> None:
        """Says once that the updates are too small because nobody multiplies the loss.

        Whether `scale_loss` was *ever* called is all that can be told: compiled functions call it only when traced.
        """
        if self.transparent or self._was_asked_to_scale or self._has_said_so:
            return
        self._has_said_so = True
        logging.getLogger("halfwise").warning(
            "%s divides the gradients by the loss scale (%g at first), but the loss was never multiplied by it: the "
            "gradients are that many times too small. Write, before the gradients are computed:\n    %s",
            self.name,
            self.initial_scale,
            line,
        )

    def get_config(self) -> dict[str, Any]:
        """As Keras', with those of the further settings that are not the default."""
        extra = {name: getattr(self._settings, name) for name in _EXTRA}
        return super().get_config() | {name: value for name, value in extra.items() if value != _DEFAULTS[name]}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """The optimizer that `get_config` describes."""
        return super().from_config(dict(config), custom_objects=custom_objects)

    def save_own_variables(self, store: Any) -> None:
        """Saves the state: that of the inner optimizer alone where the scale is fixed at 1."""
        if self.transparent:
            self.inner_optimizer.save_own_variables(store)
        else:
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads the state of this optimizer, of Keras' loss-scale optimizer, or of the inner optimizer alone."""
        missing = len(self.variables) - len(store.keys())
        if missing == len(self._variables):
            self.inner_optimizer.load_own_variables(store)
        elif self.built and missing == len(_OURS):
            theirs = self._variables[: -len(_OURS)] + self.inner_optimizer.variables
            for number, variable in enumerate(theirs):
                variable.assign(store[str(number)])
            bounded = ops.clip(self.dynamic_scale.value, self._settings.floor, self._settings.ceiling)
            self.dynamic_scale.assign(bounded)
        else:
            super().load_own_variables(store)

    def __dir__(self) -> list[str]:
        """Without `inner_optimizer`: Keras saves what it finds here, and would save the inner state twice."""
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "inner_optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("inner_optimizer")
        declared = name in LossScaleOptimizer.__annotations__ or hasattr(type(self), name) or name in self.__dict__
        if inner is None or name.startswith("_") or declared or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)


def _either(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`ops.cond`; but jax, where it is not compiling already, would compile both branches anew at every step."""
    if _BACKEND == "jax":
        import jax

        if not isinstance(condition, jax.core.Tracer):
            return then() if condition else otherwise()
    return ops.cond(condition, then, otherwise)


def _plain(number: Any) -> Any:
    """A NumPy number as Python's, anything else as it is."""
    return number.item() if isinstance(number, np.generic) else number


def _values(variables: Sequence[Any]) -> list[Any]:
    return [ops.convert_to_tensor(variable) for variable in variables]


def _divided(gradient: Any, scale: Any) -> Any:
    """The gradient by the scale, in float32: torch alone would divide one in half in half, where it may vanish."""
    if _BACKEND == "torch" and gradient.dtype.itemsize < 4:
        gradient = gradient.float()
    return ops.divide(gradient, scale)


def _norm(gradients: list[Any]) -> Any:
    """The 2-norm over all gradients: no dimensions, float32; infinite or NaN where its square is not finite.

    In one pass over each gradient, accumulated in float32.
    """
    if not gradients:
        return ops.zeros((), "float32")
    if _BACKEND == "tensorflow":
        import tensorflow as tf

        dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        return tf.sqrt(2.0 * tf.add_n([tf.nn.l2_loss(tf.cast(g, tf.float32)) for g in dense]))
    if _BACKEND == "jax":
        from jax import numpy as jnp
        from jax.experimental.sparse import JAXSparse

        dense = [g.data if isinstance(g, JAXSparse) else g for g in gradients]
        return jnp.sqrt(sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in dense))
    import torch

    norms = torch._foreach_norm([g.float() for g in gradients])
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return torch.where(norm <= _LARGEST_NORM, norm, norm * torch.inf)
