"""The evidence behind "auto": gathered from the training's own first batches, which train in float32 meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import keras

from halfwise.core.confirmation import confirmed
from halfwise.core.objective import Objective
from halfwise.core.plan import Plan, Rule
from halfwise.core.planner import EVIDENCE_STEPS, LEAST_GAIN, plan_from
from halfwise.core.profile import Profile
from halfwise.core.sensitivity import Sensitivity
from halfwise.core.sifting import Because
from halfwise.core.targets import HERE, get_target, kind_of
from halfwise.core.timing import TimingTable
from halfwise.keras.apply import AppliedPlan
from halfwise.keras.execution import LoopExecution
from halfwise.keras.guarded_step import VITALS, Step, read_vitals
from halfwise.keras.heads import HEAD_REASON, heads
from halfwise.keras.loss_scale import LossScaleOptimizer
from halfwise.keras.measure import LayerTimer, timed_layers
from halfwise.keras.names import routes
from halfwise.keras.optimizer import UNSCALED
from halfwise.keras.probe import tapped_layers
from halfwise.keras.profile import Recorder
from halfwise.keras.restore import attribute, put_back
from halfwise.keras.sensitivity import SensitivityProbe

__all__ = ["Evidence", "Trial", "set_by_hand"]


class Evidence:
    """Watches the first batches and then makes a plan.

    Args:
        model: what is trained, built.
        step: the training step.
        tolerance: share of training's own noise that rounding may add.
        timing: seconds per layer and format; None measures them on the second of the batches.
        by_hand: `path -> format` of the layers whose precision the user set; they keep it.
        objective: what the plan is to save.
        target: the hardware to plan for. For all but `"here"` times are estimated from float32's.
        earlier: a plan that exists; see `halfwise.core.planner.plan_from`.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Step,
        *,
        tolerance: float,
        timing: TimingTable | None,
        by_hand: Mapping[str, str] | None = None,
        objective: Objective = "time",
        target: str = HERE,
        earlier: Plan | None = None,
    ) -> None:
        self._objective: Objective = objective
        self._target = target
        self._earlier = earlier
        self._model = model
        self._step = step
        self._tolerance = tolerance
        self._supplied = timing
        self._by_hand = dict(by_hand or {})
        self._recorder = Recorder(model)
        self._timer = LayerTimer(model) if target == HERE else LayerTimer(model, ())
        self._probe = SensitivityProbe(model)
        self._losses: list[float] = []
        self._loss = float("nan")

    def use_step(self, step: Step) -> None:
        """Goes on with another training step."""
        self._step = step

    @property
    def complete(self) -> bool:
        """True where enough steps were seen."""
        return len(self._losses) >= EVIDENCE_STEPS

    @property
    def profile(self) -> Profile:
        """The exponent histograms so far."""
        return self._recorder.profile

    @property
    def timing(self) -> TimingTable:
        """The supplied timing table, what was measured so far, or for another target what is estimated from that."""
        if self._supplied is not None:
            return self._supplied
        if self._target == HERE:
            return self._timer.table
        layers, measured = timed_layers(self._model), self._timer.table
        kinds = {path: kind_of(type(layers[path]).__name__) for path in measured.seconds}
        full = {path: seconds["float32"] for path, seconds in measured.seconds.items()}
        return get_target(self._target).estimate(full, kinds, measured.saved)

    @property
    def sensitivity(self) -> Sensitivity:
        """What rounding would do, in the formats that are quick enough, and training's own noise, as seen so far."""
        return self._probe.sensitivity

    def observe(self, batch: Any, state: Any = None) -> None:
        """Looks at a batch before it is trained on: one step under observation, which changes nothing."""
        probed = self._recorder.record(batch, step=self._step, state=state)
        self._loss = probed.loss
        self._probe.add_gradients(probed)
        number = len(self._losses)
        if self._supplied is None and number == 1:
            self._timer.measure(batch, step=self._step, state=state)
        if number >= EVIDENCE_STEPS - 1:
            self._probe.look(batch, self._quick_enough(), step=self._step, state=state)

    def _quick_enough(self) -> list[str]:
        """The formats that save something somewhere: how sensitive layers are to others is no question."""
        timing = self.timing
        if self._objective != "time":
            return list(timing.formats)
        return [name for name in timing.formats if timing.saved_seconds(name) > LEAST_GAIN * timing.total("float32")]

    def keep_step(self) -> None:
        """Ends a step that was applied."""
        self._recorder.keep()
        self._probe.keep(self._loss)
        self._losses.append(self._loss)

    def drop_step(self) -> None:
        """Ends a step that was skipped: one bad batch says nothing about the layers."""
        self._recorder.discard()
        self._probe.drop()

    def plan(self, batch: Any, state: Any = None) -> Plan:
        """The plan, tried out on `batch` against float32 where the timing was measured here."""
        kept = self._kept()
        sensitivity = self.sensitivity
        plan = plan_from(
            self.profile,
            self.timing,
            sensitivity=sensitivity,
            tolerance=self._tolerance,
            objective=self._objective,
            target=self._target,
            framework="keras",
            model=type(self._model).__name__,
            kept=kept,
            earlier=self._earlier,
        )
        if plan.default.compute != "float32" and self._supplied is None and self._target == HERE:
            plan = confirmed(
                plan,
                Trial(self._model, self._step, batch, state),
                profile=self.profile,
                timing=self.timing,
                sensitivity=sensitivity,
                losses=self._losses,
                tolerance=self._tolerance,
                objective=self._objective,
                kept=kept,
            )
        return self._with_layers_by_hand(plan)

    def _kept(self) -> dict[str, Because]:
        kept: dict[str, Because] = dict.fromkeys(heads(self._model), HEAD_REASON)
        return kept | dict.fromkeys(self._by_hand, ("manual", "the layer was built with this precision"))

    def _with_layers_by_hand(self, plan: Plan) -> Plan:
        rules = {rule.path: rule for rule in plan.layers}
        for path, compute in self._by_hand.items():
            rule = rules.get(path) or Rule(path=path, compute=compute, reason="manual", detail="set by hand")
            plan = plan.with_rule(replace(rule, compute=compute))
        return plan


class Trial:
    """Runs a batch under one plan or another, forward and backward, compiled as in training; leaves no trace."""

    def __init__(self, model: keras.Model, step: Step, batch: Any, state: Any = None) -> None:
        self._model = model
        self._step = step
        self._batch = batch
        self._state = state
        self._optimizer = LossScaleOptimizer.of(_NoUpdate(), UNSCALED)
        self._optimizer.build(model.trainable_variables)
        self._executions: dict[int, tuple[Plan, LoopExecution]] = {}

    def __call__(self, plan: Plan) -> tuple[float, float]:
        """`(loss, seconds)`; the plan's first call compiles."""
        with ExitStack() as stack:
            stack.enter_context(put_back(self._model))
            for holder in (self._model, self._step):
                stack.enter_context(_optimizer_of(holder, self._optimizer))
            stack.enter_context(AppliedPlan(self._model, plan, settle=False))
            if id(plan) not in self._executions:
                execution = LoopExecution(self._model, self._step)
                execution.compile(self._optimizer)
                self._executions[id(plan)] = plan, execution
            _, execution = self._executions[id(plan)]
            state = self._state
            if state is not None:
                slots = [variable.value for variable in self._optimizer.variables]
                state = (state[0], state[1], slots, state[3])
            start = time.perf_counter()
            logs, *_ = execution.run(self._batch, state)
            vitals = read_vitals(logs[VITALS])
            seconds = time.perf_counter() - start
        return vitals.loss, seconds


class _NoUpdate(keras.optimizers.Optimizer):
    """Takes gradients and does nothing with them: what updates cost is the same in every precision."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Nothing."""

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:  # noqa: ARG002
        """Everything as it was."""
        return list(trainable_variables), list(optimizer_variables)


@contextmanager
def _optimizer_of(holder: Any, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    if not hasattr(holder, "optimizer"):
        yield
        return
    with attribute(holder, "optimizer", optimizer):
        yield


def set_by_hand(model: keras.Model, undecided: Mapping[str, Any]) -> dict[str, str]:
    """`path -> format` of the layers to which the user gave a precision, in a model that is else undecided."""
    layers = tapped_layers(model)
    if not any(path in undecided for path, layer in layers.items() if not routes(layer)):
        return {}  # a model that was cloned or read from a file: only what holds its layers is new
    return {
        path: layer.compute_dtype
        for path, layer in layers.items()
        if path not in undecided and not routes(layer) and keras.backend.is_float_dtype(layer.compute_dtype)
    }
