"""`watch`: the read-only front door, for a training that exists. Its results stay as they were.

In `fit` each batch's step runs as Keras made it; only its logs and, where there is one, the loss scale are read
afterwards. A step that failed is looked at once more, beside the training, and the culprit named. In a loop of the
user's own, which Keras does not run, the optimizer is watched: is the loss scaled, are steps skipped?
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import keras
import numpy as np

from halfwise.core.diagnosis import Diagnosis
from halfwise.core.guard import GuardState, Observation, observe
from halfwise.errors import UsageError
from halfwise.keras.apply import AppliedPlan, applied_plan
from halfwise.keras.heads import half_heads, half_heads_text
from halfwise.keras.localise import localise
from halfwise.keras.start import plan_of_policies
from halfwise.keras.validate import check_model

__all__ = ["Watch", "watch"]

_LOG = logging.getLogger("halfwise")
_HALF = ("float16", "bfloat16")

_watches: WeakKeyDictionary[keras.Model, ref[Watch]] = WeakKeyDictionary()


def watch(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | None = None,
    *,
    log: Callable[[str], None] | None = None,
) -> Watch:
    """Watches the training of `model` and changes nothing in it.

    Args:
        model: trained by `fit`, `train_on_batch`, or a loop of your own.
        optimizer: the optimizer of a loop of your own; default the model's.
        log: called with each text, once for each distinct one; default the logger `"halfwise"`.

    Returns:
        A `Watch`, also a context manager; `.close()` removes it without a trace. A second watch of a model replaces the
        first.

    Raises:
        UsageError: an argument is of the wrong kind.

    Example:
        >>> import keras, numpy as np, halfwise.keras as hw
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> with hw.watch(model) as seen:
        ...     history = model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
        >>> seen.steps, seen.skipped_steps, seen.diagnoses
        (2, 0, [])
    """
    return Watch(model, optimizer, log=log)


class Watch:
    """What `watch` returns: the records of a watched training.

    Attributes:
        steps, skipped_steps: how many steps `fit` took, and how many of them a loss-scale optimizer skipped.
        loss_scale_history: `(step, scale)` at the beginning and after each change; steps count from 0.
        nonfinite_steps: the steps in which the loss was NaN or inf.
        diagnoses: all that were found, the latest last.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        *,
        log: Callable[[str], None] | None = None,
    ) -> None:
        check_model(model)
        if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise UsageError(f"watch(optimizer={optimizer!r}): give a keras.optimizers.Optimizer, or leave it out")
        if log is not None and not callable(log):
            raise UsageError(f"watch(log={log!r}): give a function that takes a text, such as print, or None")
        earlier = _watches.get(model)
        if earlier is not None and (old := earlier()) is not None:
            old.close()
        self.steps = 0
        self.skipped_steps = 0
        self.loss_scale_history: list[tuple[int, float]] = []
        self.nonfinite_steps: list[int] = []
        self.diagnoses: list[Diagnosis] = []
        self._model = model
        self._log = log or _LOG.warning
        self._said: set[object] = set()
        self._state = GuardState(settled=True)
        self._rest_until = 0
        self._rest = 10  # steps until the next diagnosis, ten times as many after each
        self._handles = [_patched(model, "make_train_function", self._make_train_function)]
        if optimizer is not None:
            self._handles += self._watched_optimizer(optimizer)
        _watches[model] = ref(self)
        self._tell_half_heads()

    def close(self) -> None:
        """Stops watching. Doing so twice is harmless."""
        for undo in self._handles:
            undo()
        if self._handles:
            self._model.train_function = None
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Within `fit`

    def _make_train_function(self, force: bool = False) -> Any:
        model = self._model
        if model.train_function is not None and not force:
            return
        type(model).make_train_function(model, force=force)
        inner = model.train_function

        def train_function(*args: Any) -> Any:
            return self._run(inner, *args)

        model.train_function = train_function

    def _run(self, inner: Callable[..., Any], *args: Any) -> Any:
        """As many steps as `fit` asks for, each of them looked at afterwards."""
        state, batches = (args[0] if len(args) == 2 else None), iter(args[-1])
        logs: Any = None
        for number in range(self._model.steps_per_execution):
            try:
                batch = next(batches)
            except StopIteration:
                if number == 0:
                    raise
                break
            before, kept = self._numbers(state), self._kept(state)
            if len(args) == 2:
                logs, state = inner(state, iter([batch]))
            else:
                logs = inner([batch] if keras.backend.backend() == "torch" else iter([batch]))
            self._look(batch, state, before, self._numbers(state), kept)
        return (logs, state) if len(args) == 2 else logs

    def _numbers(self, state: Any) -> tuple[float, float]:
        """`(sum of the losses so far, loss scale)`; NaN where there is none."""
        model = self._model
        tracker, optimizer = model._loss_tracker, model.optimizer
        scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if not {id(tracker.total)} <= {id(v) for v in model.metrics_variables}:
            return math.nan, math.nan  # a model with metrics of its own: nothing is known of its loss
        if state is None:
            scale = (optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale) if scaled else math.nan
            return _number(tracker.total), _number(scale)
        total = state[3][[id(v) for v in model.metrics_variables].index(id(tracker.total))]
        if not scaled:
            return _number(total), math.nan
        return _number(total), _number(
            state[2][[id(v) for v in optimizer.variables].index(id(optimizer.dynamic_scale))]
        )

    def _kept(self, state: Any) -> list[Any]:
        """Moving statistics before the step, which a bad one ruins: what comes of it is not to be blamed on them."""
        variables = self._model.non_trainable_variables
        values = [v.value for v in variables] if state is None else state[1]
        if keras.backend.backend() == "torch":
            return [value.detach().clone() for value in values]
        return [keras.ops.copy(value) for value in values]

    def _look(
        self, batch: Any, state: Any, before: tuple[float, float], after: tuple[float, float], kept: list[Any]
    ) -> None:
        step, self.steps = self.steps, self.steps + 1
        scale_before, scale = before[1], after[1]
        scaled, skipped = math.isfinite(scale), scale < scale_before
        if scaled and (not self.loss_scale_history or skipped or scale != self.loss_scale_history[-1][1]):
            self.loss_scale_history.append((step, scale))
        self.skipped_steps += skipped
        loss_finite = math.isfinite(after[0]) or not math.isfinite(before[0])  # what is NaN already tells nothing new
        if not loss_finite:
            self.nonfinite_steps.append(step)
        seen = Observation(
            loss_finite=loss_finite, gradients_sound=not skipped, scaled=scaled, at_floor=scaled and scale <= 1.0
        )
        self._state, action = observe(self._state, seen)
        if action == "localise" and step >= self._rest_until:
            self._diagnose(batch, state, scale_before if scaled else 1.0, kept)

    def _diagnose(self, batch: Any, state: Any, loss_scale: float, kept: list[Any]) -> None:
        variables = self._model.non_trainable_variables
        if state is not None:
            self._diagnosed(batch, (state[0], kept, *state[2:]), loss_scale)
            return
        after = [keras.ops.copy(v.value) for v in variables]
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)
        try:
            self._diagnosed(batch, None, loss_scale)
        finally:
            for variable, value in zip(variables, after, strict=True):
                variable.assign(value)

    def _diagnosed(self, batch: Any, state: Any, loss_scale: float) -> None:
        model = self._model
        plan = applied_plan(model) or plan_of_policies(model)
        half = next((name for name in _HALF if plan.uses(name)), "float32")
        diagnosis = localise(
            model,
            batch,
            plan=plan,
            apply_plan=lambda other: AppliedPlan(model, other, settle=False),
            loss_scale=loss_scale,
            half_format=half,
            state=state,
        )
        if diagnosis.verdict == "nonfinite_parameters" and not all(map(_is_finite, keras.tree.flatten(batch))):
            detail = "the batch holds NaN or inf, which the optimizer wrote into the weights"
            diagnosis = Diagnosis("nonfinite_input", detail=detail, fix=("# hw.PrecisionGuard() skips such steps",))
        self._rest_until, self._rest = self.steps + self._rest, 10 * self._rest
        self.diagnoses.append(diagnosis)
        self._say(diagnosis.text(), (diagnosis.verdict, diagnosis.module, diagnosis.operation, diagnosis.source))

    # In a loop of the user's own

    def _watched_optimizer(self, optimizer: keras.optimizers.Optimizer) -> list[Callable[[], None]]:
        asked = False

        def scale_loss(loss: Any) -> Any:
            nonlocal asked
            asked = True
            return type(optimizer).scale_loss(optimizer, loss)

        def apply(*args: Any, **kwargs: Any) -> Any:
            self._check_scaling(optimizer, asked)
            return type(optimizer).apply(optimizer, *args, **kwargs)

        def stateless_apply(*args: Any, **kwargs: Any) -> Any:
            self._check_scaling(optimizer, asked)
            return type(optimizer).stateless_apply(optimizer, *args, **kwargs)

        own = {"scale_loss": scale_loss, "apply": apply, "stateless_apply": stateless_apply}
        return [_patched(optimizer, name, function) for name, function in own.items()]

    def _check_scaling(self, optimizer: keras.optimizers.Optimizer, asked: bool) -> None:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            if not asked:
                self._say(
                    f"the loss is not scaled: {optimizer.name} divides the gradients by its loss scale, by which "
                    "nobody multiplied the loss. Before the gradients are computed: loss = optimizer.scale_loss(loss)",
                    "not scaled",
                )
        elif plan_of_policies(self._model).uses("float16"):
            self._say(
                f"layers of {self._model.name!r} compute in float16 and the loss is not scaled, so that small "
                "gradients become 0. Use optimizer = hw.LossScaleOptimizer(optimizer) and "
                "loss = optimizer.scale_loss(loss), or hw.step(model, x, y)",
                "no loss scaling",
            )

    def _tell_half_heads(self) -> None:
        plan = applied_plan(self._model) or plan_of_policies(self._model)
        if heads := half_heads(self._model, plan):
            self._say(half_heads_text(heads), "half heads")

    def _say(self, text: str, about: object) -> None:
        if about not in self._said:
            self._said.add(about)
            self._log(text)


def _patched(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Gives the object an attribute of its own; what comes back takes it away again."""
    owner.__dict__[name] = value
    return lambda: owner.__dict__.pop(name, None)


def _is_finite(array: Any) -> bool:
    values = None if array is None else keras.ops.convert_to_numpy(array)
    return values is None or values.dtype.kind not in "fV" or bool(np.isfinite(values.astype("float32")).all())


def _number(value: Any) -> float:
    return value if isinstance(value, float) else float(keras.ops.convert_to_numpy(value))
