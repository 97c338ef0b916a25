"""`PrecisionGuard`: the callback that carries out `"auto"` in `fit` and keeps the training alive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary, ref

import keras

from halfwise.core.diagnosis import Incident
from halfwise.core.objective import Objective
from halfwise.core.options import as_policy, check_options
from halfwise.core.plan import Plan
from halfwise.core.policy import disabled
from halfwise.core.profile import Profile
from halfwise.core.timing import TimingTable
from halfwise.errors import UsageError
from halfwise.keras import state
from halfwise.keras.engine import Engine
from halfwise.keras.execution import FitExecution, LoopExecution, Next, put_model_state
from halfwise.keras.loss_scale import LossScaleOptimizer
from halfwise.keras.optimizer import UNSCALED, set_optimizer
from halfwise.keras.probe import as_in_fit, built
from halfwise.keras.restore import put_back
from halfwise.keras.result import StepResult
from halfwise.keras.start import begin_engine
from halfwise.keras.training_step import OwnStep
from halfwise.keras.validate import check_model

__all__ = ["PrecisionGuard"]

_LOG = logging.getLogger("halfwise")


@dataclass(frozen=True)
class _Loop:
    """What a loop of the user's own trains."""

    model: keras.Model
    loss: Any
    optimizer: Any


_guards: WeakKeyDictionary[keras.Model, ref[PrecisionGuard]] = WeakKeyDictionary()  # those at work in a `fit`


class PrecisionGuard(keras.callbacks.Callback):
    """Trains a model in the precision that was asked for, under guard. A callback for `model.fit`.

    Under `"auto"` the first steps train in float32 while evidence is gathered; then a plan is made and applied. Under
    every policy a step whose gradients are not sound is skipped without a trace: weights, optimizer, moving statistics,
    seeds and metrics stay as they were. What skipping cannot cure is localised, the layer moved to float32, and the
    batch run again. Losses are scaled wherever something computes in float16. The logs get `loss_scale` and
    `skipped_steps`.

    Args:
        policy: `"auto"`, `"mixed_float16"`, `"mixed_bfloat16"`, `"float32"`, a `Plan`, or the path of a plan file.
            Default None takes what was said already: the plan on the model, the global policy under which its layers
            were built, or the layers' own policies.
        guard: True may change precision to heal a run, and says so; `"report"` diagnoses and never changes precision or
            stops; False only skips, with a bounded loss scale.
        tolerance: share of training's own noise that rounding may add under `"auto"`: of the loss's spread over batches
            for all layers together, of the variance of each layer's gradients; default a tenth.
        objective: what `"auto"` saves: `"time"`, `"memory"` (what is kept for the backward pass), or `"balanced"`.
        timing: seconds per layer and format for `"auto"`; default None measures them on this device.
        log: called with each message; default the logger `"halfwise"`.

    Raises:
        UsageError: something cannot be used as given; its subclass PolicyError for policies.
        TrainingStopped: from `fit`: the guard gave up. Weights are those of the last applied step.

    Source: the order of the parts of a step is that of Micikevicius et al., "Mixed Precision Training",
    arXiv 1710.03740, section 3.

    Example:
        >>> import keras, numpy as np, halfwise.keras as hw
        >>> hw.set_global_policy("mixed_bfloat16")
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> hw.set_global_policy("float32")
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> guard = hw.PrecisionGuard()
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[guard], verbose=0)
        >>> guard.steps, guard.skipped_steps, guard.plan.compute("dense")
        (1, 0, 'bfloat16')
    """

    def __init__(
        self,
        policy: str | Plan | PathLike[str] | None = None,
        *,
        guard: bool | Literal["report"] = True,
        tolerance: float = 0.1,
        objective: Objective = "time",
        timing: TimingTable | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        check_options(guard=guard, tolerance=tolerance, objective=objective, timing=timing, log=log)
        self._policy = None if policy is None else as_policy(policy)
        self._options: dict[str, Any] = {
            "guard": guard,
            "tolerance": tolerance,
            "objective": objective,
            "timing": timing,
        }
        self._log = log or _LOG.warning
        self._engine: Engine | None = None
        self._execution: FitExecution | None = None
        self._previous: Engine | None = None
        self._optimizer: Any = None
        self._make: Any = None
        self._loop: _Loop | None = None
        self._before = state.Before()
        self._loaded: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        plan = "no plan yet" if self.plan is None else self.plan.default.compute
        return (
            f"PrecisionGuard({plan}, loss_scale={self.loss_scale:g}, steps={self.steps}, "
            f"skipped_steps={self.skipped_steps}, incidents={len(self.incidents)})"
        )

    # What it knows

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before training, and while `"auto"` gathers evidence."""
        return self._engine.plan if self._engine is not None else self._before.plan

    @property
    def profile(self) -> Profile | None:
        """Exponent histograms: the evidence of `"auto"`; None before."""
        return self._engine.profile if self._engine is not None else None

    @property
    def timing(self) -> TimingTable | None:
        """The timing table that `"auto"` decided from, or None."""
        return self._engine.timing if self._engine is not None else None

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What the guard healed, reported or stopped, in order."""
        return tuple(self._engine.incidents) if self._engine is not None else self._before.incidents

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1.0 where none is used."""
        return self._engine.loss_scale if self._engine is not None else self._before.loss_scale

    @property
    def steps(self) -> int:
        """How many steps there were, the skipped ones included."""
        return self._engine.steps if self._engine is not None else self._before.steps

    @property
    def skipped_steps(self) -> int:
        """How many of the steps were skipped."""
        return self._engine.skipped_steps if self._engine is not None else self._before.skipped_steps

    @property
    def last_step(self) -> StepResult | None:
        """The outcome of the last step; None before the first."""
        return self._engine.last if self._engine is not None else None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs besides the saved model: guard, incidents, counters, plan. JSON-ready."""
        return state.state_dict(self._engine)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, at once or when training begins.

        Raises:
            UsageError: it is no such state.
        """
        self._before = state.Before.of(saved)
        self._loaded = saved
        if self._engine is not None:
            state.load_state_dict(self._engine, saved)
            self._loaded = None

    @contextmanager
    def attached(self, model: keras.Model) -> Iterator[Self]:
        """Within the block `model.train_on_batch`, which takes no callbacks, trains under this guard.

        Example:
            >>> import keras, numpy as np, halfwise.keras as hw
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            >>> model.compile(optimizer="sgd", loss="mse")
            >>> with hw.PrecisionGuard("float32").attached(model) as guard:
            ...     logs = model.train_on_batch(np.ones((8, 4)), np.ones((8, 1)), return_dict=True)
            >>> guard.steps, int(logs["skipped_steps"])
            (1, 0)
        """
        check_model(model)
        self.set_model(model)
        self.on_train_begin()
        self._stop_looking_for_another_fit()  # `train_on_batch` asks for its function each time
        try:
            yield self
        finally:
            self.on_train_end()

    # What Keras calls

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Takes the model's training over."""
        model = self._model
        check_model(model)
        if not isinstance(model.optimizer, keras.optimizers.Optimizer):
            raise UsageError(
                f"the model {model.name!r} has no optimizer of Keras that its steps go through (model.optimizer is "
                f"{model.optimizer!r}); compile it with one, as in model.compile(optimizer='adam', ...)"
            )
        if disabled():
            return
        entry = _guards.get(model)
        if entry is not None and (other := entry()) is not None:
            other._give_back()  # of a fit that ended with an error
        _guards[model] = ref(self)
        self._execution = FitExecution(model, self._train_function)
        self._optimizer = model.optimizer
        self._make = model.__dict__.get("make_train_function")
        model.__dict__["make_train_function"] = self._another_fit
        self._previous, self._engine = self._engine, None
        if keras.backend.backend() == "jax":  # `fit` takes the state of everything now
            self._begin(None)
        else:  # the first batch shows what is to be built
            if self._loaded is not None:
                state.put_generator(self._loaded)
            model.train_function = self._train_function

    def _another_fit(self, force: bool = False) -> Any:
        """In place of the model's `make_train_function`, which a `fit` calls before its callbacks.

        So this is a fit inside the guarded one, or one after it ended with an error in another callback.
        """
        model = self._model
        self._give_back()
        return model.make_train_function(force=force)

    def _stop_looking_for_another_fit(self) -> None:
        if self._make is None:
            self._model.__dict__.pop("make_train_function", None)
        else:
            self._model.__dict__["make_train_function"] = self._make

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """A new epoch's metrics begin."""
        if self._engine is not None:
            self._engine.epoch_begins()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Gives the model back; the plan stays in force."""
        self._give_back()

    # A loop of the user's own

    def _step(self, model: keras.Model, data: tuple[Any, ...], loss: Any, optimizer: Any) -> StepResult:
        """One step of `step.py`."""
        batch = keras.tree.map_structure(as_in_fit, data)
        loop = self._loop
        if loop is None or loop.model is not model or loop.optimizer is not optimizer or self._engine is None:
            self._begin_loop(model, batch, loss, optimizer)
            self._loop = _Loop(model, loss, optimizer)
        elif loop.loss is not loss and loop.loss != loss:
            own = OwnStep(model, loss)
            own.build(batch)
            self._engine.use_step(own)
            self._loop = _Loop(model, loss, optimizer)
        assert self._engine is not None
        self._engine.run(batch)
        assert self._engine.last is not None
        return self._engine.last

    def _begin_loop(self, model: keras.Model, batch: Any, loss: Any, optimizer: Any) -> None:
        own, before = OwnStep(model, loss), self._engine
        own.build(batch)
        if optimizer is None and not isinstance(getattr(model, "optimizer", None), keras.optimizers.Optimizer):
            raise UsageError(
                f"the model {model.name!r} has no optimizer: give step(..., optimizer=...), or compile it with one"
            )
        execution = LoopExecution(model, own)
        self._engine = begin_engine(model, execution, self._policy, optimizer=optimizer, log=self._log, **self._options)
        self._go_on(before)

    # Steps of `fit`

    def _begin(self, batch: Any) -> None:
        assert self._execution is not None
        model = self._model
        if batch is not None:
            with put_back(model):  # Keras draws from generators when it builds
                built(model, batch)
        self._engine = begin_engine(model, self._execution, self._policy, log=self._log, **self._options)
        self._go_on(self._previous)

    def _go_on(self, before: Engine | None) -> None:
        """A second training under the same guard goes on counting, and a saved one where it was saved."""
        assert self._engine is not None
        if before is not None:
            self._engine.go_on_from(before)
        if self._loaded is not None:
            state.load_state_dict(self._engine, self._loaded, generator=self._execution is None)
            self._loaded = None

    def _train_function(self, *args: Any) -> Any:
        """What `fit` calls for each execution: as many guarded steps as the model's `steps_per_execution` says."""
        stateless = len(args) == 2
        model_state = args[0] if stateless else None
        logs: dict[str, Any] = {}
        batches = iter(args[-1])
        try:
            for number in range(self._model.steps_per_execution):
                try:
                    batch = self._drawn(batches)
                    if self._engine is None:
                        self._begin(batch)
                    assert self._engine is not None
                    logs, model_state = self._engine.run(batch, model_state)
                except StopIteration:
                    if number == 0:
                        raise
                    break
        except StopIteration:
            raise
        except BaseException:
            self._rescue(model_state if self._engine is None else self._engine.state)
            raise
        return (logs, model_state) if stateless else logs

    def _drawn(self, batches: Any) -> Any:
        """The next batch; where nobody needs to see it before the step, the step draws it itself."""
        assert self._execution is not None
        if self._engine is not None and self._engine.evidence is None and self._execution.draws:
            import tensorflow as tf

            if isinstance(batches, tf.data.Iterator):
                return Next(batches)
        return next(batches)

    def _rescue(self, model_state: Any) -> None:
        """After an error: the model gets its variables, which on JAX `fit` has, and everything else back."""
        model = self._model
        if model_state is not None and not model._jax_state_synced:
            put_model_state(model, model.optimizer, model_state)
            model._jax_state_synced = True
        self._give_back()

    def _give_back(self) -> None:
        if self._execution is None:
            return
        model = self._model
        self._execution.end()
        self._execution = None
        self._stop_looking_for_another_fit()
        if self._engine is not None:
            self._engine.ended()
        if isinstance(model.optimizer, LossScaleOptimizer) and model.optimizer.settings == UNSCALED:
            set_optimizer(model, self._optimizer)
        model.make_train_function(force=True)  # a fit around this one goes on with Keras' own
        _guards.pop(model, None)
