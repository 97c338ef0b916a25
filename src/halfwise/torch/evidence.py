"""The evidence behind "auto": gathered from the user's own first steps, which train in float32 meanwhile.

The first step shows ranges, the second times the layers, the last shows how sensitive they are to the formats that are
quick enough. All of them show how much losses and gradients differ from batch to batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from halfwise.core.confirmation import Trial, confirmed
from halfwise.core.objective import Objective
from halfwise.core.plan import Plan
from halfwise.core.planner import EVIDENCE_STEPS, LEAST_GAIN, plan_from
from halfwise.core.profile import Profile
from halfwise.core.sensitivity import Sensitivity
from halfwise.core.targets import HERE, get_target, kind_of
from halfwise.core.timing import TimingTable
from halfwise.torch.apply import AppliedPlan
from halfwise.torch.closure import Closure, split_loss
from halfwise.torch.measure import LayerTimer, half_formats, now, timed_layers
from halfwise.torch.names import named_layers, unwrap
from halfwise.torch.profile import Recorder, eager
from halfwise.torch.region import device_type_of, region
from halfwise.torch.sensitivity import SensitivityProbe
from halfwise.torch.snapshot import rehearsal

__all__ = ["Evidence", "WholeStep"]

_TIMING_STEPS = 6.0  # steps' worth of time that timing the layers may take
_LEAST_SECONDS = 0.1  # or so much, which nobody notices


class Evidence:
    """Watches the first steps and then makes a plan.

    Args:
        model: what is trained.
        tolerance: share of training's own noise that rounding may add.
        timing: seconds per layer and format; None measures them in the second of the steps.
        objective: what the plan is to save.
        target: the hardware to plan for. For all but `"here"` times are estimated from float32's.
        earlier: a plan that exists; see `halfwise.core.planner.plan_from`.

    Attributes:
        spent: seconds by what they were spent on: `"ranges"`, `"times"`, `"sensitivities"`, `"trial"`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tolerance: float,
        timing: TimingTable | None,
        objective: Objective = "time",
        target: str = HERE,
        earlier: Plan | None = None,
    ) -> None:
        if timing is not None:
            timing.check_paths((path for path, _ in named_layers(model)), type(unwrap(model)).__name__)
        self._model = model
        self._observing = False
        self._tolerance = tolerance
        self._supplied = timing
        self._objective: Objective = objective
        self._target = target
        self._earlier = earlier
        device_type = device_type_of(model)
        self._runs = half_formats(device_type) if target == HERE else get_target(target).runs
        self._recorder = Recorder(model)
        self._timer = LayerTimer(model, device_type, self._runs if target == HERE else ())
        rules = device_type if target == HERE else get_target(target).device_type
        self._probe = SensitivityProbe(model, device_type, rules=rules)
        self._losses: list[float] = []
        self._step_seconds = float("inf")
        self.spent = {"ranges": 0.0, "times": 0.0, "sensitivities": 0.0, "trial": 0.0}

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

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Around the forward and backward pass of one step."""
        if self._observing:  # a closure that enters the region itself is seen once
            yield
            return
        self._observing = True
        number = len(self._losses)
        start, spent = time.perf_counter(), self._spent_within()
        try:
            with ExitStack() as stack:
                stack.enter_context(eager())
                stack.enter_context(self._recorder.recording())
                if self._supplied is None and number == 1:
                    allowed = max(_TIMING_STEPS * self._step_seconds, _LEAST_SECONDS)
                    stack.enter_context(self._timer.timing(allowed))
                if number >= EVIDENCE_STEPS - 1:
                    stack.enter_context(self._probe.watching(self._quick_enough()))
                yield
        finally:
            self._observing = False
            own = self._spent_within() - spent
            self._step_seconds = min(self._step_seconds, time.perf_counter() - start - own)

    def _quick_enough(self) -> list[str]:
        """The formats that save something somewhere: how sensitive layers are to others is no question."""
        timing = self.timing
        if self._objective != "time":
            return list(timing.formats)
        least = LEAST_GAIN * timing.total("float32")
        return [name for name in timing.formats if timing.saved_seconds(name) > least]

    def _spent_within(self) -> float:
        spent = {"ranges": self._recorder.spent, "times": self._timer.spent, "sensitivities": self._probe.spent}
        self.spent |= spent
        return sum(spent.values())

    def record_gradients(self) -> None:
        """Takes the weights and their gradients into the step's evidence: unscaled, and before they are clipped."""
        self._recorder.record_parameters()
        self._probe.record_gradients()

    def add_step(self, loss: float) -> None:
        """Ends a step that was applied."""
        self._recorder.keep()
        self._probe.keep(loss)
        self._losses.append(loss)

    def drop_step(self) -> None:
        """Ends a step that was skipped: one bad batch says nothing about the layers."""
        self._recorder.discard()
        self._probe.drop()

    def plan(self, trial: Trial | None) -> Plan:
        """The plan, tried out against float32 where the timing was measured here and a `trial` can be made."""
        profile, timing, sensitivity = self.profile, self.timing, self.sensitivity
        plan = plan_from(
            profile,
            timing,
            sensitivity=sensitivity,
            tolerance=self._tolerance,
            objective=self._objective,
            target=self._target,
            model=type(unwrap(self._model)).__name__,
            earlier=self._earlier,
        )
        self._spent_within()
        here = self._supplied is None and self._target == HERE
        if plan.default.compute == "float32" or trial is None or not here:
            return plan
        start = time.perf_counter()
        plan = confirmed(
            plan,
            trial,
            profile=profile,
            timing=timing,
            sensitivity=sensitivity,
            losses=self._losses,
            tolerance=self._tolerance,
            objective=self._objective,
        )
        self.spent["trial"] += time.perf_counter() - start
        return plan


class WholeStep:
    """A `Trial`: runs a batch under one plan or another, forward and backward, and leaves no trace."""

    def __init__(self, model: nn.Module, closures: tuple[Closure, ...]) -> None:
        self._model = model
        self._closures = closures
        self._device_type = device_type_of(model)

    def __call__(self, plan: Plan) -> tuple[float, float]:
        """`(mean loss, seconds)`.

        The generators stand where they stood, so that dropout masks are the same each time.
        """
        losses = []
        with rehearsal(self._model), AppliedPlan(self._model, plan, whole_model=False):
            start = now(self._device_type)
            for closure in self._closures:
                with region(self._device_type, plan.default.compute):
                    loss, _ = split_loss(closure())
                loss.backward()
                losses.append(loss.detach().float().reshape(()))
            seconds = now(self._device_type) - start
        return float(torch.stack(losses).mean()), seconds
