"""The evidence behind "auto": gathered from the user's own first steps, which train in float32 meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from halfwise.core.confirmation import Trial, confirmed
from halfwise.core.plan import Plan
from halfwise.core.planner import EVIDENCE_STEPS, plan_from
from halfwise.core.profile import Profile
from halfwise.core.timing import TimingTable
from halfwise.torch.apply import AppliedPlan
from halfwise.torch.closure import Closure, split_loss
from halfwise.torch.measure import LayerTimer, half_formats, now
from halfwise.torch.names import named_layers, unwrap
from halfwise.torch.profile import Recorder, eager
from halfwise.torch.region import device_type_of, region
from halfwise.torch.snapshot import rehearsal

__all__ = ["Evidence", "WholeStep"]


class Evidence:
    """Watches the first steps and then makes a plan.

    Args:
        model: what is trained.
        tolerance: share of the loss's own spread over the evidence steps that a plan may change it by.
        timing: seconds per layer and format; None measures them in the last of the steps.
    """

    def __init__(self, model: nn.Module, *, tolerance: float, timing: TimingTable | None) -> None:
        if timing is not None:
            timing.check_paths((path for path, _ in named_layers(model)), type(unwrap(model)).__name__)
        self._model = model
        self._observing = False
        self._tolerance = tolerance
        self._supplied = timing
        self._recorder = Recorder(model)
        self._timer = LayerTimer(model, device_type_of(model), half_formats(device_type_of(model)))
        self._losses: list[float] = []

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
        """The supplied timing table, or what was measured so far."""
        return self._supplied if self._supplied is not None else self._timer.table

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Around the forward and backward pass of one step."""
        if self._observing:  # a closure that enters the region itself is seen once
            yield
            return
        self._observing = True
        try:
            with ExitStack() as stack:
                stack.enter_context(eager())
                stack.enter_context(self._recorder.recording())
                if self._supplied is None and len(self._losses) == EVIDENCE_STEPS - 1:
                    stack.enter_context(self._timer.timing())
                yield
        finally:
            self._observing = False

    def record_gradients(self) -> None:
        """Takes the weights and their gradients into the step's evidence: unscaled, and before they are clipped."""
        self._recorder.record_parameters()

    def add_step(self, loss: float) -> None:
        """Ends a step that was applied."""
        self._recorder.keep()
        self._losses.append(loss)

    def drop_step(self) -> None:
        """Ends a step that was skipped: one bad batch says nothing about the layers."""
        self._recorder.discard()

    def plan(self, trial: Trial | None) -> Plan:
        """The plan, tried out against float32 where the timing was measured here and a `trial` can be made."""
        profile, timing = self.profile, self.timing
        plan = plan_from(profile, timing, model=type(unwrap(self._model)).__name__)
        if plan.default.compute == "float32" or trial is None or self._supplied is not None:
            return plan
        return confirmed(plan, trial, profile=profile, timing=timing, losses=self._losses, tolerance=self._tolerance)


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
